"""The figures as tables: one line for each tool, and one for each tool under each cap."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from side_by_side.measuring import TRAINED_STEPS
from side_by_side.tools import NOT_SHOWN, TOOLS

Pair = dict[str, Any]
RIVALS = ("accelerate", "Lightning binsearch")  # times are compared with the faster of these
OURS = "autoaccum"
COUNTED = "accelerate"  # and refusals with this one's

SUMMARY_COLUMNS = [
    "tool",
    "answers",
    "exact",
    "above the limit",
    "of the limit, median",
    "least",
    "train",
    "steps replayed",
    "effective batch kept",
    "state kept",
    "refused",
    "share of accelerate's",
    "seconds, median",
    "times as fast as the faster of accelerate and binsearch, median",
]
README_COLUMNS = [
    "tool",
    "answers",
    "exact",
    "of the limit, least",
    "train",
    "effective batch kept",
    "state kept",
    "out of memory, times",
    "seconds, median",
]
README_BEGIN, README_END = "<!-- written by benchmarks/peers.py -->", "<!-- end -->"
PAIR_COLUMNS = [
    "tool",
    "answer",
    "limit",
    "passes",
    "refused",
    "seconds",
    "processor, s",
    "state changed",
    "effective batch",
    "trains",
]


def markdown(report: dict[str, Any]) -> str:
    """The whole report."""
    pairs = report["pairs"]
    return "\n".join(
        [*_head(report), *_summary(pairs), NOTES, *_not_shown(), *(line for pair in pairs for line in _of_pair(pair))]
    )


def _head(report: dict[str, Any]) -> Iterator[str]:
    environment = report["environment"]
    versions = ", ".join(f"{package} {number}" for package, number in environment["tools"].items() if number)
    settings = " ".join(f"{name}={value}" for name, value in environment["settings"].items())
    yield "# Finders of a batch size, side by side\n"
    system = f"{environment['system']}, {environment['libc']}, Python {environment['python']}"
    yield f"`python benchmarks/peers.py run`: {system}, "
    yield f"torch {environment['torch']}, on {report['device']}; {versions}. All processes: `{settings}`, no oneDNN.\n"


NOTES = """\
An answer is exact when it is the true limit of the loop that it is for: of two micro-batches in each optimizer step for a
tool that accumulates, of one batch in each step for the others. The true limit was found by doubling steps and bisection
over processes of their own, each of which trained 3 real optimizer steps under the cap: the limit passed and the next size
did not. (Trying every size would take days; sizes in between were not all run.)

An answer trains when 20 optimizer steps of it ran in a new process under the same cap. A step is replayed when it ran out of
memory and was run again from its start in smaller micro-batches, with the same gradient; only `Accumulator` does that.
The effective batch is kept when an optimizer step takes as many samples as were wanted. State: weights, buffers, gradients,
modes, optimizer and random numbers to the bit; where a tool's documentation has the model made anew for each size there is
no state to compare. Refused: passes and optimizer steps that ran out of memory. Seconds are those of the search alone; what
a tool loads at its first call was loaded before. The processor's seconds are of the search and its own processes.
"""


def _not_shown() -> Iterator[str]:
    yield "Not shown: " + "; ".join(f"{name} ({reason})" for name, reason in NOT_SHOWN.items()) + ".\n"


def _summary(pairs: Sequence[Pair]) -> Iterator[str]:
    yield _row(SUMMARY_COLUMNS)
    yield _row(["---"] * len(SUMMARY_COLUMNS))
    for name in TOOLS:
        ran = [pair for pair in pairs if pair["tools"].get(name, {}).get("installed", name in pair["tools"])]
        if ran:
            yield _row([name, *_summary_of(name, ran)])
    yield ""


def in_readme(readme: str, report: dict[str, Any]) -> str:
    """The README with the table of these figures between its two marks."""
    head, rest = readme.split(README_BEGIN)
    _, tail = rest.split(README_END)
    table = "\n".join(_readme_table(report["pairs"]))
    return f"{head}{README_BEGIN}\n{table}\n{README_END}{tail}"


def _readme_table(pairs: Sequence[Pair]) -> Iterator[str]:
    yield _row(README_COLUMNS)
    yield _row(["---"] * len(README_COLUMNS))
    without = []
    for name in TOOLS:
        one = summary_of(name, pairs)
        if not one["answers"]:
            without.append(name)
            continue
        yield _row(
            [
                name,
                f"{one['answers']} of {one['pairs']}",
                str(one["exact"]),
                _number(one["least_share"], "{:.0%}"),
                str(one["train"]),
                str(one["effective_batch_kept"]),
                "made anew" if one["state_kept"] is None else str(one["state_kept"]),
                str(one["refused"]),
                _number(one["seconds"], "{:.1f}"),
            ]
        )
    ours = summary_of(OURS, pairs)
    said = [f"{OURS} took 1/{ours['faster_by']:.1f} of the time of the faster of {' and '.join(RIVALS)} (median)."]
    if ours["replays"]:
        steps = (TRAINED_STEPS + 1) * ours["train"]
        said.append(f"Of its {steps} training steps {ours['replays']} ran out of memory and were replayed.")
    if without:
        said.append(f"Without an answer on the host: {', '.join(without)}.")
    yield "\n" + " ".join(said)


def summary_of(name: str, pairs: Sequence[Pair]) -> dict[str, Any]:
    """A tool's figures over all pairs that it was run on."""
    found = [(pair, pair["tools"][name]) for pair in pairs]
    answered = [(pair, one) for pair, one in found if one.get("answer")]
    apart = [one["answer"] / limit_for(name, pair) for pair, one in answered if limit_for(name, pair)]
    refused, theirs = (sum(pair["tools"].get(of, {}).get("ooms", 0) for pair in pairs) for of in (name, COUNTED))
    ratios = [ratio for pair, one in answered if (ratio := faster_by(pair, one)) is not None]
    return {
        "pairs": len(found),
        "answers": len(answered),
        "exact": sum(share == 1 for share in apart),
        "above": sum(share > 1 for share in apart),
        "share_of_limit": median(apart) if apart else None,
        "least_share": min(apart, default=None),
        "train": sum(bool(one["training"].get("fits")) for _, one in answered),
        "replays": sum(one["training"].get("replays", 0) for _, one in answered),
        "effective_batch_kept": sum(keeps_batch(pair, one) for pair, one in answered),
        "state_kept": None if TOOLS[name].rebuilds else sum(not one["changed"] for _, one in answered),
        "refused": refused,
        "share_of_refused": refused / theirs if theirs else None,
        "seconds": median(one["seconds"] for _, one in answered) if answered else None,
        "faster_by": median(ratios) if ratios else None,
    }


def limit_for(name: str, pair: Pair) -> int:
    """The true limit of the loop that this tool's answers are for."""
    return int(pair["limits"]["accumulating" if TOOLS[name].accumulates else "plain"])


def faster_by(pair: Pair, one: dict[str, Any]) -> float | None:
    """How many times as fast as the faster of the two that it is compared with, None where neither answered."""
    theirs = [pair["tools"][name]["seconds"] for name in RIVALS if pair["tools"].get(name, {}).get("answer")]
    return min(theirs) / one["seconds"] if theirs else None


def keeps_batch(pair: Pair, one: dict[str, Any]) -> bool:
    """Whether an optimizer step takes the samples that were wanted."""
    return bool(one["training"].get("effective_batch") == pair["target_batch"])


def _summary_of(name: str, pairs: Sequence[Pair]) -> list[str]:
    one = summary_of(name, pairs)
    of = f" of {one['answers']}"
    return [
        f"{one['answers']} of {one['pairs']}",
        f"{one['exact']}{of}",
        f"{one['above']}{of}",
        _number(one["share_of_limit"], "{:.1%}"),
        _number(one["least_share"], "{:.1%}"),
        f"{one['train']}{of}",
        str(one["replays"]),
        f"{one['effective_batch_kept']}{of}",
        "made anew" if one["state_kept"] is None else f"{one['state_kept']}{of}",
        str(one["refused"]),
        _number(one["share_of_refused"], "{:.2f}"),
        _number(one["seconds"], "{:.1f}"),
        _number(one["faster_by"], "{:.2f}"),
    ]


def _of_pair(pair: Pair) -> Iterator[str]:
    limits = pair["limits"]
    yield f"## {pair['case']}: {pair['room_bytes'] / 2**20:.0f} MiB, {pair['target_batch']} samples wanted\n"
    yield f"True limit: {limits['plain']} rows, {limits['accumulating']} where gradients accumulate.\n"
    yield _row(PAIR_COLUMNS)
    yield _row(["---"] * len(PAIR_COLUMNS))
    for name, one in pair["tools"].items():
        yield _row([name, *_cells(name, pair, one)])
    yield ""


def _cells(name: str, pair: Pair, one: dict[str, Any]) -> list[str]:
    training = one.get("training", {})
    said = one.get("error") or str(one.get("answer", "none"))
    changed = "made anew" if TOOLS[name].rebuilds else ", ".join(one.get("changed", ())) or "nothing"
    fits = {True: "yes", False: "no"}.get(training.get("fits"), training.get("error", ""))
    if training.get("replays"):
        fits += f", {training['replays']} replayed"
    return [
        said.replace("|", "/"),
        str(limit_for(name, pair)),
        str(one.get("passes", "")),
        str(one.get("ooms", "")),
        _number(one.get("seconds"), "{:.2f}"),
        _number(one.get("processor_s"), "{:.2f}"),
        changed,
        str(training.get("effective_batch", "")),
        fits,
    ]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
