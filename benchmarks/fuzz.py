"""Hostile input: what comes of sizes, samples, saved runs, targets, files and reports that nobody would write.

    python benchmarks/fuzz.py run [--cases 100000] [--only plans,samples [--keep]] [--seed 0]

Every case ends in a result that keeps its promise or in an error of autoaccum's own: with a text, of at most 1,000 letters
and without control characters, within 10 seconds and a fixed amount of memory. Anything else is a fault, and each kind of
fault is listed once with how often it was met. Written: `results/fuzz.json` and `results/fuzz.md`.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))  # also where this file is loaded by its path

import torch
from hostile import files, reports, runs, samples, sizes, targets
from hostile.judging import LIMIT_BYTES, LIMIT_S, MOST_LETTERS, memory_limited, verdict_on
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

RESULTS = Path(__file__).parent / "results"
TOGETHER = 10  # cases of one example of hypothesis, which costs more than a case does
EXAMPLES = 500  # of one run of hypothesis, whose memory of what was tried grows with it


class Input(NamedTuple):
    """Something that a caller or a file can hand to the library. `weight`: its part of the cases, in thousandths."""

    cases: st.SearchStrategy[Any]
    check: Callable[[Any], object]
    weight: int


INPUTS = {
    "GPU names": Input(sizes.GPU_NAMES, sizes.check_gpu, 80),
    "samples": Input(samples.CASES, samples.check, 30),
    "plans": Input(runs.TEXTS, runs.check_plan, 20),
    "saved runs": Input(runs.TEXTS, runs.check_report, 8),
    "comparisons": Input(runs.PAIRS, runs.check_comparison, 22),
    "pages": Input(reports.CASES, reports.check_html, 2),
    "Markdown": Input(reports.CASES, reports.check_markdown, 3),
    "targets": Input(targets.CASES, targets.check, 30),
    "transformers targets": Input(targets.HF_CASES, targets.check, 1),
    "remembered plans": Input(files.cache_files(), files.check_cache, 1),
    "class names": Input(files.CLASS_NAMES, files.check_names, 1),
    "trials of a study": Input(files.ATTRIBUTE_CASES, files.check_trials, 6),
    "journals": Input(files.JOURNALS, files.check_journal, 5),
    "allowed regressions": Input(sizes.REGRESSIONS, sizes.check_regression, 220),
    "sizes": Input(sizes.SIZES, sizes.check_size, 571),
}


class Tally:
    """What came of the cases of one input."""

    def __init__(self) -> None:
        self.accepted, self.refused, self.faults = 0, 0, Counter[str]()

    @property
    def cases(self) -> int:
        """How many were tried."""
        return self.accepted + self.refused + sum(self.faults.values())


def tried(name: str, num: int, first_seed: int = 0) -> Tally:
    """What comes of so many cases of an input."""
    cases, check, _ = INPUTS[name]
    found = Tally()

    def attempt(several: list[Any]) -> None:
        for case in several[: num - found.cases]:
            verdict = verdict_on(check, case)
            if verdict.fault:
                found.faults[verdict.fault] += 1
            elif verdict.was_refused:
                found.refused += 1
            else:
                found.accepted += 1

    several = st.lists(cases, min_size=min(num, TOGETHER), max_size=TOGETHER)
    while found.cases < num:
        how = settings(
            max_examples=min(EXAMPLES, -(-(num - found.cases) // TOGETHER)),
            phases=[Phase.generate],
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        seed(first_seed + found.cases)(how(given(several)(attempt)))()
    return found


def run(num: int, names: Sequence[str], first_seed: int) -> dict[str, Any]:
    """Cases, faults and seconds of every input."""
    rows = {}
    with memory_limited():
        for name in names:
            cases = max(1, round(num * INPUTS[name].weight / 1000))
            begun = time.perf_counter()
            tally = tried(name, cases, first_seed)
            faults = tally.faults
            rows[name] = {
                "cases": tally.cases,
                "accepted": tally.accepted,
                "refused": tally.refused,
                "faulty_cases": sum(faults.values()),
                "faults": dict(faults.most_common()),
                "seconds": round(time.perf_counter() - begun, 1),
            }
            print(name, {key: value for key, value in rows[name].items() if key != "faults"}, flush=True)
            for fault, times in faults.most_common(20):
                print(f"    {times} x {fault}", flush=True)
    return rows


def write(rows: dict[str, Any], first_seed: int) -> None:
    """The figures, as JSON and as a table."""
    setup = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "hypothesis": version("hypothesis"),
        "seed": first_seed,
        "limit_s": LIMIT_S,
        "limit_bytes": LIMIT_BYTES,
        "most_letters": MOST_LETTERS,
    }
    (RESULTS / "fuzz.json").write_text(json.dumps({"setup": setup, "inputs": rows}, indent=2) + "\n")
    (RESULTS / "fuzz.md").write_text(table_of(rows))


def table_of(rows: dict[str, Any]) -> str:
    """A row per input, and the sum."""
    header = ("input", "cases", "with a result", "refused", "faulty", "kinds of fault", "seconds")
    shown = [
        (name, row["cases"], row["accepted"], row["refused"], row["faulty_cases"], len(row["faults"]), row["seconds"])
        for name, row in rows.items()
    ]
    whole = ("all", *(round(sum(row[place] for row in shown), 1) for place in range(1, len(header))))
    lines = ["| " + " | ".join(header) + " |", "|---|" + "---:|" * (len(header) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in (*shown, whole))]) + "\n"


def main() -> int:
    """Run, print and write; 1 where a fault was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run"])
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--only", default=",".join(INPUTS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="with --only: keep what is known already of other inputs")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")  # of torch, about types that are odd on purpose
    names = asked.only.split(",")
    rows = run(asked.cases, names, asked.seed)
    known = json.loads((RESULTS / "fuzz.json").read_text())["inputs"] if asked.keep else {}
    if set(known) | set(names) == set(INPUTS):
        write({name: (known | rows)[name] for name in INPUTS}, asked.seed)
    return int(any(row["faults"] for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
