"""What was tried, what came of it, and the table of it all."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).resolve().parents[1] / "results"


@dataclass(frozen=True, slots=True)
class Case:
    """One fault that struck.

    Attributes:
        where: What was running: autotune, Accumulator.step, the command line.
        kind: What went wrong.
        place: What part of the work it struck.
        step: At which call of that part, from 1; or at which share of the run.
        problems: What was not as it has to be afterwards; empty where the fault was survived.
    """

    where: str
    kind: str
    place: str
    step: float
    problems: tuple[str, ...] = ()


def summed(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """A row for each place and kind: how many faults struck there, and how many were survived."""
    rows: dict[tuple[str, str, str], list[int]] = {}
    for case in cases:
        row = rows.setdefault((case.where, case.kind, case.place), [0, 0])
        row[0] += 1
        row[1] += not case.problems
    return [
        {"where": where, "kind": kind, "place": place, "tried": tried, "survived": survived}
        for (where, kind, place), (tried, survived) in sorted(rows.items())
    ]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows, in Markdown."""
    lines = ["| what ran | fault | where it struck | tried | survived |", "|---|---|---|---|---|"]
    lines += [f"| {r['where']} | {r['kind']} | {r['place']} | {r['tried']:,} | {r['survived']:,} |" for r in rows]
    return "\n".join(lines)


def write(cases: Sequence[Case], environment: dict[str, Any], only: str | None = None) -> None:
    """Write benchmarks/results/faults.json and faults.md; what was not survived is in both.

    Args:
        only: These are all cases of this kind; those of other kinds stay as they are there.
    """
    path = RESULTS / "faults.json"
    rows, failures = summed(cases), [asdict(case) for case in cases if case.problems]
    if only is not None and path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        rows += [row for row in before["rows"] if row["kind"] != only]
        failures += [case for case in before["not_survived"] if case["kind"] != only]
    rows.sort(key=lambda row: (row["where"], row["kind"], row["place"]))
    found = {"environment": environment, "rows": rows, "not_survived": failures}
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (RESULTS / "faults.md").write_text(markdown(found), encoding="utf-8")


def markdown(found: dict[str, Any]) -> str:
    """The table, and below it everything that was not survived."""
    tried, survived = (sum(row[name] for row in found["rows"]) for name in ("tried", "survived"))
    lines = ["# Faults", "", f"{tried:,} tried, {survived:,} survived: afterwards the right error or exit code came out,"]
    lines += ["everything was put back or the process was gone, nothing was left behind, and the next call worked."]
    lines += [f"torch {found['environment']['torch']}.", "", table(found["rows"])]
    if found["not_survived"]:
        lines += ["", "## Not survived", ""]
        for case in found["not_survived"]:
            problems = " ".join("; ".join(case["problems"]).split())[:300]
            lines.append(f"* {case['where']}, {case['kind']}, {case['place']} {case['step']:g}: {problems}")
    return "\n".join(lines) + "\n"


def environment(wall_s: float) -> dict[str, Any]:
    """On what all of this ran, and how long."""
    return {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "wall_s": round(wall_s, 1),
    }
