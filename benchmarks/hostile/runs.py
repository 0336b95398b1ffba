"""Saved runs that were edited: a plan or probe result with anything in place of any of its values, or no JSON at all."""

from __future__ import annotations

import io
import json
import tempfile
from pathlib import Path
from typing import Any

from hostile.judging import Broken
from hostile.texts import storable
from hypothesis import strategies as st
from rich.console import Console

from autoaccum.comparing.compare import compare
from autoaccum.comparing.markdown import comparison_markdown
from autoaccum.comparing.reading import read_run
from autoaccum.plan import Plan
from autoaccum.records import (
    Candidate,
    Environment,
    Fit,
    Levers,
    MemoryAccount,
    Outlook,
    OutOfMemory,
    PlanRecord,
    Prediction,
    ProbeResult,
    Refused,
    Setting,
    Skipped,
    Timeline,
    Timing,
    Trial,
    plain,
    to_json,
)
from autoaccum.report.pages import plan_html, probe_html
from autoaccum.report.terminal import show
from autoaccum.report.text import plan_markdown, probe_markdown

MIB = 2**20
FULL = Levers(checkpointing="full", checkpointed_blocks=2, block_names=("h.0", "h.1"))
ENVIRONMENT = Environment(
    device="cpu",
    device_name="x86_64",
    model="Gpt",
    optimizer="AdamW",
    batch="8 rows",
    python_version="3.12",
    torch_version="2.13",
    autoaccum_version="0.1",
    platform="Linux",
    driver="none",
)


def _trial(size: int, outcome: Any, levers: Levers = FULL, purpose: Any = "probe") -> Trial:
    candidate = Candidate(micro_batch=size, levers=levers)
    return Trial(candidate=candidate, outcome=outcome, wall_s=2.0, rows_per_step=2 * size, purpose=purpose)


TRIALS = (
    _trial(1, Refused(bound="floor", phase="forward", message="more than 1 value"), Levers()),
    _trial(2, Fit(peak_bytes=10 * MIB, step_times_s=(0.5, 0.6))),
    _trial(4, Fit(peak_bytes=20 * MIB, step_times_s=(0.4, 0.5, 0.6), offloaded_bytes=5)),
    _trial(8, OutOfMemory(cause="allocator", phase="backward", message="CUDA out of memory")),
    _trial(6, OutOfMemory(cause="budget", peak_bytes=200 * MIB)),
    _trial(4, Fit(peak_bytes=22 * MIB, step_times_s=(0.5,) * 7), purpose="confirm"),
)
TIMING = Timing(median_s=0.5, first_quartile_s=0.4, third_quartile_s=0.6, num=7, interval_frac=0.01)
ACCOUNT = MemoryAccount(
    trainable_bytes=3 * MIB,
    frozen_bytes=MIB,
    buffer_bytes=0,
    gradient_bytes=3 * MIB,
    optimizer_state_bytes=6 * MIB,
    trainable_parameters=786432,
    frozen_parameters=262144,
)
PLAN = PlanRecord(
    target_batch=22,
    world_size=2,
    rank=1,
    effective_batch=22,
    micro_batch=4,
    accumulation_steps=3,
    micro_batch_sizes=(4, 4, 3),
    max_micro_batch=4,
    limited_by="memory",
    evidence="measured",
    levers=FULL,
    budget_bytes=100 * MIB,
    measured_peak_bytes=22 * MIB,
    predicted_peak_bytes=21 * MIB,
    step_time_s=0.5,
    samples_per_s=44.0,
    timing=TIMING,
    settings=(
        Setting(levers=FULL, standing="chosen", micro_batch=4, accumulation_steps=3, peak_bytes=22 * MIB, timing=TIMING),
        Setting(
            levers=Levers(), standing="measured", micro_batch=2, accumulation_steps=6, peak_bytes=30 * MIB, timing=TIMING
        ),
        Setting(
            levers=Levers(precision="bf16"),
            standing="not run",
            micro_batch=4,
            accumulation_steps=3,
            predicted_step_s=0.3,
            note="slow",
        ),
    ),
    advice=("more memory",),
    trials=TRIALS,
    skipped=(Skipped(lever="offload", level="cpu", reason="no"),),
    warnings=("careful",),
    memory=ACCOUNT,
    prediction=Prediction(
        gpu="RTX",
        total_bytes=2**34,
        peak_bytes=2**33,
        low_bytes=2**32,
        high_bytes=2**33,
        allocated_bytes=2**32,
        parts=(("weights", 2**32), ("cached", 5)),
        phase="backward",
        flops_per_step=10**12,
        not_modelled=("kernels",),
        outlooks=(Outlook(gpu="A", total_bytes=2**33, fits=True, peak_bytes=2**32, micro_batch=4, accumulation_steps=3),),
    ),
    timeline=Timeline(
        title="One step",
        held_bytes={"weights": (4, 4, 4), "activations": (0, 9, 2)},
        phases=((0, "data"), (1, "forward"), (2, "backward")),
        limit_bytes=16,
    ),
    environment=ENVIRONMENT,
)
BARE = PlanRecord(
    target_batch=7,
    world_size=1,
    effective_batch=7,
    micro_batch=7,
    accumulation_steps=1,
    micro_batch_sizes=(7,),
    max_micro_batch=7,
    limited_by="target",
    evidence="predicted",
    budget_bytes=100 * MIB,
)
RESULT = ProbeResult(
    max_micro_batch=4,
    limited_by="memory",
    evidence="measured",
    measured_peak_bytes=22 * MIB,
    budget_bytes=100 * MIB,
    levers=FULL,
    trials=TRIALS,
    warnings=("careful",),
    memory=ACCOUNT,
    environment=ENVIRONMENT,
)
SOUND_TEXTS = [to_json(record) for record in (PLAN, BARE, RESULT)]
SOUND = [json.loads(text) for text in SOUND_TEXTS]


def _paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where there is anything in plain JSON, the whole left out."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path for key, item in inner for path in ((*at, key), *_paths(item, (*at, key)))]


PATHS = [_paths(content) for content in SOUND]
TOPS = [[path for path in paths if len(path) == 1] for paths in PATHS]


class Raw(str):
    """JSON text that `json.dumps` would not write."""


ODD_NUMBERS = (0, -1, 1, 2**31, 2**53 + 1, 2**62, 2**63, 2**64, 10**30, 10**400, 1e-320, 1e-9, 0.1, -0.0, 1e300, 1.7e308)
ODD_JSON = (
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "1e999999",
    "-1e999999",
    "9" * 5000,
    "9" * 10**5,
    "1" + "0" * 400,
    "[" * 10**5,
    "[" * 10**5 + "]" * 10**5,
    '{"a":' * 10**4 + "1" + "}" * 10**4,
    '"\\ud800"',
    '"\\u0000"',
    "'a'",
    "",
    "/*",
    "00",
    "1.",
    "tru",
)
values = st.one_of(
    st.sampled_from(ODD_NUMBERS),
    st.sampled_from(ODD_NUMBERS),
    st.integers(-3, 30),
    st.floats(allow_nan=False, allow_infinity=False),
    storable,
    st.none(),
    st.booleans(),
    st.sampled_from(([], {}, [[]], [1, 2], {"a": 1}, [None])),
    st.sampled_from(ODD_JSON).map(Raw),
)


def _at(content: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        content = content[key]
    return content


def _like(value: Any) -> st.SearchStrategy[Any]:
    """Values of the same type, of which some are sound."""
    if isinstance(value, str):
        return storable | st.just(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return values
    near = st.integers(-2, 2).map(lambda by: value + by)
    return near | st.sampled_from([odd for odd in ODD_NUMBERS if isinstance(odd, type(value))]) | st.just(value)


@st.composite
def edited(draw: st.DrawFn) -> str:
    """The JSON text of a run with up to three values replaced, removed, or added."""
    which = draw(st.sampled_from((0, 0, 0, 1, 2, 2)))
    content = json.loads(SOUND_TEXTS[which])
    raws: list[Raw] = []
    for _ in range(draw(st.sampled_from((0, 1, 1, 1, 2, 3)))):
        path = draw(st.sampled_from(PATHS[which]) | st.sampled_from(TOPS[which]))
        value = draw(values if draw(st.integers(0, 5)) == 0 else _like(_at(SOUND[which], path)))
        how = draw(st.sampled_from(("replace", "replace", "replace", "remove", "add", "double")))
        _edit(content, path, value, how, raws)
    text = json.dumps(content)
    for place, raw in enumerate(raws):
        text = text.replace(f'"raw {place}"', raw)
    return text


def _edit(content: Any, path: tuple[Any, ...], value: Any, how: str, raws: list[Raw]) -> None:
    for key in path[:-1]:
        try:
            content = content[key]
        except (KeyError, IndexError, TypeError):
            return  # an earlier edit has taken it away
    if isinstance(value, Raw):
        raws.append(value)
        value = f"raw {len(raws) - 1}"
    if isinstance(content, dict):
        if how == "remove":
            content.pop(path[-1], None)
        elif how == "add":
            content[value if isinstance(value, str) else "added"] = value
        else:
            content[path[-1]] = value
    elif isinstance(content, list) and path[-1] < len(content):
        if how == "remove":
            del content[path[-1]]
        elif how == "double":
            content.append(content[path[-1]])
        else:
            content[path[-1]] = value


def _cut(text: str, at: float) -> str:
    return text[: int(len(text) * at)]


broken = st.one_of(
    st.builds(_cut, edited(), st.floats(0, 1)),
    st.binary(max_size=30),
    storable,
    st.sampled_from(ODD_JSON),
    st.recursive(
        st.none() | st.integers() | storable, lambda inner: st.lists(inner) | st.dictionaries(storable, inner), max_leaves=8
    ).map(json.dumps),
)
TEXTS = st.one_of(edited(), edited(), edited(), edited(), broken)
PAIRS = st.tuples(TEXTS | st.just(json.dumps(SOUND[0])), TEXTS | st.just(json.dumps(SOUND[0])), storable)


def check_plan(text: str | bytes) -> None:
    """A plan that comes through its file unchanged, and all the ways in which it is shown."""
    plan = Plan.from_json(text)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        plan.save(path)
        if Plan.load(path) != plan:
            raise Broken("a plan that is saved is another one when it is loaded")
    plan_markdown(plan), plan_html(plan), plan._repr_html_(), plan.to_frame()
    _check_terminal(plan)
    if not str(plan).strip():
        raise Broken("a plan without a text")
    for rank in {0, plan.rank, plan.world_size - 1}:
        share = (
            plan.shares[rank]
            if plan.shares
            else plan.target_batch // plan.world_size + (rank < plan.target_batch % plan.world_size)
        )
        if sum(plan.schedule(rank)) != share:
            raise Broken("a schedule that is not the rank's share")


def check_report(text: str | bytes) -> None:
    """What `autoaccum report` does: a run that is read is shown in every way."""
    run = read_run(text, "run.json")
    if isinstance(run, ProbeResult):
        probe_markdown(run), probe_html(run), str(run)
    else:
        plan_markdown(run), plan_html(run)
    _check_terminal(run)
    plain(run)


def _check_terminal(found: PlanRecord | ProbeResult) -> None:
    show(found, Console(width=80, file=io.StringIO()))


def check_comparison(case: tuple[str | bytes, str | bytes, str]) -> None:
    """Two runs that are compared, and the table of it, whose lines are whole."""
    one, other, name = case
    found = compare(
        read_run(one, name), read_run(other, name), 0.05, base_name=name, new_name=name, allow_different_environments=True
    )
    text = comparison_markdown(found)
    if any(line.count("|") != 7 for line in text.splitlines() if line.startswith("|")):
        raise Broken("a table whose rows are broken")
    to_json(found)
