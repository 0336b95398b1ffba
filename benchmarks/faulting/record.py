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


def write(cases: Sequence[Case], environment: dict[str, Any]) -> None:
    """Write benchmarks/results/faults.json and faults.md; what was not survived is in both."""
    rows, failures = summed(cases), [case for case in cases if case.problems]
    found = {"environment": environment, "rows": rows, "not_survived": [asdict(case) for case in failures]}
    (RESULTS / "faults.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    lines = [
        "# Faults",
        "",
        f"{len(cases):,} tried, {len(cases) - len(failures):,} survived: afterwards the right error or exit",
    ]
    lines += ["code came out, everything was put back or the process was gone, nothing was left, and the next call worked."]
    lines += [f"torch {environment['torch']}, {environment['wall_s']:.0f} s.", "", table(rows)]
    if failures:
        lines += ["", "## Not survived", ""]
        lines += [f"* {c.where}, {c.kind}, {c.place} {c.step:g}: {'; '.join(c.problems)[:300]}" for c in failures]
    (RESULTS / "faults.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def environment(wall_s: float) -> dict[str, Any]:
    """On what all of this ran, and how long."""
    return {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "wall_s": round(wall_s, 1),
    }
