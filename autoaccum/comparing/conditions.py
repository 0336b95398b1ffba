"""Whether two runs can be compared, and what differs beside their measurements."""

from __future__ import annotations

from collections.abc import Mapping

from autoaccum.comparing.figures import chosen_in, is_foreseen
from autoaccum.comparing.records import Run
from autoaccum.comparing.words import code_span, in_words
from autoaccum.errors import InvalidRequestError
from autoaccum.records import Environment, PlanRecord
from autoaccum.units import format_bytes, one_line, shown


def refuse_unlike(base: Run, new: Run, names: str) -> None:
    """Raise where two runs measure different things, whatever the caller allows."""
    if isinstance(base, PlanRecord) != isinstance(new, PlanRecord):
        kinds = ["a Plan" if isinstance(run, PlanRecord) else "a ProbeResult" for run in (base, new)]
        raise InvalidRequestError(
            f"{names} are {kinds[0]} and {kinds[1]}, which measure different things; give both runs the same --target-batch "
            "or none."
        )
    if isinstance(base, PlanRecord) and isinstance(new, PlanRecord) and base.target_batch != new.target_batch:
        raise InvalidRequestError(
            f"{names} take optimizer steps of target_batch={base.target_batch} and {new.target_batch} samples; expected the "
            "same --target-batch in both."
        )
    if is_foreseen(base) != is_foreseen(new):
        raise InvalidRequestError(
            f"of {names} one was measured and the other only predicted; compare two runs of `autoaccum probe` or two of "
            "`autoaccum predict`."
        )


def _conditions(environment: Environment) -> dict[str, object]:
    """What must be the same for two measurements to be alike. Which of several equal devices was used does not matter."""
    return {
        "device": environment.device.partition(":")[0],
        "device_name": environment.device_name,
        "model": environment.model,
        "optimizer": environment.optimizer,
        "torch_version": environment.torch_version,
        "python_version": ".".join(environment.python_version.split(".")[:2]),  # the interpreter is part of a host's peak
        "world_size": environment.world_size,
    }


def environment_notes(base: Environment | None, new: Environment | None, names: str, allowed: bool) -> list[str]:
    """What differs beside the measurements; refused where it makes them unlike and that is not allowed."""
    if base is None or new is None:
        if allowed:
            return ["At least one run does not say where it was measured."]
        raise InvalidRequestError(
            f"of {names} at least one does not say where it was measured (environment); expected files of "
            "`autoaccum probe --json`, or pass --allow-different-environments."
        )
    unlike = _differences(_conditions(base), _conditions(new))
    if unlike and not allowed:
        listed = "; ".join(f"{name} is {_shown(one)} and {_shown(other)}" for name, (one, other) in unlike.items())
        raise InvalidRequestError(
            f"{names} were not measured under the same conditions: {listed}. Measure both on one machine with one set of "
            "versions, or pass --allow-different-environments."
        )
    beside = ("batch", "driver", "platform", "autoaccum_version")  # these alone refuse nothing
    told = _differences(*({name: getattr(run, name) for name in beside} for run in (base, new)))
    return [
        f"{name} differs: {code_span(one)} in base, {code_span(other)} in new."
        for name, (one, other) in (unlike | told).items()
    ]


def request_notes(base: Run, new: Run) -> list[str]:
    """What was asked for differently, and what follows from that."""
    notes = []
    if base.budget_bytes != new.budget_bytes:
        notes.append(
            f"The budgets differ ({format_bytes(base.budget_bytes)} in base, {format_bytes(new.budget_bytes)} in new), and "
            "the largest micro-batch and the choice depend on it; give both runs the same budget."
        )
    for name in ("multiple_of", "equal_micro_batches", "objective", "rank"):
        one, other = getattr(base, name, None), getattr(new, name, None)
        if one != other:
            notes.append(f"{name} differs: {code_span(one)} in base, {code_span(other)} in new.")
    if isinstance(base, PlanRecord) and chosen_in(base) != chosen_in(new):
        notes.append(
            f"Another setting was chosen: {in_words(chosen_in(base))} in base, {in_words(chosen_in(new))} in new; their "
            "peaks are shown and not judged."
        )
    return notes


def _differences(base: Mapping[str, object], new: Mapping[str, object]) -> dict[str, tuple[object, object]]:
    return {name: (base[name], new[name]) for name in base if base[name] != new[name]}


def _shown(value: object) -> str:
    return shown(one_line(value) if isinstance(value, str) else value)
