"""One measurement of both runs: its verdict, and what explains that.

A row counts as a regression only where the kindest ends of both figures are further apart than allowed.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from autoaccum.comparing.records import Figure, Metric, Part, Row, Run, Verdict
from autoaccum.records import Candidate

_ROUNDING_FRAC = 1e-9  # exactly as much as is allowed is allowed, however the floats round


def judged(
    part: Part,
    metric: Metric,
    candidates: tuple[Candidate, Candidate],
    figures: tuple[Figure | None, Figure | None],
    allowed_frac: float,
    *,
    unlike: str = "",
) -> Iterator[Row]:
    """The row of one measurement, or none where neither run has it. `unlike`: why it is shown and not judged."""
    base, new = figures
    note, change_frac = unlike, None
    if base is None and new is None:
        return
    if base is None or new is None:
        verdict: Verdict = "only in new" if base is None else "only in base"
    else:
        change_frac = new.value / base.value - 1
        verdict = "not compared" if unlike else _verdict(metric, base, new, allowed_frac)
        note = unlike or _reason(metric, verdict, base, new)
    yield Row(
        part=part,
        metric=metric,
        base_candidate=candidates[0],
        new_candidate=candidates[1],
        base=base,
        new=new,
        change_frac=change_frac,
        verdict=verdict,
        note=note,
    )


def _verdict(metric: Metric, base: Figure, new: Figure, allowed_frac: float) -> Verdict:
    """What two measurements say, whatever they are between their ends; "too ... to tell" where that depends."""
    less, more = 1 - allowed_frac - _ROUNDING_FRAC, 1 + allowed_frac + _ROUNDING_FRAC
    if metric in ("samples_per_s", "max_micro_batch"):
        regressed, improved, is_kept = new.top < base.low * less, new.low > base.top * more, new.low >= base.top * less
    else:
        regressed, improved, is_kept = new.low > base.top * more, new.top < base.low * less, new.top <= base.low * more
    if regressed:
        return "regressed"
    if improved:
        return "improved"
    if is_kept:
        return "ok"
    is_coarse = metric == "max_micro_batch" or (metric == "peak_bytes" and None in (base.high, new.high))
    return "too coarse to tell" if is_coarse else "too noisy to tell"


def _reason(metric: Metric, verdict: Verdict, base: Figure, new: Figure) -> str:
    """What a row's figures leave unsaid."""
    if metric == "max_micro_batch" and verdict == "too coarse to tell":
        tried = f"sizes up to {new.top:.0f} were not tried" if new.high else "memory is not what limits the new one"
        return f"{tried}, so how much was lost is not known"
    if metric == "peak_bytes" and None in (base.high, new.high):
        return f"did not fit in {'base' if base.high is None else 'new'}"
    if metric == "samples_per_s" and None in (base.high, new.high):
        return "too few optimizer steps were timed"
    return ""


def within_budgets(row: Row, base: Run, new: Run) -> Row:
    """The row as it is, unless a different budget explains what changed."""
    is_smaller, is_larger = new.budget_bytes < base.budget_bytes, new.budget_bytes > base.budget_bytes
    if not ((row.verdict == "regressed" and is_smaller) or (row.verdict == "improved" and is_larger)):
        return row
    size = "smaller" if is_smaller else "larger"
    return msgspec.structs.replace(row, verdict="not compared", note=f"the new budget is {size}")
