"""Predictions beside published peaks and the predictions of published tools: rows, figures over groups, and a table.

Knows how errors are counted, and nothing of how a prediction is made.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cases import FIRST_STEADY_BATCH, Case

MIB = 2**20
OUTSIDE_BYTES = 13 * MIB
"""What the published peaks hold besides the allocator's segments: kernels and library state, loaded on first use.

It differs by 6 to 20 MiB over the published runs (seen in the very peaks that are predicted here); this is the middle.
"""

OURS, BARE = "autoaccum", "autoaccum, no workspaces"
KITSUNE, KITSUNE_HUB = "torch-kitsune", "torch-kitsune, as for the hub"
PUBLISHED_TOOLS = {"xmem": "xMem", "dnnmem": "DNNMem", "llmem": "LLMem", "schedtune": "SchedTune"}
SHOWN = (OURS, *PUBLISHED_TOOLS.values(), KITSUNE)

STEADY = f"transformers, batch {FIRST_STEADY_BATCH} and more"
SMALL = "transformers, smaller batches"
ONE_LINE = "transformers, one line a batch, A100"
CONVOLUTIONAL = "convolutional networks"


@dataclass(frozen=True, slots=True)
class Row:
    """One run.

    Attributes:
        predicted_bytes: By tool; a tool that cannot take the run is left out.
        fits: Our answers, with all workspaces of convolutions and with none.
        refused: Why torch-kitsune cannot take the run; empty where it can.
    """

    case: Case
    predicted_bytes: dict[str, int]
    fits: tuple[bool, bool]
    flushes: int
    interval_frac: float
    refused: str

    @property
    def predicted_out_of_memory(self) -> bool:
        """It runs out with all workspaces or with none."""
        return not all(self.fits)

    @property
    def group(self) -> str:
        """Where its errors are counted."""
        if self.case.family == "cnn":
            return CONVOLUTIONAL
        if self.case.one_shape:
            return STEADY
        return ONE_LINE if self.case.batch_size == 1 else SMALL

    def error_percent(self, tool: str) -> float | None:
        """Signed, of the published peak; None where the tool has no prediction."""
        predicted = self.predicted_bytes.get(tool)
        peak = self.case.ground_peak_bytes
        return None if predicted is None else (predicted - peak) / peak * 100


def row_of(case: Case, ours: Mapping[str, Any], kitsune: Mapping[str, Any]) -> Row:
    """Put together what the three environments answered for a run."""
    predicted = {
        OURS: ours["all_workspaces"]["reserved_bytes"] + OUTSIDE_BYTES,
        BARE: ours["no_workspaces"]["reserved_bytes"] + OUTSIDE_BYTES,
        **{shown: size for key, shown in PUBLISHED_TOOLS.items() if (size := case.baselines[key]) is not None},
    }
    if "refused" not in kitsune:
        predicted[KITSUNE] = kitsune.get("own_model_bytes", kitsune["as_documented_bytes"])
        predicted[KITSUNE_HUB] = kitsune["as_documented_bytes"]
    return Row(
        case=case,
        predicted_bytes=predicted,
        fits=(ours["all_workspaces"]["fits"], ours["no_workspaces"]["fits"]),
        flushes=ours["all_workspaces"]["flushes"],
        interval_frac=ours["interval_frac"],
        refused=kitsune.get("refused", ""),
    )


# -- figures


def figures(errors: Sequence[float]) -> dict[str, Any]:
    """Of absolute errors in percent. The 90th percentile is interpolated linearly."""
    ordered = sorted(errors)
    p90 = statistics.quantiles(ordered, n=10, method="inclusive")[8] if len(ordered) > 1 else ordered[0]
    named = {"median": statistics.median(ordered), "p90": p90, "max": ordered[-1]}
    return {"n": len(ordered), **{name: round(value, 2) for name, value in named.items()}}


def absolute_errors(rows: Iterable[Row], tool: str, *, once: bool) -> list[float]:
    """In percent. `once`: exact repeats of a run count as one, with the mean of their errors."""
    found: dict[str, list[float]] = {}
    for row in rows:
        error = row.error_percent(tool)
        if error is not None:
            found.setdefault(row.case.repeat_group if once else row.case.id, []).append(abs(error))
    return [statistics.mean(errors) for errors in found.values()]


def group_summary(rows: Sequence[Row], tools: Sequence[str], *, once: bool) -> dict[str, Any]:
    """Figures of every tool that takes any of these rows, and ours over those that it takes."""
    found: dict[str, Any] = {}
    for tool in tools:
        taken = [row for row in rows if tool in row.predicted_bytes]
        if taken:
            found[tool] = figures(absolute_errors(taken, tool, once=once))
            if tool not in (OURS, BARE):
                found[tool]["ours_on_these"] = figures(absolute_errors(taken, OURS, once=once))
    return found


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Figures of every group of runs that did not die."""
    groups: dict[str, Any] = {}
    for name in (STEADY, SMALL, ONE_LINE, CONVOLUTIONAL):
        inside = [row for row in rows if row.group == name and not row.case.out_of_memory]
        if not inside:
            continue
        tools = [OURS, *PUBLISHED_TOOLS.values(), KITSUNE]
        tools[1:1] = [BARE] if name == CONVOLUTIONAL else []
        tools += [] if name == CONVOLUTIONAL else [KITSUNE_HUB]
        groups[name] = {
            "repeats_once": group_summary(inside, tools, once=True),
            "all_rows": group_summary(inside, tools, once=False),
            "inside_our_stated_interval": _inside(inside, _within_stated),
        }
        if name == CONVOLUTIONAL:
            groups[name]["between_none_and_all_workspaces"] = _inside(inside, _within_workspaces)
    return groups


def _inside(rows: Sequence[Row], holds: Callable[[Row], bool]) -> str:
    return f"{sum(map(holds, rows))} of {len(rows)}"


def _within_stated(row: Row) -> bool:
    """The published peak is as near as `predict` says."""
    predicted = row.predicted_bytes[OURS]
    return abs(row.case.ground_peak_bytes - predicted) <= row.interval_frac * predicted


def _within_workspaces(row: Row) -> bool:
    low, high = sorted((row.predicted_bytes[OURS], row.predicted_bytes[BARE]))
    return low <= row.case.ground_peak_bytes <= high


def out_of_memory(rows: Sequence[Row]) -> dict[str, Any]:
    """Yes or no: did the run die, and was that predicted?"""
    died = [row for row in rows if row.case.out_of_memory]
    lived = [row for row in rows if not row.case.out_of_memory]
    return {
        "died": len(died),
        "trained": len(lived),
        OURS: _verdicts(died, lived, lambda row: row.predicted_out_of_memory),
        # `predict` proposes no size for which the allocator has to give its cache back
        "autoaccum, sizes that predict refuses": _verdicts(died, lived, lambda row: row.flushes > 0),
        "autoaccum, all workspaces alone": _verdicts(died, lived, lambda row: not row.fits[0]),
        BARE: _verdicts(died, lived, lambda row: not row.fits[1]),
        KITSUNE: _verdicts(died, lived, kitsune_out_of_memory),
    }


def kitsune_out_of_memory(row: Row) -> bool:
    """Its answer is more than the GPU has; it does not know these GPUs by name."""
    return row.predicted_bytes.get(KITSUNE, 0) > row.case.gpu_total_bytes


def _verdicts(died: Sequence[Row], lived: Sequence[Row], dies: Callable[[Row], bool]) -> dict[str, int]:
    return {"died_and_predicted": sum(map(dies, died)), "trained_but_predicted_to_die": sum(map(dies, lived))}


# -- as JSON and as a table


def as_json(row: Row) -> dict[str, Any]:
    """A run with every prediction."""
    case = asdict(row.case)
    del case["baselines"], case["source_path"]
    tools = row.predicted_bytes
    return {
        **case,
        "group": row.group,
        "predicted_bytes": tools,
        # a run that died has no peak to compare with: what it held is only a lower bound
        "error_percent": {} if row.case.out_of_memory else {tool: _rounded(row.error_percent(tool)) for tool in tools},
        "predicted_out_of_memory": row.predicted_out_of_memory,
        "fits_with_all_workspaces": row.fits[0],
        "fits_without_workspaces": row.fits[1],
        "cache_given_back": row.flushes,
        "torch_kitsune_cannot_take_it": row.refused,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def as_markdown(rows: Sequence[Row], found: Mapping[str, Any]) -> str:
    """The report for people."""
    parts = [
        "# Predicted peaks against published ones",
        found["what"],
        *found["how_it_was_chosen"],
        "## Summary",
        "Absolute error in percent of the published peak; exact repeats of a run count once. The last columns are ours on "
        "the rows that the tool takes.",
        _summary_table(found["groups"], "repeats_once"),
        *(_notes(name, group) for name, group in found["groups"].items()),
        "The same with every row counted, where that is not the same:",
        _summary_table({name: group for name, group in found["groups"].items() if _has_repeats(group)}, "all_rows"),
        "## Out of memory",
        _verdict_table(found["out_of_memory"]),
        _died_table([row for row in rows if row.case.out_of_memory]),
        "## Every run",
        "Signed error in percent of the published peak. For convolutional networks with all workspaces, then with none.",
        *(f"### {name}\n\n{_group_table(rows, name)}" for name in found["groups"]),
        "## Made with",
        _list(f"{name}: {_words(made)}" for name, made in found["environments"].items()),
    ]
    return "\n\n".join(parts) + "\n"


def _has_repeats(group: Mapping[str, Any]) -> bool:
    return bool(group["repeats_once"] != group["all_rows"])


def _summary_table(groups: Mapping[str, Any], counted: str) -> str:
    lines = []
    for name, group in groups.items():
        for tool, found in group[counted].items():
            ours = found.get("ours_on_these", {})
            numbers = [found[key] for key in ("n", "median", "p90", "max")] + [
                ours.get(key, "") for key in ("median", "max")
            ]
            lines.append([name, tool, *map(str, numbers)])
    return _table(["group", "tool", "n", "median", "p90", "max", "our median", "our max"], lines)


def _notes(name: str, group: Mapping[str, Any]) -> str:
    said = (
        f"{name[0].upper()}{name[1:]}: {group['inside_our_stated_interval']} peaks are inside the interval that is stated."
    )
    between = group.get("between_none_and_all_workspaces")
    return f"{said} {between} lie between the prediction with no workspaces and that with all." if between else said


def _verdict_table(found: Mapping[str, Any]) -> str:
    lines = [
        [
            tool,
            f"{each['died_and_predicted']} of {found['died']}",
            f"{each['trained_but_predicted_to_die']} of {found['trained']}",
        ]
        for tool, each in found.items()
        if isinstance(each, dict)
    ]
    head = "The other tools' answers to this are not published with their estimates, which are cut off at the card's memory."
    return f"{head}\n\n{_table(['tool', 'died, as predicted', 'trained, though predicted to die'], lines)}"


def _died_table(rows: Sequence[Row]) -> str:
    lines = [
        [
            row.case.id,
            _mib(row.case.ground_peak_bytes),
            _mib(row.case.gpu_total_bytes),
            *("fits" if fits else "dies" for fits in row.fits),
            "dies" if kitsune_out_of_memory(row) else "fits",
        ]
        for row in rows
    ]
    return _table(["run that died", "held at least, MiB", "GPU, MiB", "ours, all workspaces", "ours, none", KITSUNE], lines)


def _group_table(rows: Sequence[Row], name: str) -> str:
    lines = []
    for row in rows:
        if row.group == name and not row.case.out_of_memory:
            errors = [_signed(row.error_percent(tool)) for tool in SHOWN]
            bare = _signed(row.error_percent(BARE))
            ours = f"{errors[0]} / {bare}" if name == CONVOLUTIONAL else errors[0]
            verdict = "dies" if row.predicted_out_of_memory else "fits"
            sizes = [_mib(row.case.ground_peak_bytes), _mib(row.predicted_bytes[OURS])]
            lines.append([row.case.id, *sizes, ours, *errors[1:], verdict])
    return _table(["run", "published, MiB", "predicted, MiB", *SHOWN, "our verdict"], lines)


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rule = ["---", *("---:" for _ in head[1:])]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *lines))


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.0f}".replace(",", " ")


def _signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.2f}"


def _words(made: Mapping[str, str]) -> str:
    return ", ".join(f"{key} {value}" for key, value in made.items())


def _list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)
