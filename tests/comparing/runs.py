"""Made-up runs to compare, and what came of a measurement of theirs."""

from __future__ import annotations

from typing import Any

from autoaccum.comparing.compare import compare
from autoaccum.comparing.records import Row, Run, Verdict
from autoaccum.records import (
    Candidate,
    Environment,
    Fit,
    Levers,
    Outcome,
    OutOfMemory,
    PlanRecord,
    ProbeResult,
    Setting,
    Timing,
    Trial,
)

HOST = Environment(
    device="cpu",
    device_name="x86_64, 4 threads",
    model="Gpt",
    optimizer="AdamW",
    batch="the sample's 8 rows",
    python_version="3.12.3",
    torch_version="2.13.0",
    autoaccum_version="1.0.0",
    platform="Linux",
)
FULL = OutOfMemory(cause="allocator")
PLAIN = Levers()
HALF = Levers(checkpointing="selective", checkpointed_blocks=2)
WHOLE = Levers(checkpointing="full", checkpointed_blocks=4)


def trial(size: int, outcome: Outcome | int, purpose: Any = "probe", rows: int = 64, levers: Levers = PLAIN) -> Trial:
    found = Fit(peak_bytes=outcome) if isinstance(outcome, int) else outcome
    candidate = Candidate(micro_batch=size, levers=levers)
    return Trial(candidate=candidate, outcome=found, wall_s=1.0, rows_per_step=rows, purpose=purpose)


def timing(median_s: float, interval_frac: float | None = 0.01, num: int = 20) -> Timing:
    return Timing(
        median_s=median_s,
        first_quartile_s=0.99 * median_s,
        third_quartile_s=1.01 * median_s,
        num=num,
        interval_frac=interval_frac,
    )


def plan(size: int = 32, peak: int | None = 1000, step_s: float | Timing | None = 1.0, **changes: Any) -> PlanRecord:
    """A plan of 64 rows in equal micro-batches of `size`."""
    steps = 64 // size
    fields: dict[str, Any] = {
        "target_batch": 64,
        "world_size": 1,
        "effective_batch": 64,
        "micro_batch": size,
        "accumulation_steps": steps,
        "micro_batch_sizes": (size,) * steps,
        "max_micro_batch": size,
        "limited_by": "memory",
        "evidence": "exact",
        "budget_bytes": 2000,
        "measured_peak_bytes": peak,
        "timing": timing(step_s) if isinstance(step_s, float) else step_s,
        "environment": HOST,
    }
    return PlanRecord(**{**fields, **changes})


def result(size: int = 40, peak: int = 1000, **changes: Any) -> ProbeResult:
    fields: dict[str, Any] = {
        "limited_by": "memory",
        "evidence": "exact",
        "budget_bytes": 2000,
        "trials": (trial(size, peak), trial(size + 1, FULL)),
        "environment": HOST,
    }
    return ProbeResult(max_micro_batch=size, measured_peak_bytes=peak, **{**fields, **changes})


def setting(levers: Levers, peak: int | None = 500, step_s: float | None = 2.0, size: int = 64, **changes: Any) -> Setting:
    found = None if step_s is None else timing(step_s)
    fields = {"standing": "measured", "accumulation_steps": 64 // size, "timing": found, **changes}
    return Setting(levers=levers, micro_batch=size, peak_bytes=peak, **fields)


def rows_of(base: Run, new: Run, allowed: float = 0.05, **options: Any) -> dict[tuple[str, str], Row]:
    """The rows, by what and metric, where each occurs once."""
    return {(row.part, row.metric): row for row in compare(base, new, allowed, **options).rows}


def verdict_on(base: Run, new: Run, part: str, metric: str, allowed: float = 0.05) -> Verdict:
    return rows_of(base, new, allowed)[part, metric].verdict
