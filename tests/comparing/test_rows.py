"""Which measurements of two runs are put side by side."""

from __future__ import annotations

import msgspec
import pytest

from autoaccum.comparing.compare import compare
from autoaccum.records import (
    Candidate,
)

from .runs import HALF, WHOLE, plan, result, rows_of, setting, trial, verdict_on


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


@pytest.mark.parametrize("evidence", ["predicted", "measured"])
def test_searches_are_compared_by_what_was_measured(evidence: str) -> None:
    """A search whose largest size is only predicted is compared by its measured peak, with searches of either kind."""
    base, new = plan(evidence="predicted", trials=(trial(32, 1000),)), plan(evidence=evidence, trials=(trial(32, 1000),))
    assert verdict_on(base, new, "plan", "peak_bytes") == "ok"


def test_predictions_are_compared_with_predictions() -> None:
    """Two predicted plans are compared by what was predicted, and the row says so."""
    base, new = (plan(peak=None, step_s=None, evidence="predicted", predicted_peak_bytes=peak) for peak in (1000, 1200))
    assert verdict_on(base, new, "plan", "predicted_peak_bytes") == "regressed"
