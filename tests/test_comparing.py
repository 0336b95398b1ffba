"""Two runs side by side: what fails a build, what is noise, and what is refused."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoaccum.comparing import (
    Comparison,
    Figure,
    Row,
    Run,
    Verdict,
    compare,
    comparison_markdown,
    parse_max_regression,
    read_run,
    verdict_line,
)
from autoaccum.errors import InvalidRequestError
from autoaccum.records import (
    SCHEMA_VERSION,
    Candidate,
    CheckResult,
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
    from_json,
    to_json,
)
from autoaccum.timing import timing_of

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


# -- how much is allowed


@pytest.mark.parametrize(
    ("text", "expected"),
    [("5%", 0.05), ("0.05", 0.05), ("5 %", 0.05), (" 2.5% ", 0.025), (".1", 0.1), ("0", 0.0), ("0%", 0.0), ("99.9%", 0.999)],
)
def test_share_is_read(text: str, expected: float) -> None:
    """A percentage and a fraction both say how much worse is allowed."""
    assert parse_max_regression(text) == pytest.approx(expected)


@pytest.mark.parametrize(
    "text", ["", "-5%", "-0.05", "nan", "inf", "five", "5%%", "%", "1e-2", "5 percent", "5%" * 99, "\u0665%"]
)
def test_nonsense_is_no_share(text: str) -> None:
    """What is no share is refused, with what one looks like."""
    with pytest.raises(InvalidRequestError, match=r'cannot be read; expected .*"5%" or "0.05"'):
        parse_max_regression(text)


@pytest.mark.parametrize("text", ["5", "1", "1.5", "100"])
def test_bare_number_from_one_on_is_ambiguous(text: str) -> None:
    """A number without a percent sign that is no fraction is refused, with both of its meanings."""
    with pytest.raises(InvalidRequestError, match=f"could mean {text} % or {text} times as much; write a % sign"):
        parse_max_regression(text)


@pytest.mark.parametrize("text", ["100%", "250 %"])
def test_share_that_allows_everything_is_refused(text: str) -> None:
    """A gate that nothing can fail is refused."""
    with pytest.raises(InvalidRequestError, match="would allow everything"):
        parse_max_regression(text)


# -- what is worse


@pytest.mark.parametrize(
    ("peak", "expected"), [(1000, "ok"), (1050, "ok"), (1051, "regressed"), (950, "ok"), (949, "improved"), (1, "improved")]
)
def test_peak_that_grew_more_than_allowed(peak: int, expected: str) -> None:
    """A measured peak regresses above what is allowed, not at it, and improves by as much downwards."""
    assert verdict_on(plan(), plan(peak=peak), "plan", "peak_bytes") == expected


@pytest.mark.parametrize(
    ("step_s", "expected"),
    [(1.0, "ok"), (1.02, "ok"), (1.06, "too noisy to tell"), (1.2, "regressed"), (0.8, "improved"), (0.95, "ok")],
)
def test_rate_that_fell_more_than_allowed(step_s: float, expected: str) -> None:
    """Samples per second regress where they fell by more than is allowed at the kind ends of both intervals of 1 %."""
    assert verdict_on(plan(), plan(step_s=step_s), "plan", "samples_per_s") == expected


def test_nothing_allowed_lets_equal_runs_pass() -> None:
    """With 0 %, a run compared with itself passes, and a byte more fails."""
    same = plan(step_s=timing(1.0, 0.0))
    assert compare(same, same, 0.0).passed
    assert not compare(same, plan(peak=1001, step_s=timing(1.0, 0.0)), 0.0).passed


@given(st.integers(1, 2**50), st.integers(1, 2**50), st.floats(0, 0.99))
def test_only_one_direction_regresses(one: int, other: int, allowed: float) -> None:
    """Of a comparison and its reverse at most one regresses, and a regression in one is no "ok" in the other's favour."""
    there = verdict_on(plan(peak=one), plan(peak=other), "plan", "peak_bytes", allowed)
    back = verdict_on(plan(peak=other), plan(peak=one), "plan", "peak_bytes", allowed)
    assert not (there == back == "regressed")
    if there == "regressed":
        assert other > one and back in ("improved", "ok")


def test_regression_fails_and_is_counted() -> None:
    """A row that regressed fails the comparison, whose last line says how many did."""
    found = compare(plan(), plan(peak=1500), 0.05)
    assert not found.passed
    assert verdict_line(found) == "**Failed**: 1 of 3 measurements regressed by more than 5 %."


def test_improvement_passes_and_is_listed() -> None:
    """A row that improved passes and is called so."""
    found = compare(plan(), plan(peak=500), 0.05)
    assert found.passed and "-50.0 % | **improved** |" in comparison_markdown(found)


# -- noise


def noisy_steps(generator: random.Random, mean_s: float, noise_frac: float, num: int) -> Timing:
    found = timing_of([max(1e-6, generator.gauss(mean_s, noise_frac * mean_s)) for _ in range(num)])
    assert found is not None
    return found


@pytest.mark.parametrize("num", [2, 3, 5, 6, 10, 30])
@pytest.mark.parametrize("noise_frac", [0.01, 0.05, 0.15])
def test_noise_alone_never_fails(num: int, noise_frac: float) -> None:
    """Two runs of one distribution do not fail, in 200 draws, however many steps were timed."""
    generator = random.Random(0)
    for _ in range(200):
        base, new = (plan(step_s=noisy_steps(generator, 1.0, noise_frac, num)) for _ in range(2))
        assert compare(base, new, 0.05).passed


@pytest.mark.parametrize("num", [9, 12, 30])
def test_slowdown_beyond_the_noise_always_fails(num: int) -> None:
    """Steps that take 20 % longer fail with 2 % of noise, in 200 draws."""
    generator = random.Random(0)
    for _ in range(200):
        base, new = (plan(step_s=noisy_steps(generator, mean_s, 0.02, num)) for mean_s in (1.0, 1.2))
        assert verdict_on(base, new, "plan", "samples_per_s") == "regressed"


def test_wide_interval_is_too_noisy_even_where_nothing_changed() -> None:
    """Where a loss of more than allowed could hide in the noise, the row does not say ok."""
    noisy = plan(step_s=timing(1.0, 0.2))
    found = compare(noisy, noisy, 0.05)
    assert found.passed and verdict_on(noisy, noisy, "plan", "samples_per_s") == "too noisy to tell"
    assert verdict_line(found).endswith("and 1 cannot be told.")


@pytest.mark.parametrize(
    ("num", "expected"), [(1, "too noisy to tell"), (2, "too noisy to tell"), (3, "too noisy to tell"), (4, "regressed")]
)
def test_few_steps_are_judged_by_their_quartiles(num: int, expected: str) -> None:
    """With fewer than six steps the quartiles are widened, the more the fewer there are; two say nothing."""
    base, new = (plan(step_s=timing(step_s, None, num)) for step_s in (1.0, 1.3))
    assert verdict_on(base, new, "plan", "samples_per_s") == expected


def test_single_step_is_said_to_be_too_few() -> None:
    """A row without any spread says why nothing can be told."""
    once = plan(step_s=None, step_time_s=1.0)
    row = rows_of(once, once)["plan", "samples_per_s"]
    assert (row.verdict, row.note) == ("too noisy to tell", "too few optimizer steps were timed")


def test_spread_of_repeated_trials_is_the_noise_of_a_peak() -> None:
    """Where trials of the setting's own kind differ, a peak regresses only beyond that."""
    confirms = (trial(32, 1000, "confirm"), trial(32, 1080, "confirm"))
    base, new = plan(trials=confirms), plan(peak=1090)
    assert verdict_on(base, new, "plan", "peak_bytes") == "too noisy to tell"
    assert verdict_on(base, plan(peak=1200), "plan", "peak_bytes") == "regressed"


def test_trials_of_another_kind_are_no_noise() -> None:
    """The spread is that of trials of the same purpose: a probe's peak says nothing about the plan's own step."""
    base = plan(trials=(trial(32, 1300), trial(32, 1000, "confirm")))
    assert verdict_on(base, plan(peak=1090), "plan", "peak_bytes") == "regressed"


# -- the largest micro-batch


@pytest.mark.parametrize(("size", "expected"), [(40, "ok"), (38, "ok"), (37, "regressed"), (42, "ok"), (43, "improved")])
def test_largest_micro_batch_that_fell(size: int, expected: str) -> None:
    """A largest micro-batch that is known exactly regresses where it fell by more than allowed."""
    assert verdict_on(result(), result(size), "probe result", "max_micro_batch") == expected


def test_peak_at_another_largest_size_is_not_judged() -> None:
    """The peak of a probe's result is that of its largest size, so it is not judged where those differ."""
    row = rows_of(result(), result(37))["probe result", "peak_bytes"]
    assert (row.verdict, row.note) == ("not compared", "it is that of another size")


def test_gap_below_the_failure_is_not_held_against_the_new_run() -> None:
    """Where sizes below the one that failed were not tried, they may fit, and the row says so."""
    gap = result(32, trials=(trial(32, 1000), trial(40, FULL)))
    row = rows_of(result(), gap)["probe result", "max_micro_batch"]
    assert row.verdict == "too coarse to tell" and "sizes up to 39 were not tried" in row.note


def test_sizes_that_a_plan_skips_may_fit() -> None:
    """A plan that went from one micro-batch to two, without a trial in between, may fit all sizes in between."""
    row = rows_of(plan(64, limited_by="target"), plan(32))["plan", "max_micro_batch"]
    assert row.verdict == "too coarse to tell" and "sizes up to 63 were not tried" in row.note


@pytest.mark.parametrize(
    ("changes", "upper"),
    [
        ({"equal_micro_batches": True, "multiple_of": 8}, 23),
        ({"multiple_of": 16}, 31),
        ({}, 21),
        ({"limited_by": "caller"}, None),
    ],
)
def test_next_size_of_the_plans_search_ends_what_may_fit(changes: dict[str, Any], upper: int | None) -> None:
    """Without a failed trial, the next size that the search would have tried is the first that does not fit."""
    row = rows_of(plan(64, limited_by="target"), plan(16, **changes))["plan", "max_micro_batch"]
    assert row.new is not None and row.new.high == upper


def test_limit_other_than_memory_is_no_regression_of_memory() -> None:
    """A largest micro-batch that fell because the caller allowed no more is not held against memory."""
    row = rows_of(result(), result(20, limited_by="caller", trials=()))["probe result", "max_micro_batch"]
    assert row.verdict == "too coarse to tell" and row.note.startswith("memory is not what limits")


def test_smaller_budget_explains_a_smaller_size() -> None:
    """A largest micro-batch that fell with the budget is not judged; one that fell with a larger budget is."""
    tried = (trial(20, 500), trial(21, FULL))
    row = rows_of(result(trials=tried), result(20, budget_bytes=1000, trials=tried))["probe result", "max_micro_batch"]
    assert (row.verdict, row.note) == ("not compared", "the new budget is smaller")
    assert verdict_on(result(), result(20, budget_bytes=4000), "probe result", "max_micro_batch") == "regressed"


def test_larger_budget_explains_a_larger_size() -> None:
    """A largest micro-batch that grew with the budget is no improvement."""
    tried = (trial(20, 500),)
    row = rows_of(result(trials=tried), result(80, budget_bytes=4000, trials=tried))["probe result", "max_micro_batch"]
    assert (row.verdict, row.note) == ("not compared", "the new budget is larger")


def test_budget_does_not_excuse_the_peak_of_an_equal_setting() -> None:
    """The peak of the same setting is judged whatever the budget, and the report says that budgets differ."""
    found = compare(plan(), plan(peak=1500, budget_bytes=1900), 0.05)
    assert not found.passed and any("The budgets differ" in note for note in found.notes)


# -- which measurements belong together


def test_plan_of_another_setting_is_shown_and_not_judged() -> None:
    """A larger micro-batch inside the budget is no regression of memory: its peak is shown, and why it is not judged."""
    found = compare(plan(32, 1000), plan(64, 1900, limited_by="target"), 0.05)
    (row,) = (row for row in found.rows if row.metric == "peak_bytes" and row.part == "plan")
    assert found.passed and (row.verdict, row.note) == ("not compared", "another setting was chosen")
    assert "micro-batch 32, no levers in base, micro-batch 64, no levers in new" in found.notes[-1]


def test_rate_of_the_plan_is_judged_whatever_was_chosen() -> None:
    """Samples per second at the target count, even where the new run reaches them with other levers."""
    slower = plan(64, step_s=1.5, levers=WHOLE, limited_by="target")
    assert verdict_on(plan(), slower, "plan", "samples_per_s") == "regressed"


def test_size_of_other_levers_is_not_judged() -> None:
    """The largest micro-batch is that of the chosen levers, so it is not judged where those differ."""
    row = rows_of(plan(64, levers=WHOLE), plan(32))["plan", "max_micro_batch"]
    assert (row.verdict, row.note) == ("not compared", "it is that of other levers")


def test_settings_of_both_runs_are_compared() -> None:
    """A setting that both runs measured is compared by peak and rate, and can fail the comparison."""
    base, new = (plan(settings=(setting(WHOLE, peak, step_s),)) for peak, step_s in ((500, 2.0), (600, 3.0)))
    rows = rows_of(base, new)
    assert rows["setting", "peak_bytes"].verdict == rows["setting", "samples_per_s"].verdict == "regressed"
    assert rows["plan", "peak_bytes"].verdict == "ok"


def test_chosen_setting_of_one_run_meets_a_measured_one_of_the_other() -> None:
    """A setting that is the answer of one run only is compared with the same setting of the other."""
    base = plan(64, 900, levers=WHOLE, limited_by="target")
    found = compare(base, plan(settings=(setting(WHOLE, 950),)), 0.05)
    verdicts = [row.verdict for row in found.rows if row.base_candidate == row.new_candidate and row.part == "setting"]
    assert verdicts == ["regressed", "regressed"]


def test_number_of_checkpointed_blocks_makes_a_setting() -> None:
    """Settings that differ in how many blocks are checkpointed, or in the micro-batch, are different ones."""
    for other in (setting(msgspec.structs.replace(HALF, checkpointed_blocks=3)), setting(HALF, size=32)):
        found = compare(plan(settings=(setting(HALF),)), plan(settings=(other,)), 0.05)
        assert [row.verdict for row in found.rows if row.part == "setting"] == ["only in base", "only in new"]


def test_setting_of_one_run_is_listed_and_does_not_fail() -> None:
    """A setting that only one run measured is listed, with what the other one says of it."""
    gone = setting(WHOLE, None, None, standing="does not fit", note="too large by 3 GiB")
    found = compare(plan(settings=(setting(WHOLE),)), plan(settings=(gone,)), 0.05)
    (row,) = (row for row in found.rows if row.part == "setting")
    assert found.passed and (row.verdict, row.note) == ("only in base", "new: does not fit; `too large by 3 GiB`")


def test_chosen_setting_that_vanished_is_mentioned() -> None:
    """Where the new run did not measure what the base chose, the row says that it was chosen."""
    found = compare(plan(levers=WHOLE), plan(), 0.05)
    (row,) = (row for row in found.rows if row.verdict == "only in base")
    assert (row.part, row.note, row.base_candidate) == ("setting", "chosen there", Candidate(micro_batch=32, levers=WHOLE))


def test_settings_that_did_not_run_are_left_out() -> None:
    """What a prediction ruled out has no measurement, and no row."""
    ruled_out = setting(WHOLE, None, None, standing="not run")
    assert {row.part for row in compare(plan(settings=(ruled_out,)), plan(), 0.05).rows} == {"plan"}


def test_plan_without_a_timing_is_timed_by_its_trials() -> None:
    """Without a recorded timing, the times of the plan's own optimizer steps count, and no probe's."""

    def timed(step_s: float) -> PlanRecord:
        fits = Fit(peak_bytes=1000, step_times_s=(step_s,) * 6)
        strange = trial(32, Fit(peak_bytes=1000, step_times_s=(99.0,)))
        return plan(step_s=None, trials=(strange, trial(32, fits, "confirm")))

    row = rows_of(timed(1.0), timed(1.2))["plan", "samples_per_s"]
    assert row.base == Figure(value=64.0, low=64.0, high=64.0) and row.verdict == "regressed"


def test_plan_that_was_timed_in_one_run_only() -> None:
    """A measurement that one run lacks is listed, and does not fail."""
    assert verdict_on(plan(), plan(step_s=None), "plan", "samples_per_s") == "only in base"
    assert verdict_on(plan(step_s=None), plan(), "plan", "samples_per_s") == "only in new"


def test_trials_of_one_candidate_are_compared() -> None:
    """The peaks of probes of the same size and levers are compared, and can fail the comparison."""
    base, new = plan(trials=(trial(16, 700),)), plan(trials=(trial(16, 800),))
    assert verdict_on(base, new, "probe trial", "peak_bytes") == "regressed"


def test_probe_and_confirmation_are_not_mixed() -> None:
    """A trial of the plan's own step is never compared with a probe, nor trials of different levers or sizes."""
    base = plan(trials=(trial(16, 700), trial(8, 700)))
    new = plan(trials=(trial(16, 900, "confirm"), trial(8, 900, levers=HALF), trial(4, 900)))
    assert {row.part for row in compare(base, new, 0.05).rows} == {"plan"}


def test_trial_that_a_row_above_shows_is_not_repeated() -> None:
    """The trial that the plan's own peak is from has no row of its own."""
    same = plan(trials=(trial(32, 990), trial(32, 1000, "confirm")))
    assert [row.part for row in compare(same, same, 0.05).rows] == ["plan", "plan", "plan", "probe trial"]
    assert [row.part for row in compare(result(), result(), 0.05).rows] == ["probe result", "probe result"]


def test_trial_that_no_longer_fits_is_at_least_its_budget() -> None:
    """A size that ran far below the budget and now runs out of memory has regressed: its peak is above the budget."""
    base, new = plan(trials=(trial(64, 1500),)), plan(trials=(trial(64, FULL),))
    found = compare(base, new, 0.05)
    (row,) = (row for row in found.rows if row.part == "probe trial")
    assert (row.verdict, row.note, row.new) == ("regressed", "did not fit in new", Figure(value=2000, low=2000, high=None))
    assert "at least +33.3 %" in comparison_markdown(found)


def test_trial_that_failed_by_little_cannot_be_told() -> None:
    """A size that ran close below the budget and now runs out of memory may have grown by less than allowed."""
    base, new = plan(trials=(trial(64, 1990),)), plan(trials=(trial(64, FULL),))
    assert verdict_on(base, new, "probe trial", "peak_bytes") == "too coarse to tell"
    assert verdict_on(new, plan(trials=(trial(64, 1500),)), "probe trial", "peak_bytes") == "improved"


def test_trial_above_the_budget_has_its_peak() -> None:
    """A trial that ran and was above the budget is compared by what it took."""
    above = OutOfMemory(cause="budget", peak_bytes=2100)
    base, new = plan(trials=(trial(64, 1990),)), plan(trials=(trial(64, above),))
    assert verdict_on(base, new, "probe trial", "peak_bytes") == "regressed"


@pytest.mark.parametrize("cause", ["process", "unclear", "retries"])
def test_other_ends_of_a_trial_say_nothing_about_its_peak(cause: Any) -> None:
    """A worker that died, or an error that may not be memory, is no measurement."""
    new = plan(trials=(trial(64, OutOfMemory(cause=cause)),))
    assert {row.part for row in compare(plan(trials=(trial(64, 100),)), new, 0.05).rows} == {"plan"}


def test_trials_that_failed_in_both_runs_have_no_row() -> None:
    """A size that fits in neither run has nothing to compare."""
    both = plan(trials=(trial(64, FULL),))
    assert {row.part for row in compare(both, both, 0.05).rows} == {"plan"}


def test_predictions_are_compared_with_predictions() -> None:
    """Two predicted plans are compared by what was predicted, and the row says so."""
    base, new = (plan(peak=None, step_s=None, evidence="predicted", predicted_peak_bytes=peak) for peak in (1000, 1200))
    assert verdict_on(base, new, "plan", "predicted_peak_bytes") == "regressed"


def test_what_has_nothing_in_common_is_refused() -> None:
    """Where no measurement can be judged there is no verdict, and a gate must not pass."""
    base, new = plan(levers=WHOLE, step_s=None), plan(step_s=None)
    with pytest.raises(InvalidRequestError, match="no measurement in common"):
        compare(base, new, 0.05)


# -- what is not alike


def test_plan_and_probe_are_not_alike() -> None:
    """A plan is not compared with a probe's result."""
    with pytest.raises(InvalidRequestError, match=r"a\.json and b\.json are a Plan and a ProbeResult"):
        compare(plan(), result(), 0.05, base_name="a.json", new_name="b.json", allow_different_environments=True)


def test_different_targets_are_always_refused() -> None:
    """Optimizer steps of different sizes are not compared, whatever is allowed."""
    other = plan(effective_batch=128, target_batch=128, micro_batch_sizes=(32,) * 4, accumulation_steps=4)
    with pytest.raises(InvalidRequestError, match="target_batch=64 and 128"):
        compare(plan(), other, 0.05, allow_different_environments=True)


def test_measurement_and_prediction_are_refused() -> None:
    """What was predicted is not compared with what was measured."""
    with pytest.raises(InvalidRequestError, match="only predicted"):
        compare(plan(), plan(evidence="predicted"), 0.05)


DIFFERENT = [
    ("device", "cuda:0", r"device is 'cpu' and 'cuda'"),
    ("device_name", "arm64", r"device_name is 'x86_64, 4 threads' and 'arm64'"),
    ("model", "Bert", r"model is 'Gpt' and 'Bert'"),
    ("optimizer", "SGD", r"optimizer is 'AdamW' and 'SGD'"),
    ("torch_version", "2.6.0", r"torch_version is '2.13.0' and '2.6.0'"),
    ("python_version", "3.13.0", r"python_version is '3.12' and '3.13'"),
    ("world_size", 2, r"world_size is 1 and 2"),
]


def elsewhere(**changes: Any) -> PlanRecord:
    return plan(environment=msgspec.structs.replace(HOST, **changes))


@pytest.mark.parametrize(("name", "value", "said"), DIFFERENT)
def test_different_environments_are_refused(name: str, value: object, said: str) -> None:
    """Runs of different conditions are not compared; the error names what differs, and nothing else."""
    with pytest.raises(InvalidRequestError, match=f"conditions: {said}. Measure both") as refused:
        compare(plan(), elsewhere(**{name: value}), 0.05)
    assert "--allow-different-environments" in str(refused.value)


@pytest.mark.parametrize("name", [name for name, _, _ in DIFFERENT])
def test_different_environments_can_be_allowed(name: str) -> None:
    """On request they are compared, and the report says what differs."""
    value = 2 if name == "world_size" else "9.9"
    found = compare(plan(), elsewhere(**{name: value}), 0.05, allow_different_environments=True)
    assert found.passed and [note.partition(" ")[0] for note in found.notes] == [name]


@pytest.mark.parametrize(
    ("name", "value"), [("batch", "8 longer rows"), ("driver", "570"), ("platform", "BSD"), ("autoaccum_version", "2.0")]
)
def test_what_explains_a_change_is_noted(name: str, value: str) -> None:
    """Another sample, driver, system or version of autoaccum is noted and refuses nothing."""
    found = compare(plan(), elsewhere(**{name: value}), 0.05)
    assert [note.partition(" ")[0] for note in found.notes] == [name]


def test_equal_devices_and_small_updates_are_alike() -> None:
    """Which of several equal devices was used, and Python's last number, make no difference."""
    one, other = elsewhere(device="cuda:0"), elsewhere(device="cuda:1", python_version="3.12.9")
    assert compare(one, other, 0.05).notes == ()


def test_environment_that_is_not_known_is_refused() -> None:
    """A run that does not say where it was measured is compared on request only."""
    with pytest.raises(InvalidRequestError, match="does not say where it was measured"):
        compare(plan(), plan(environment=None), 0.05)
    assert compare(plan(), plan(environment=None), 0.05, allow_different_environments=True).passed


def test_different_requests_are_noted() -> None:
    """Numbers of the request that shape the answer are noted where they differ."""
    notes = compare(plan(), plan(multiple_of=8, objective="memory"), 0.05).notes
    assert [note.partition(" ")[0] for note in notes] == ["multiple_of", "objective"]


# -- files


@pytest.mark.parametrize("run", [plan(), result()], ids=["plan", "result"])
def test_run_is_read_from_its_json(run: Run) -> None:
    """A plan and a probe's result are told apart by the file itself."""
    assert read_run(to_json(run).encode(), "run.json") == run


def changed_text(run: Run, **changes: Any) -> str:
    return json.dumps({**json.loads(to_json(run)), **changes})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "[" * 100_000,
        "\xff\xfe",
        '{"record": "autoaccum.Plan"}',
        '{"record": 7}',
        to_json(plan())[:-40],
        to_json(CheckResult(exact=True, relative_error=0.0, norm_ratio=1.0)),
        changed_text(plan(), schema_version=SCHEMA_VERSION + 1),
        changed_text(plan(), target_batch=65),
        changed_text(plan(), extra=1),
        changed_text(plan(), measured_peak_bytes="__import__('os').abort()"),
        changed_text(plan(), step_time_s=-1.0),
        changed_text(plan(), max_micro_batch=10**400),
        changed_text(result(), budget_bytes=-5),
        changed_text(result(), levers={"checkpointed_blocks": 10**400}),
        changed_text(result(), levers=3),
        changed_text(plan(), timing=json.loads(to_json(timing(-1.0)))),
        changed_text(plan(), settings=[json.loads(to_json(setting(WHOLE, -7)))]),
    ],
)
def test_damaged_file_is_named(text: str) -> None:
    """Whatever is wrong with a file, the error is one line that begins with its name."""
    with pytest.raises(InvalidRequestError, match=r"^run\.json: ") as refused:
        read_run(text.encode("latin-1"), "run.json")
    assert len(str(refused.value).splitlines()) == 1 and len(str(refused.value)) < 500


def test_error_about_a_file_cannot_write_to_a_terminal() -> None:
    """Control characters of a file or its name do not reach the error."""
    text = changed_text(plan(), **{"\x1b[2J\n::stop-commands::": 1})
    with pytest.raises(InvalidRequestError) as refused:
        read_run(text, "run\n\x1b[1m.json")
    assert str(refused.value).isprintable()


HOSTILE = "`|\n\r\u2028 <script>alert(1)</script> ![x](http://a.b) \\| @all \x1b[2J\u202e ```"


def test_text_of_files_cannot_become_markup() -> None:
    """Whatever texts the files hold, the table keeps its shape and the texts stand in code spans."""
    levers = Levers(checkpointing="selective", checkpointed_blocks=1, block_names=(HOSTILE, "h.1"))
    named = dict.fromkeys(("model", "optimizer", "batch", "driver", "platform"), HOSTILE)
    ruled_out = setting(WHOLE, None, None, standing="does not fit", note=HOSTILE)
    base = plan(environment=msgspec.structs.replace(HOST, **named), settings=(setting(levers), setting(WHOLE)))
    new = plan(levers=levers, settings=(ruled_out,))
    found = compare(base, new, 0.05, base_name=HOSTILE, new_name="<b>", allow_different_environments=True)
    shown = comparison_markdown(found)
    assert shown.replace("\n", "").isprintable() and "\\" not in shown
    for line in shown.splitlines():
        outside = "".join(line.split("`")[::2]).replace(" -> ", "")
        assert line.count("`") % 2 == 0 and not set(outside) & set("<>[]@!")
    table = [line for line in shown.splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(found.rows) and {line.count("|") for line in table} == {7}


NUMBERS = st.one_of(st.none(), st.integers(0, 2**53))


@given(peak=NUMBERS, budget=st.integers(0, 2**53), median=st.floats(0, 1e18), off=st.floats(0, 1e18), num=st.integers(0, 9))
def test_any_numbers_of_a_file_give_a_verdict(peak: int | None, budget: int, median: float, off: float, num: int) -> None:
    """Zeros and huge numbers end in a verdict or in a refusal, and the report can be written and read again."""
    strange = plan(peak=peak, step_s=timing(median, off if num % 2 else None, num), budget_bytes=budget)
    strange = msgspec.structs.replace(strange, trials=(trial(32, peak or 0, "confirm"), trial(64, FULL)))
    for base, new in ((plan(), read_run(to_json(strange), "x")), (strange, plan()), (strange, strange)):
        found = compare(base, new, 0.05)
        assert comparison_markdown(found).endswith(".\n")
        assert from_json(to_json(found), Comparison) == found


# -- the report


def test_report_is_a_table_and_a_line() -> None:
    """The Markdown has a row for each measurement, with its interval, and ends with the verdict."""
    shown = comparison_markdown(compare(plan(peak=2**20), plan(peak=2**21), 0.05, base_name="a.json", new_name="b.json"))
    assert shown.splitlines() == [
        "## autoaccum compare",
        "",
        "Base `a.json`, new `b.json`.",
        "",
        "| setting | metric | base | new | change | verdict |",
        "|---|---|---|---|---|---|",
        "| plan: micro-batch 32, no levers | measured peak | 1.00 MiB | 2.00 MiB | +100.0 % | **regressed** |",
        "| plan: micro-batch 32, no levers | samples/s | 64 (63.37 to 64.65) | 64 (63.37 to 64.65) | +0.0 % | ok |",
        "| plan: micro-batch 32, no levers | largest micro-batch | 32 | 32 | +0.0 % | ok |",
        "",
        "**Failed**: 1 of 3 measurements regressed by more than 5 %.",
    ]


def test_levers_of_a_row_are_named() -> None:
    """A setting is shown with the levers that are turned, and two of them where they differ."""
    shown = comparison_markdown(compare(plan(levers=HALF), plan(), 0.05))
    assert "plan: micro-batch 32, checkpointing selective, checkpointed_blocks 2 -> micro-batch 32, no levers" in shown


def test_comparison_is_read_from_its_json() -> None:
    """The JSON of a comparison says whether it passed, and can be read again."""
    found = compare(plan(), plan(peak=1500, step_s=None), 0.05)
    written = json.loads(to_json(found))
    assert (written["record"], written["passed"]) == ("autoaccum.Comparison", False)
    assert from_json(to_json(found), Comparison) == found
