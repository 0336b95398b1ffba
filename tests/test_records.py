"""The records: what they hold, that they come back from JSON unchanged, and that nothing unsound comes in."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autoaccum import records
from autoaccum.errors import InvalidRequestError
from autoaccum.records import (
    SCHEMA_VERSION,
    Budget,
    Candidate,
    CheckResult,
    Environment,
    Evidence,
    Fit,
    Levers,
    LimitedBy,
    MemoryAccount,
    Outlook,
    OutOfMemory,
    Phase,
    PlanRecord,
    Prediction,
    ProbeResult,
    Record,
    Refused,
    Setting,
    Skipped,
    StepResult,
    Timeline,
    Timing,
    Trial,
    from_json,
    plain,
    to_json,
)

sizes = st.integers(1, 2**20)
num_bytes = st.integers(0, 2**62)
seconds = st.floats(0, 1e9)
maybe = st.none
texts = st.text(max_size=20)
phases = maybe() | st.sampled_from(get_args(Phase))

levers = st.builds(
    Levers,
    checkpointing=st.sampled_from(["off", "selective", "full"]),
    checkpointed_blocks=st.integers(0, 100),
    precision=st.sampled_from(["fp32", "tf32", "bf16", "fp16"]),
    optimizer_impl=st.sampled_from(["default", "for-loop", "foreach", "fused"]),
    offload=st.sampled_from(["off", "cpu"]),
    block_names=st.lists(texts, max_size=2).map(tuple),
)
timings = st.builds(
    Timing,
    median_s=seconds,
    first_quartile_s=seconds,
    third_quartile_s=seconds,
    num=sizes,
    interval_frac=maybe() | st.floats(0, 1),
)
settings_tried = st.builds(
    Setting,
    levers=levers,
    standing=st.sampled_from(get_args(get_type_hints(Setting)["standing"])),
    micro_batch=sizes,
    accumulation_steps=sizes,
    peak_bytes=maybe() | num_bytes,
    predicted_peak_bytes=maybe() | num_bytes,
    timing=maybe() | timings,
    predicted_step_s=maybe() | seconds,
    note=texts,
)
timelines = st.builds(
    Timeline,
    title=texts,
    held_bytes=st.dictionaries(texts, st.lists(num_bytes, max_size=3).map(tuple), max_size=2),
    phases=st.lists(st.tuples(st.integers(0, 9), st.sampled_from(get_args(Phase))), max_size=2).map(tuple),
    limit_bytes=maybe() | num_bytes,
)
candidates = st.builds(Candidate, micro_batch=sizes, levers=levers)
fits = st.builds(
    Fit,
    peak_bytes=num_bytes,
    peak_allocated_bytes=maybe() | num_bytes,
    peak_reserved_bytes=maybe() | num_bytes,
    step_times_s=st.lists(seconds, max_size=3).map(tuple),
    offloaded_bytes=maybe() | num_bytes,
)
ooms = st.builds(
    OutOfMemory,
    cause=st.sampled_from(["allocator", "budget", "retries", "process", "unclear"]),
    phase=phases,
    peak_bytes=maybe() | num_bytes,
    message=texts,
)
refusals = st.builds(
    Refused,
    bound=st.sampled_from(["ceiling", "floor"]),
    limited_by=st.sampled_from(["host", "other"]),
    phase=phases,
    message=texts,
)
trials = st.builds(
    Trial,
    candidate=candidates,
    outcome=fits | ooms | refusals,
    wall_s=seconds,
    rows_per_step=sizes,
    purpose=st.sampled_from(get_args(get_type_hints(Trial)["purpose"])),
)
skips = st.builds(Skipped, lever=texts, level=texts, reason=texts)
budgets = st.builds(Budget, budget_bytes=num_bytes, held_bytes=num_bytes, total_bytes=num_bytes)
accounts = st.builds(
    MemoryAccount,
    trainable_bytes=num_bytes,
    frozen_bytes=num_bytes,
    buffer_bytes=num_bytes,
    gradient_bytes=num_bytes,
    optimizer_state_bytes=maybe() | num_bytes,
    trainable_parameters=sizes,
    frozen_parameters=sizes,
)
environments = st.builds(
    Environment,
    device=texts,
    device_name=texts,
    model=texts,
    optimizer=texts,
    batch=texts,
    world_size=sizes,
    python_version=texts,
    torch_version=texts,
    autoaccum_version=texts,
    platform=texts,
    driver=texts,
)
outlooks = st.builds(
    Outlook,
    gpu=texts,
    total_bytes=num_bytes,
    fits=st.booleans(),
    peak_bytes=num_bytes,
    micro_batch=maybe() | sizes,
    accumulation_steps=maybe() | sizes,
    levers=levers,
)
predictions = st.builds(
    Prediction,
    gpu=texts,
    total_bytes=num_bytes,
    peak_bytes=num_bytes,
    low_bytes=num_bytes,
    high_bytes=num_bytes,
    allocated_bytes=num_bytes,
    parts=st.lists(st.tuples(texts, num_bytes), max_size=3).map(tuple),
    phase=st.sampled_from(get_args(Phase)),
    flops_per_step=num_bytes,
    not_modelled=st.lists(texts, max_size=2).map(tuple),
    outlooks=st.lists(outlooks, max_size=2).map(tuple),
)
probe_results = st.builds(
    ProbeResult,
    max_micro_batch=sizes,
    limited_by=st.sampled_from(get_args(LimitedBy)),
    evidence=st.sampled_from(get_args(Evidence)),
    measured_peak_bytes=maybe() | num_bytes,
    budget_bytes=num_bytes,
    levers=levers,
    trials=st.lists(trials, max_size=3).map(tuple),
    warnings=st.lists(texts, max_size=2).map(tuple),
    memory=maybe() | accounts,
    environment=maybe() | environments,
)
step_results = st.builds(
    StepResult,
    loss=seconds,
    weight=seconds,
    micro_batch_sizes=st.lists(maybe() | sizes, max_size=4).map(tuple),
    replays=st.integers(0, 9),
    skipped=st.booleans(),
    grad_norm=maybe() | seconds,
)
check_results = st.builds(
    CheckResult,
    exact=st.booleans(),
    relative_error=seconds,
    norm_ratio=seconds,
    reasons=st.lists(texts, max_size=2).map(tuple),
    micro_batch_sizes=st.lists(sizes, max_size=2).map(tuple),
    dtype=texts,
    notes=st.lists(texts, max_size=2).map(tuple),
)


@st.composite
def plans(draw: st.DrawFn) -> PlanRecord:
    """Any sound plan."""
    world_size = draw(st.integers(1, 64))
    rank = draw(st.integers(0, world_size - 1))
    own_sizes = draw(st.lists(st.integers(1, 5000), min_size=1, max_size=6))
    share = sum(own_sizes)
    smaller_share = draw(st.integers(0, 1)) if share > 1 else 0
    if smaller_share:  # this rank is one of the first, which have a row more
        target = (share - 1) * world_size + draw(st.integers(rank + 1, world_size))
        assume(target % world_size)
    else:
        target = share * world_size + draw(st.integers(0, rank))
    return PlanRecord(
        target_batch=target,
        world_size=world_size,
        rank=rank,
        effective_batch=target,
        micro_batch=max(own_sizes),
        accumulation_steps=len(own_sizes),
        micro_batch_sizes=tuple(own_sizes),
        max_micro_batch=max(own_sizes) + draw(st.integers(0, 100)),
        min_micro_batch=draw(st.integers(1, 2)),
        limited_by=draw(st.sampled_from(get_args(LimitedBy))),
        evidence=draw(st.sampled_from(get_args(Evidence))),
        multiple_of=draw(st.integers(1, 8)),
        equal_micro_batches=draw(st.booleans()),
        levers=draw(levers),
        budget_bytes=draw(num_bytes),
        measured_peak_bytes=draw(maybe() | num_bytes),
        predicted_peak_bytes=draw(maybe() | num_bytes),
        step_time_s=draw(maybe() | seconds),
        samples_per_s=draw(maybe() | seconds),
        trials=tuple(draw(st.lists(trials, max_size=2))),
        skipped=tuple(draw(st.lists(skips, max_size=2))),
        warnings=tuple(draw(st.lists(texts, max_size=2))),
        prediction=draw(maybe() | predictions),
        memory=draw(maybe() | accounts),
        environment=draw(maybe() | environments),
        objective=draw(st.sampled_from(["throughput", "memory"])),
        timing=draw(maybe() | timings),
        settings=tuple(draw(st.lists(settings_tried, max_size=2))),
        advice=tuple(draw(st.lists(texts, max_size=2))),
        timeline=draw(maybe() | timelines),
    )


OF_EVERY_TYPE: dict[type[Record], st.SearchStrategy[Any]] = {
    Levers: levers,
    Candidate: candidates,
    Fit: fits,
    OutOfMemory: ooms,
    Refused: refusals,
    Trial: trials,
    Skipped: skips,
    Budget: budgets,
    MemoryAccount: accounts,
    Environment: environments,
    Outlook: outlooks,
    Prediction: predictions,
    ProbeResult: probe_results,
    PlanRecord: plans(),
    StepResult: step_results,
    CheckResult: check_results,
    Timing: timings,
    Setting: settings_tried,
    Timeline: timelines,
}
any_record = st.one_of(list(OF_EVERY_TYPE.values()))

PLAN = PlanRecord(
    target_batch=110,
    world_size=1,
    effective_batch=110,
    micro_batch=37,
    accumulation_steps=3,
    micro_batch_sizes=(37, 37, 36),
    max_micro_batch=40,
    limited_by="memory",
    evidence="exact",
    budget_bytes=2**33,
    measured_peak_bytes=2**32,
    trials=(
        Trial(
            candidate=Candidate(micro_batch=40),
            outcome=Fit(peak_bytes=2**32, step_times_s=(0.25, 0.5)),
            wall_s=1.5,
            rows_per_step=80,
        ),
        Trial(
            candidate=Candidate(micro_batch=41),
            outcome=OutOfMemory(cause="allocator", phase="backward", message="no room: größer"),
            wall_s=0.5,
            rows_per_step=82,
        ),
    ),
    warnings=("größer",),
)
RESULT = ProbeResult(
    max_micro_batch=40,
    limited_by="memory",
    evidence="exact",
    measured_peak_bytes=2**32,
    budget_bytes=2**33,
    trials=PLAN.trials,
)
WRITTEN = [(PLAN, PlanRecord), (RESULT, ProbeResult)]


def changed(record: Record, /, **fields: Any) -> str:
    """The record's JSON with other values in these fields; a value of `...` leaves the field out."""
    content = {**json.loads(to_json(record)), **fields}
    return json.dumps({name: value for name, value in content.items() if value is not ...})


def test_every_record_is_tried_here() -> None:
    """The strategies above cover every record type of the module."""
    public = {value for value in vars(records).values() if isinstance(value, type) and issubclass(value, Record)}
    assert set(OF_EVERY_TYPE) == public - {Record}


@pytest.mark.parametrize("kind", list(OF_EVERY_TYPE))
@given(data=st.data())
@settings(max_examples=25)
def test_round_trip(kind: type[Record], data: st.DataObject) -> None:
    """Any record comes back from its JSON as an equal record of the same type."""
    record = data.draw(OF_EVERY_TYPE[kind])
    again = msgspec.json.decode(to_json(record), type=type(record))
    assert again == record and type(again) is type(record)


@given(plans())
@settings(max_examples=25)
def test_plan_round_trip_through_the_checked_way(plan: PlanRecord) -> None:
    """A plan that was written is read back by `from_json`, from text and from bytes."""
    assert from_json(to_json(plan), PlanRecord) == plan == from_json(to_json(plan).encode(), PlanRecord)


@given(probe_results)
@settings(max_examples=25)
def test_probe_result_has_its_own_way(result: ProbeResult) -> None:
    """A ProbeResult reads back what its own `to_json` wrote."""
    assert ProbeResult.from_json(result.to_json()) == result


@given(any_record)
def test_plain_is_what_json_holds(record: Record) -> None:
    """`plain` holds nothing but what the JSON text holds."""
    assert json.loads(json.dumps(plain(record))) == json.loads(to_json(record))


def test_json_says_what_it_is() -> None:
    """The JSON of a plan carries its record name and its schema version."""
    content = json.loads(to_json(PLAN))
    assert (content["record"], content["schema_version"]) == ("autoaccum.Plan", SCHEMA_VERSION)


@pytest.mark.parametrize(("record", "kind"), WRITTEN)
def test_truncated_at_every_place(record: Record, kind: type[Record]) -> None:
    """A file cut short anywhere is refused, with the hint that it is incomplete."""
    whole = to_json(record).encode()
    for length in range(len(whole)):
        with pytest.raises(InvalidRequestError, match="Is the file complete"):
            from_json(whole[:length], kind)


@pytest.mark.parametrize(("record", "kind"), WRITTEN)
def test_newer_schema_is_refused(record: Record, kind: type[Record]) -> None:
    """A file of a newer schema is refused with the command that upgrades, even if it has unknown fields."""
    with pytest.raises(InvalidRequestError, match=r"is newer than this autoaccum reads .*pip install --upgrade"):
        from_json(changed(record, schema_version=SCHEMA_VERSION + 1, not_yet_known=1), kind)


def test_other_record_is_refused() -> None:
    """A probe result is not read as a plan, and the error says what it is."""
    with pytest.raises(InvalidRequestError, match=r"not an autoaccum.Plan \(its record is 'autoaccum.ProbeResult'\)"):
        from_json(to_json(RESULT), PlanRecord)


@pytest.mark.parametrize("record", [..., "", None, 7, ["autoaccum.Plan"], "autoaccum.plan", "x" * 10**6])
def test_missing_or_strange_record_name_is_refused(record: object) -> None:
    """A file without the right record name is refused with a short error."""
    with pytest.raises(InvalidRequestError) as caught:
        from_json(changed(PLAN, record=record), PlanRecord)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "fields",
    [
        {"surprise": 1},
        {"budget_bytes": ...},
        {"budget_bytes": None},
        {"budget_bytes": "8GiB"},
        {"budget_bytes": 1.5},
        {"evidence": "hearsay"},
        {"levers": {"precision": "int8"}},
        {"levers": {"sharding": "full"}},
        {"warnings": "one"},
        {"warnings": [1]},
        {"trials": [{}]},
        {"trials": [{**json.loads(to_json(PLAN))["trials"][0], "outcome": {"type": "miracle"}}]},
        {"micro_batch_sizes": "37"},
        {"schema_version": "1"},
        {"schema_version": 1.5},
        {"schema_version": None},
    ],
    ids=str,
)
def test_wrong_field_is_refused(fields: dict[str, Any]) -> None:
    """An unknown field, a missing one, or one of another type is refused."""
    with pytest.raises(
        InvalidRequestError, match=r"(cannot be read as|is not a sound|has no schema_version).*autoaccum\.Plan"
    ):
        from_json(changed(PLAN, **fields), PlanRecord)


UNSOUND = [
    {"effective_batch": 109},
    {"effective_batch": 111, "target_batch": 111},
    {"target_batch": 0, "effective_batch": 0, "micro_batch_sizes": []},
    {"target_batch": -110, "effective_batch": -110},
    {"world_size": 0},
    {"world_size": -1},
    {"world_size": 2},
    {"rank": 1},
    {"rank": -1},
    {"micro_batch_sizes": []},
    {"micro_batch_sizes": [37, 37, 35]},
    {"micro_batch_sizes": [37, 37, 37, -1], "accumulation_steps": 4},
    {"micro_batch_sizes": [37, 37, 36, 0], "accumulation_steps": 4},
    {"accumulation_steps": 4},
    {"micro_batch": 36},
    {"micro_batch": 38},
    {"max_micro_batch": 36},
    {"micro_batch_sizes": [40, 40, 30], "micro_batch": 37},
]


@pytest.mark.parametrize("fields", UNSOUND, ids=str)
def test_unsound_plan_is_refused(fields: dict[str, Any]) -> None:
    """A file whose sizes do not make up its target is refused: it would change what is learned."""
    with pytest.raises(InvalidRequestError, match="do not make up target_batch"):
        from_json(changed(PLAN, **fields), PlanRecord)


@pytest.mark.parametrize("fields", UNSOUND, ids=str)
def test_unsound_plan_cannot_be_made(fields: dict[str, Any]) -> None:
    """A plan whose sizes do not make up its target cannot be constructed either."""
    with pytest.raises(ValueError, match="do not make up target_batch"):
        msgspec.structs.replace(PLAN, **fields)


@given(plans(), st.data())
def test_plan_that_is_read_adds_up(plan: PlanRecord, data: st.DataObject) -> None:
    """Whatever number is put into a plan's file, a plan that is read still sums to its rank's share of the target."""
    names = ["target_batch", "world_size", "rank", "effective_batch", "micro_batch", "accumulation_steps", "max_micro_batch"]
    name = data.draw(st.sampled_from(names))
    near = st.integers(-2, 2).map(lambda by: getattr(plan, name) + by)
    try:
        read = from_json(changed(plan, **{name: data.draw(near | st.integers())}), PlanRecord)
    except InvalidRequestError:
        return
    share = read.target_batch // read.world_size + (read.rank < read.target_batch % read.world_size)
    assert sum(read.micro_batch_sizes) == share
    assert read.effective_batch == read.target_batch
    assert max(read.micro_batch_sizes) == read.micro_batch <= read.max_micro_batch
    assert len(read.micro_batch_sizes) == read.accumulation_steps


@given(st.text() | st.binary())
def test_what_is_not_json_is_refused(text: str | bytes) -> None:
    """Any text or bytes that autoaccum did not write are refused, not guessed at."""
    with pytest.raises(InvalidRequestError):
        from_json(text, PlanRecord)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
@settings(max_examples=50)
def test_other_json_is_refused(value: object) -> None:
    """Sound JSON of something else is refused."""
    with pytest.raises(InvalidRequestError):
        from_json(json.dumps(value), PlanRecord)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 200_000,
        "[" * 200_000 + "]" * 200_000,
        '{"a":' * 200_000 + "1" + "}" * 200_000,
        changed(PLAN, warnings=...)[:-1] + ', "warnings": ' + "[" * 200_000 + "]" * 200_000 + "}",
        changed(PLAN)[:-1] + ', "surprise": ' + '{"a":' * 200_000 + "1" + "}" * 200_001,
    ],
    ids=["open lists", "lists", "objects", "in a field", "in an unknown field"],
)
def test_huge_nesting_is_refused(text: str) -> None:
    """JSON nested two hundred thousand deep is refused and does not bring the interpreter down."""
    with pytest.raises(InvalidRequestError):
        from_json(text, PlanRecord)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "0x10", "1_000", "1" * 5000])
@pytest.mark.parametrize("field", ["step_time_s", "budget_bytes"])
def test_number_outside_json_is_refused(number: str, field: str) -> None:
    """NaN, infinities and numbers that JSON or a double does not have are refused."""
    text = changed(PLAN, **{field: ...})[:-1] + f', "{field}": {number}}}'
    with pytest.raises(InvalidRequestError):
        from_json(text, PlanRecord)


def test_nan_does_not_come_back_as_a_number() -> None:
    """A NaN that got into a record is not read back as a time."""
    trial = msgspec.structs.replace(PLAN.trials[0], wall_s=float("nan"))
    with pytest.raises(InvalidRequestError, match="wall_s"):
        from_json(to_json(msgspec.structs.replace(PLAN, trials=(trial,))), PlanRecord)


@pytest.mark.parametrize("text", [b"\xff\xfe{}", '{"record": "\ud800"}', b'{"record": "\xc3"}', "\ufeff" + to_json(PLAN)])
def test_broken_encoding_is_refused(text: str | bytes) -> None:
    """Bytes that are not UTF-8, lone surrogates and a byte order mark are refused."""
    with pytest.raises(InvalidRequestError):
        from_json(text, PlanRecord)


@given(any_record, st.data())
def test_frozen(record: Record, data: st.DataObject) -> None:
    """No field of a record can be set again."""
    with pytest.raises(AttributeError):
        setattr(record, data.draw(st.sampled_from(record.__struct_fields__)), None)


@given(any_record)
def test_no_room_for_other_attributes(record: Record) -> None:
    """A record has no `__dict__`, so nothing can be attached to it."""
    assert not hasattr(record, "__dict__")


@pytest.mark.parametrize("kind", list(OF_EVERY_TYPE))
def test_keywords_only(kind: type[Record]) -> None:
    """No record is built from positions."""
    with pytest.raises(TypeError, match="positional"):
        kind(8)  # type: ignore[call-arg]


def test_a_plan_is_for_one_process_and_any_size_unless_it_says_so() -> None:
    """What a plan does not say is the neutral value."""
    said = {name: value for name, value in plain(PLAN).items() if name in {"rank", "min_micro_batch", "multiple_of"}}
    assert said == {"rank": 0, "min_micro_batch": 1, "multiple_of": 1}
    assert (PLAN.equal_micro_batches, PLAN.levers, PLAN.trials[0].purpose) == (False, Levers(), "probe")


def test_json_is_indented() -> None:
    """The JSON of a record is for people too: one field a line, indented by two."""
    assert to_json(Candidate(micro_batch=8)).startswith('{\n  "micro_batch": 8,\n  "levers": {\n    "check')


@given(any_record)
def test_equal_records_hash_alike(record: Record) -> None:
    """A copy of a record is equal to it and finds it in a set."""
    assert msgspec.structs.replace(record) in {record}


def test_a_step_is_a_plain_one_unless_it_says_so() -> None:
    """What a step's result does not say: no replay, not skipped, nothing clipped."""
    result = StepResult(loss=1.0, weight=2.0, micro_batch_sizes=(2, None))
    assert (result.replays, result.skipped, result.grad_norm) == (0, False, None)


def test_a_check_is_in_float64_unless_it_says_so() -> None:
    """What a check's result does not say: no reasons, no notes, compared in float64."""
    result = CheckResult(exact=True, relative_error=0.0, norm_ratio=1.0)
    assert (result.reasons, result.notes, result.micro_batch_sizes, result.dtype) == ((), (), (), "float64")


def test_levers_are_neutral_by_default() -> None:
    """Without arguments every lever is where it changes nothing."""
    assert plain(Levers()) == {
        "checkpointing": "off",
        "checkpointed_blocks": 0,
        "precision": "fp32",
        "optimizer_impl": "default",
        "offload": "off",
        "block_names": (),
    }


@pytest.mark.parametrize(("times", "middle"), [((), None), ((3.0,), 3.0), ((9.0, 1.0, 2.0), 2.0), ((4.0, 1.0), 2.5)])
def test_median_step(times: tuple[float, ...], middle: float | None) -> None:
    """The time of a step is the median of those measured, and not known where none was."""
    assert Fit(peak_bytes=1, step_times_s=times).median_step_s == middle


@pytest.mark.parametrize(("peak", "headroom"), [(2**32, 2**33 - 2**32), (2**33 + 1, -1), (None, None)])
def test_headroom(peak: int | None, headroom: int | None) -> None:
    """Headroom is the budget less the measured peak, and not known where nothing was measured."""
    assert msgspec.structs.replace(PLAN, measured_peak_bytes=peak, predicted_peak_bytes=1).headroom_bytes == headroom


def test_decisions_need_no_torch() -> None:
    """Records, units, schedule and search are imported without torch, pandas and numpy."""
    code = (
        "import sys, autoaccum.records, autoaccum.units, autoaccum.schedule, autoaccum.search;"
        "print(sorted({'torch', 'pandas', 'numpy', 'optuna'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_plan_without_shares_is_read_as_one_of_equal_ones() -> None:
    """Files of before there were shares are read as they are."""
    fields = {name: value for name, value in plain(PLAN).items() if name not in {"shares", "limits"}}
    read = from_json(msgspec.json.encode(fields), PlanRecord)
    assert read == PLAN and read.shares == ()


SHARED = {"world_size": 2, "target_batch": 150, "effective_batch": 150}


def test_plan_with_shares_goes_by_them() -> None:
    """A rank's sizes make up its own share, whatever an equal one would be."""
    plan = msgspec.structs.replace(PLAN, **SHARED, shares=(110, 40), limits=(40, 14))
    assert from_json(to_json(plan), PlanRecord) == plan


@pytest.mark.parametrize(
    "fields",
    [
        {"shares": (110, 39), "limits": (40, 14)},
        {"shares": (40, 110), "limits": (40, 14)},
        {"shares": (110, 40), "limits": ()},
        {"shares": (), "limits": (40, 14)},
        {"shares": (110, 40, 0), "limits": (40, 14, 1)},
        {"shares": (110, 40), "limits": (40, 0)},
    ],
    ids=str,
)
def test_unsound_shares_are_refused(fields: dict[str, Any]) -> None:
    """Shares that do not make up the target, or not these sizes, would change what is learned."""
    with pytest.raises(ValueError, match="do not make up target_batch"):
        msgspec.structs.replace(PLAN, **SHARED, **fields)


@pytest.mark.parametrize("number", [2**63, -(2**63), 10**400, 1e300], ids=["1", "2", "3", "4"])
@pytest.mark.parametrize("field", ["measured_peak_bytes", "step_time_s", "memory"])
def test_number_beyond_reason_is_refused(field: str, number: float) -> None:
    """A number that no counter of bytes, rows or seconds can hold is refused at the door, wherever it stands."""
    account = msgspec.to_builtins(
        MemoryAccount(
            trainable_bytes=1, frozen_bytes=1, buffer_bytes=1, gradient_bytes=1, trainable_parameters=1, frozen_parameters=1
        )
    )
    value = account | {"buffer_bytes": number} if field == "memory" else number
    with pytest.raises(InvalidRequestError, match=r"is not a sound autoaccum\.Plan"):
        from_json(changed(PLAN, **{field: value}), PlanRecord)


@pytest.mark.parametrize("name", ["x" * 10**6, "\x1b[31mred", "a\nb"], ids=["long", "escape", "lines"])
def test_error_about_a_file_is_one_short_line(name: str) -> None:
    """What the file holds is not repeated at length, and nothing in it reaches a terminal as more than text."""
    with pytest.raises(InvalidRequestError) as caught:
        from_json(changed(PLAN, **{name: 1}), PlanRecord)
    assert len(str(caught.value)) < 500 and str(caught.value).isprintable()
