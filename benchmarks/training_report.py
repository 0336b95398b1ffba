"""What training.py measured, as ratios with their spread, and as tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
from search import mib, table

BASE = "plan, exact levers"  # what ratios are over
BY_HAND = "loop by hand"
IDLE_LOAD = 1.0  # of the system before anything is started


def ratio_of(times: Sequence[float], base: Sequence[float]) -> tuple[float, float, float]:
    """The ratio of two medians, and its 95 % interval, by drawing the rounds anew."""
    drawn = np.random.default_rng(0).integers(len(times), size=(2000, len(times)))
    ratios = np.median(np.array(times)[drawn], axis=1) / np.median(np.array(base)[drawn], axis=1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return median(times) / median(base), float(low), float(high)


def paid_back(tuning_s: float, step_s: float, today_s: float) -> int | None:
    """After how many optimizer steps a search has been paid for by faster ones, None where they are not faster."""
    saved_s = today_s - step_s
    return None if saved_s <= 0 else max(0, -int(-tuning_s // saved_s))


def summary_of(case: dict[str, Any]) -> list[dict[str, Any]]:
    """Each way: its median step, by how much the plan is faster, and when the plan's search is paid back."""
    times = {way["way"]: way["step_times_s"] for way in case["ways"]}
    today = next(way for way in case["ways"] if way["way"] == BY_HAND)
    rows = []
    for way in case["ways"]:
        own = way["step_times_s"]
        ratio, low, high = ratio_of(own, times[BASE])
        row = {"median_s": median(own), "over_plan": ratio, "over_plan_low": low, "over_plan_high": high}
        if "levers" in way:
            more_s = way["tuning_s"] - today["tuning_s"]
            row["paid_back_steps"] = paid_back(more_s, median(own), median(today["step_times_s"]))
        rows.append(way | row)
    return rows


ABOUT = """\
Every way has the same cap on memory (RLIMIT_DATA: what a process has when its model is built, and a room), settings of
malloc, weights, rows and target batch; one optimizer step of each in turn. "Over the plan": the ratio of the medians to
that of the plan with exact levers, with its 95 % interval; above 1 the plan is faster. Error of the gradient: distance from
the gradient of all rows in one, over its norm, in windows of whole micro-batches and in windows whose last micro-batch is
short; rows of the GPT's text have different numbers of labels. BatchNorm's statistics are those of a micro-batch in every
way, so that no way has the gradient of the large batch there. Trainer's optimizer is the one that it takes by itself, the
fused AdamW. Found after: seconds of the search (for the loop by hand: of halving, without what starting Python again
takes). Paid back: after so many optimizer steps the search has cost less than halving and the loop by hand.
"""


def in_words(report: dict[str, Any]) -> str:
    """The results as Markdown."""
    about = ", ".join(f"{name} {value}" for name, value in report["environment"].items())
    parts = ["# Time to the target batch\n", f"`python benchmarks/training.py`: {about}.\n", ABOUT]
    load = report["environment"].get("load_average", 0.0)
    if load > IDLE_LOAD:
        parts.append(f"The machine was busy with other work (load average {load}): these times say little.\n")
    header = ["way", "micro-batches", "step, s", "over the plan", "gradient error, full / short", "found after", "paid back"]
    for case in report["models"]:
        cap = mib(case["cap_bytes"], 0)
        parts.append(f"## {case['model']}, {case['target_batch']} rows per optimizer step in {cap} MiB\n")
        parts.append(table(header, [row_of(way) for way in summary_of(case)]))
    return "\n".join(parts)


def row_of(way: dict[str, Any]) -> list[str]:
    """One way as a row of the table."""
    first, _, third = quantiles(way["step_times_s"], n=4)
    sizes, error, back = way["micro_batch_sizes"], way["gradient_error"], way.get("paid_back_steps", "")
    levers = f" (levers: {way['levers']})" if "levers" in way else ""
    events = "".join(f", {way[what]} {word}" for what, word in (("replays", "replays"), ("died", "deaths")) if way.get(what))
    return [
        way["way"] + levers,
        f"{len(sizes)} of at most {max(sizes)}{events}",
        f"{way['median_s']:.3f} ({first:.3f} to {third:.3f})",
        f"{way['over_plan']:.3f} ({way['over_plan_low']:.3f} to {way['over_plan_high']:.3f})",
        f"{error['full']:.1e} / {error['short']:.1e}",
        f"{way['tuning_s']:.1f} s" if "tuning_s" in way else "",
        "never" if back is None else f"{back} steps" if back != "" else "",
    ]


def write(report: dict[str, Any], path: Path) -> None:
    """Write JSON, and the same as tables."""
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(in_words(report), encoding="utf-8")
