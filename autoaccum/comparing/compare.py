"""The comparison of two runs: refused where they are not alike, else every measurement that they share."""

from __future__ import annotations

from autoaccum.comparing.conditions import environment_notes, refuse_unlike, request_notes
from autoaccum.comparing.records import JUDGED, Comparison, Run
from autoaccum.comparing.rows import headline_rows, setting_rows, trial_rows
from autoaccum.errors import InvalidRequestError
from autoaccum.records import PlanRecord
from autoaccum.units import one_line


def compare(
    base: Run,
    new: Run,
    max_regression_frac: float,
    *,
    base_name: str = "base",
    new_name: str = "new",
    allow_different_environments: bool = False,
) -> Comparison:
    """Put every measurement that two runs share side by side and say which became worse by more than allowed.

    Args:
        max_regression_frac: What is allowed, as a fraction: how much a peak may grow, and a rate or a size may fall.
        base_name: What the runs are called in errors and in the report.
        allow_different_environments: Compare although device, model, optimizer, torch, Python or world size differ.

    Raises:
        InvalidRequestError: When the runs cannot be compared; the message lists what differs.
    """
    names = f"{one_line(base_name)} and {one_line(new_name)}"
    refuse_unlike(base, new, names)
    notes = environment_notes(base.environment, new.environment, names, allow_different_environments)
    rows = [*headline_rows(base, new, max_regression_frac)]
    if isinstance(base, PlanRecord) and isinstance(new, PlanRecord):
        rows += setting_rows(base, new, max_regression_frac)
    rows += trial_rows(base, new, max_regression_frac)
    if not any(row.verdict in JUDGED for row in rows):
        raise InvalidRequestError(f"{names} have no measurement in common; probe both with the same sizes and budget.")
    return Comparison(
        base_name=one_line(base_name),
        new_name=one_line(new_name),
        max_regression_frac=max_regression_frac,
        passed=all(row.verdict != "regressed" for row in rows),
        rows=tuple(rows),
        notes=(*notes, *request_notes(base, new)),
    )
