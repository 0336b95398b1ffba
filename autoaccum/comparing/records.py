"""What a comparison of two runs consists of: figures, rows and verdicts."""

from __future__ import annotations

from math import inf
from typing import Literal

from autoaccum.records import SCHEMA_VERSION, Candidate, PlanRecord, ProbeResult, Record

Run = PlanRecord | ProbeResult
Part = Literal["plan", "probe result", "setting", "probe trial", "confirm trial"]
Metric = Literal["peak_bytes", "predicted_peak_bytes", "samples_per_s", "max_micro_batch"]
Verdict = Literal[
    "ok",
    "improved",
    "regressed",
    "too noisy to tell",
    "too coarse to tell",
    "not compared",
    "only in base",
    "only in new",
]
JUDGED = ("ok", "improved", "regressed", "too noisy to tell", "too coarse to tell")  # the verdicts on two measurements


class Figure(Record, frozen=True, kw_only=True):
    """A measurement, and the ends between which it may lie; `high` None: anything above is possible."""

    value: float
    low: float
    high: float | None

    @property
    def top(self) -> float:
        """The upper end."""
        return inf if self.high is None else self.high


class Row(Record, frozen=True, kw_only=True):
    """One measurement in both runs, and what came of it.

    `part`: what was measured: the plan (its chosen setting), the probe's result, another setting, or a single trial.
    `change_frac`: new over base, less one; None where one of them is missing. `note` is a sentence in Markdown.
    """

    part: Part
    metric: Metric
    base_candidate: Candidate | None = None
    new_candidate: Candidate | None = None
    base: Figure | None = None
    new: Figure | None = None
    change_frac: float | None = None
    verdict: Verdict
    note: str = ""


class Comparison(Record, frozen=True, kw_only=True, tag_field="record", tag="autoaccum.Comparison"):
    """Two runs against each other. `passed`: no row regressed. `notes` are sentences in Markdown."""

    schema_version: int = SCHEMA_VERSION
    base_name: str
    new_name: str
    max_regression_frac: float
    passed: bool
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
