"""Plans remembered in a folder: a second start with the same model, data, device and request costs one probe.

The files are JSON; one that is damaged, old, or not of this very setup is ignored with a warning.
"""

from __future__ import annotations

from pathlib import Path
from typing import final

import msgspec

from autoaccum.choose import of_rank
from autoaccum.errors import AutoaccumError
from autoaccum.files import MOST_BYTES, write_whole
from autoaccum.fingerprint import digest, fingerprint_of
from autoaccum.levers.blocks import find_blocks
from autoaccum.records import Fit, PlanRecord, Record, from_json, to_json
from autoaccum.session import Search
from autoaccum.units import one_line


class _File(Record, frozen=True, kw_only=True):
    """What lies in a file: `plan` is the JSON of a plan."""

    fingerprint: dict[str, str]
    plan: str


@final
class Cache:
    """The remembered plan of one search; the folder need not be there yet. With several ranks only the first one touches it.

    Args:
        folder: What the first rank was given counts.
    """

    def __init__(self, folder: str | Path | None, search: Search) -> None:
        self._search = search
        self._is_first = search.ranks.rank == 0
        self._fingerprint = fingerprint_of(search.workload, search.device, search.request, search.ranks.world_size)
        self._path = Path(folder or "") / f"{digest(self._fingerprint)[:24]}.json"

    def verified(self) -> PlanRecord | None:
        """The remembered plan, if its micro-batch still fits, which one probe shows; else None.

        Every rank probes.
        """
        found = self._search.ranks.gather(self._read() if self._is_first else None)[0]
        if found is None:
            return None
        trial = self._search.probe(found.levers, found.micro_batch)
        if not isinstance(trial.outcome, Fit):
            self._search.warnings.append(
                f"The remembered plan ({self._path.name}) does not fit any more, so the search was run again."
            )
            return None
        return msgspec.structs.replace(
            of_rank(found, self._search.ranks.rank),
            evidence="measured",
            budget_bytes=self._search.budget.budget_bytes,
            measured_peak_bytes=trial.outcome.peak_bytes,
            trials=tuple(self._search.log.trials),
            warnings=(*found.warnings, "A remembered plan, verified by one probe; what it is based on was run before."),
            environment=self._search.environment(),
        )

    def remember(self, plan: PlanRecord) -> PlanRecord:
        """Write the plan down; where that cannot be, the plan says so. One that the clock cut short is not worth keeping."""
        if self._search.time_is_up or not self._is_first:
            return plan
        text = to_json(_File(fingerprint=self._fingerprint, plan=to_json(plan)))
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._path.exists() and not self._path.is_file():
                raise OSError(f"{self._path} is no file")
            write_whole(self._path, text)
        except OSError as error:
            note = f"The plan could not be remembered: {one_line(str(error), 400)}."
            return msgspec.structs.replace(plan, warnings=(*plan.warnings, note))
        return plan

    def _is_of_this_call(self, plan: PlanRecord) -> bool:
        """Whether the plan can be meant: a file may have been edited."""
        search = self._search
        ours = search.request.target_batch, search.ranks.world_size, search.ranks.rank
        blocks = len(find_blocks(search.workload.module, plan.levers.block_names))
        return (plan.target_batch, plan.world_size, plan.rank) == ours and plan.levers.checkpointed_blocks <= blocks

    def _read(self) -> PlanRecord | None:
        try:
            if not self._path.exists():
                return None
            if not self._path.is_file() or self._path.stat().st_size > MOST_BYTES:
                raise OSError("it is no file of a plan")
            held = msgspec.json.decode(self._path.read_bytes(), type=_File)
            if held.fingerprint != self._fingerprint:
                raise OSError("it is of another setup")
            plan = from_json(held.plan, PlanRecord)
            if not self._is_of_this_call(plan):
                raise OSError("its plan is of another call")
            return plan
        except (OSError, msgspec.MsgspecError, AutoaccumError, RecursionError, ValueError) as error:
            self._search.warnings.append(f"The remembered plan {self._path} was ignored: {one_line(str(error), 400)}.")
            return None
