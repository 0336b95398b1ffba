"""Several processes that train together get one answer, none waits for ever, and who is missing is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import autoaccum
from autoaccum.ranks import Ranks, worst
from autoaccum.records import Fit, OutOfMemory, Refused

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("ranks_scenarios.py")
SLOW = (
    "injected",
    "injected_in_three",
    "levers_by_data",
    "levers_for_room",
    "all_exact_levers",
    "levers_sampled",
    "killed_later",
    "few_exchanges",
    "levers_by_memory",
    "proportional_by_memory",
)
HUNG, DIED = "hung", "died"

Answers = dict[str, list[Any]]


def answers_of(folder: Path, wanted: Callable[[str], bool]) -> Answers:
    """What every rank answers in these scenarios, all of which are run in one go."""
    names = [line.split("(")[0][4:] for line in _defined() if wanted(line.split("(")[0][4:])]
    environment = {**os.environ, "PYTHONPATH": str(Path(autoaccum.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), *names], capture_output=True, text=True, timeout=900, env=environment
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: Answers = json.loads((folder / "answers.json").read_text())
    hung = {name: done.stderr[-8000:] for name, of_ranks in found.items() if HUNG in of_ranks}
    assert not hung, hung
    return found


def _defined() -> list[str]:
    """The line of each scenario's function."""
    lines = SCRIPT.read_text(encoding="utf-8").splitlines()
    return [after for before, after in pairwise(lines) if before.startswith("@scenario(")]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Of all quick scenarios."""
    return answers_of(tmp_path_factory.mktemp("ranks"), lambda name: name not in SLOW)


@pytest.fixture(scope="module")
def slow_answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Of all others."""
    return answers_of(tmp_path_factory.mktemp("ranks"), lambda name: name in SLOW)


# -- one answer


def test_all_ranks_get_the_worst_ranks_limit(answers: Answers) -> None:
    """With room for 8 rows on one rank and 3 on the other, both plan with 3, whichever it is, and under DDP."""
    found = answers["worst_rank"]
    assert found[0] == found[1] == [[3, [3, 3, 2], 2, 16]] * 2


def test_uneven_target_is_exact_over_ranks(answers: Answers) -> None:
    """A target that does not divide gives each rank its share, and each knows the other's schedule."""
    found = answers["uneven_target"]
    assert [found[0][0], found[1][0]] == found[0][1] == found[1][1] == [[3, 3, 2], [3, 2, 2]]


def test_every_target_from_the_number_of_ranks_on_is_exact(answers: Answers) -> None:
    """Over three ranks with other limits, equal shares and those in proportion make up any target, the smallest included."""
    assert answers["every_target"] == [[[target] * 3 for target in (3, 4, 7, 11, 50)]] * 3


def test_ranks_with_other_memory_and_other_data_propose_the_same_sizes(answers: Answers) -> None:
    """With another device size and another data length on each rank, both end at the smaller limit with equal logs."""
    found = answers["other_memory_and_data"]
    assert found[0] == found[1]
    assert found[0][1] == "memory"


@pytest.mark.slow
def test_ranks_meet_once_for_each_trial_and_prediction_and_five_times_besides(slow_answers: Answers) -> None:
    """The call, the bounds, the levers, what is kept, and the end: no other exchange, with levers or without."""
    found = slow_answers["few_exchanges"]
    assert found[0] == found[1] and len(found[0]) == 2
    assert [exchanges - trials - predictions for exchanges, trials, predictions in found[0]] == [5, 5]


def check_injected(found: list[Any], cases: int) -> None:
    """Each rank that was to fail has failed once, and all ranks went on with the same trials to the same plan."""
    assert all(set(of_rank) == set(found[0]) for of_rank in found) and len(found[0]) == cases
    for case in found[0]:
        failures = [of_rank[case][0] for of_rank in found]
        assert [bool(count) for count in failures] == [str(rank) == case[0] for rank in range(len(found))], case
        assert all(of_rank[case][1] == found[0][case][1] for of_rank in found), case
        assert max(max(sizes) for sizes in found[0][case][1][2]) == 2, case


@pytest.mark.slow
def test_out_of_memory_anywhere_on_one_of_two_ranks_hangs_nobody(slow_answers: Answers) -> None:
    """On either rank, in every phase, at the first or a later micro-batch, in a probe or in the plan's own step."""
    check_injected(slow_answers["injected"], 32)


@pytest.mark.slow
def test_out_of_memory_on_one_of_three_ranks_hangs_nobody(slow_answers: Answers) -> None:
    """On each of them, in every phase of a probe."""
    check_injected(slow_answers["injected_in_three"], 12)


def test_out_of_memory_on_either_rank_hangs_nobody(answers: Answers) -> None:
    """In the backward pass of a later micro-batch, and in the optimizer's step of the plan's own step."""
    check_injected(answers["injected_somewhere"], 4)


# -- levers


@pytest.mark.slow
def test_levers_are_chosen_alike_where_memory_differs(slow_answers: Answers) -> None:
    """With less memory on one rank, both run the same settings and choose the same, with blocks checkpointed."""
    found = slow_answers["levers_by_memory"]
    assert found[0] == found[1]
    assert "checkpointing='full'" in found[0][1]


@pytest.mark.slow
def test_levers_are_chosen_alike_where_data_differs(slow_answers: Answers) -> None:
    """Longer rows on either rank make other predictions; both ranks go by the same ones."""
    found = slow_answers["levers_by_data"]
    assert found[0] == found[1]


@pytest.mark.slow
def test_all_exact_levers_are_chosen_alike(slow_answers: Answers) -> None:
    """Checkpointing, optimizer implementations and offload together: equal trials, an equal plan."""
    found = slow_answers["all_exact_levers"]
    assert found[0] == found[1]
    assert len({candidate.partition("levers=")[2] for candidate, *_ in found[0][0]}) > 1


@pytest.mark.slow
def test_sampled_levers_are_chosen_alike(slow_answers: Answers) -> None:
    """Where a study samples, the first rank's suggestion is run by both."""
    found = slow_answers["levers_sampled"]
    assert found[0] == found[1]


@pytest.mark.slow
def test_probe_turns_the_same_levers_on_all_ranks(slow_answers: Answers) -> None:
    """The limit under levers is the smaller rank's, by the same trials."""
    found = slow_answers["levers_for_room"]
    assert found[0] == found[1]
    assert "checkpointing='full'" in found[0][1]


def test_time_is_up_on_all_ranks_at_once(answers: Answers) -> None:
    """A rank that takes twice as long ends the search of both after the same trial."""
    found = answers["levers_in_little_time"]
    assert found[0] == found[1]


# -- errors


def test_users_error_on_one_rank_ends_all_ranks(answers: Answers) -> None:
    """The rank with the bug raises it, the others say which rank failed; the next call works."""
    found = answers["users_error"]
    assert found[0] == ["RankMismatchError: rank 1 failed (KeyError: 'missing'); its own traceback says where.", 3]
    assert found[1] == ["KeyError: 'missing'", 3]


def test_users_error_on_the_first_rank_ends_all_ranks(answers: Answers) -> None:
    """As on any other rank."""
    found = answers["users_error_on_the_first"]
    assert found[0] == "KeyError: 'missing'"
    assert found[1].startswith("RankMismatchError: rank 0 failed (KeyError: 'missing')")


def test_users_error_at_a_later_size_ends_all_ranks(answers: Answers) -> None:
    """After some trials as well."""
    found = answers["users_error_in_the_middle"]
    assert found[0].startswith("RankMismatchError: rank 1 failed (KeyError: 'missing')")
    assert found[1] == "KeyError: 'missing'"


def test_request_refused_on_one_rank_ends_all_ranks(answers: Answers) -> None:
    """A budget that one rank cannot have, or what is no optimizer: refused there, and the others say which rank failed."""
    first, second = answers["refused_on_one"]
    assert first[0].startswith("RankMismatchError: rank 1 failed (InvalidRequestError: budget='9GiB'")
    assert second[0].startswith("InvalidRequestError: budget='9GiB'")
    assert first[1].startswith("RankMismatchError: rank 1 failed (InvalidRequestError: optimizer is a int")
    assert second[1].startswith("InvalidRequestError: optimizer is a int")


def test_target_below_the_number_of_ranks_is_refused(answers: Answers) -> None:
    """Every rank needs at least one sample; the error says both numbers."""
    text = "InvalidRequestError: target_batch=1 is smaller than world_size=2; every rank needs at least one sample."
    assert [of_rank[2] for of_rank in answers["refused_on_one"]] == [text, text]


def test_unclear_error_on_one_rank_comes_out_there(answers: Answers) -> None:
    """Where no size runs and memory is not certain, the rank with the error raises it and the other says so."""
    first, second = answers["unclear_on_one"]
    assert second == "RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"
    assert first.startswith("RankMismatchError: no size runs on some other rank") and "CUDNN_STATUS" in first


@pytest.mark.parametrize(
    ("case", "texts"),
    [
        ("target", ["target_batch: 64 on rank 0, 32 on rank 1"]),
        ("several", ["levers: none on rank 0, exact on rank 1", "multiple_of: 1 on rank 0, 2 on rank 1"]),
        ("model", ["model: Linear on rank 0, Sequential on rank 1"]),
        ("shape", ["parameter 'weight': [3, 4] float32 trained on rank 0, [4, 4] float32 trained on rank 1"]),
        ("frozen", ["parameter 'bias': [3] float32 trained on rank 0, [3] float32 frozen on rank 1"]),
        ("optimizer", ["optimizer: SGD on rank 0, AdamW on rank 1"]),
        ("weight", ["shift=False) on rank 0", "shift=True) on rank 1"]),
        ("call", ["call: probe on rank 0, autotune on rank 1"]),
    ],
)
def test_what_differs_is_named_on_every_rank(case: str, texts: list[str], answers: Answers) -> None:
    """Ranks that were called with other arguments are all told which, and which rank has which value."""
    for of_rank in answers["other_arguments"]:
        assert of_rank[case].startswith("RankMismatchError: ")
        assert all(text in of_rank[case] for text in texts)


def test_budgets_may_differ(answers: Answers) -> None:
    """Cards differ, and so may what each may hold."""
    assert [of_rank["budget"] for of_rank in answers["other_arguments"]] == [8, 8]


def test_ranks_with_the_same_value_are_named_together(answers: Answers) -> None:
    """Of three ranks, the odd one out can be seen."""
    found = answers["other_arguments_in_three"]
    assert all("target_batch: 64 on ranks 0 and 2, 32 on rank 1" in text for text in found)


# -- ranks that die


@pytest.mark.parametrize(("case", "dead"), [("killed_in_first_trial", 1), ("killed_first_rank", 0)])
def test_killed_rank_is_named_by_all_others(case: str, dead: int, answers: Answers) -> None:
    """Whichever rank is killed, those that are left name it soon after."""
    check_killed(answers[case], dead)


def test_killed_rank_is_named_over_tcp(answers: Answers) -> None:
    """Where the first rank keeps the store, as with env:// and no torchrun, and another rank is killed."""
    check_killed(answers["killed_without_the_store"], 2)


def test_rank_that_dies_with_the_store_is_named(answers: Answers) -> None:
    """Where the first rank keeps the store, and is killed itself, the others say so at once."""
    found = answers["killed_with_the_store"]
    assert found[0] == DIED
    assert all("rank 0 does, which then has ended or died" in text for text, _ in found[1:]), found


def test_rank_that_keeps_the_store_leaves_last(answers: Answers) -> None:
    """A process that ends right after its plan does not take the others' from them."""
    assert answers["leaves_at_once"] == [3, 3]


@pytest.mark.slow
def test_rank_that_is_killed_later_is_named_as_well(slow_answers: Answers) -> None:
    """After some trials."""
    check_killed(slow_answers["killed_later"], 2)


def check_killed(found: list[Any], dead: int) -> None:
    """The dead rank answers nothing, and all others name it within the limit of the scenario, and some."""
    assert found[dead] == DIED
    for rank, answer in enumerate(found):
        if rank != dead:
            assert answer[0].startswith(f"RankMismatchError: rank {dead} has not answered for"), answer
            assert answer[1] < 60


def test_rank_that_stays_away_is_named(answers: Answers) -> None:
    """One that never calls is missed as well."""
    assert answers["stays_away"][0].startswith("RankMismatchError: rank 1 has not come for")


def test_slow_trial_is_no_dead_rank(answers: Answers) -> None:
    """A trial may take longer than the time after which a silent rank counts as dead."""
    found = answers["slow_trial"]
    assert [limit for limit, _ in found] == [2, 2]
    assert min(seconds for _, seconds in found) > 1.5 * 1.5


# -- shares in proportion


def test_shares_are_in_proportion_to_what_fits(answers: Answers) -> None:
    """With room for 30 and 10 rows, a target of 100 is 75 and 25 rows, in as few steps as hold it, near even."""
    first, second = answers["proportional"]
    assert first["shares"] == second["shares"] == [75, 25] and first["limits"] == [30, 10]
    assert [first["sizes"], second["sizes"]] == first["schedules"] == second["schedules"] == [[25, 25, 25], [9, 8, 8]]
    assert [first["max"], second["max"]] == [30, 10] and first["evidence"] == "exact" and first["limited_by"] == "memory"


def test_plan_with_shares_is_timed_together(answers: Answers) -> None:
    """The plan's own step is the last trial of every rank, and its time is that of the slowest."""
    first, second = answers["proportional"]
    assert first["timed"] == second["timed"] > 0
    assert first["purposes"][-1] == second["purposes"][-1] == "confirm"


def test_accumulator_trains_by_shares(answers: Answers) -> None:
    """From the plan's file alone each rank runs its own sizes, and the step is that of the whole batch in one process."""
    first, second = answers["proportional"]
    assert [first["run"], second["run"]] == [[25, 25, 25], [9, 8, 8]]
    assert max(first["error"], second["error"]) < 2e-6


@pytest.mark.slow
def test_device_with_twice_the_memory_takes_more_rows(slow_answers: Answers) -> None:
    """Measured on virtual devices of 768 and 1536 KiB: shares follow the limits, and levers are said to be left."""
    first, second = slow_answers["proportional_by_memory"]
    assert first[:2] == second[:2] and first[3] == second[3]
    shares, limits = first[0], first[1]
    assert sum(shares) == 1000 and abs(shares[0] - 1000 * limits[0] / sum(limits)) < 1
    assert limits[1] > 2 * limits[0] and [first[2], second[2]] == limits
    assert any("No lever was turned" in text for text in first[4])


def test_share_shrinks_where_the_plans_own_step_fails(answers: Answers) -> None:
    """A rank that runs out of memory only in the plan's own step gets a smaller share, the other a larger one."""
    first, second = answers["proportional_confirm_fails"]
    assert first[:2] == second[:2] == [[23, 37], [6, 10]]
    assert max(first[2]) <= 6 and max(second[2]) <= 10


def test_shares_in_proportion_are_refused_where_they_cannot_be(answers: Answers) -> None:
    """With equal micro-batches, or ranks in lockstep; and a rank on which nothing fits is named."""
    first, second = answers["proportional_refused"]
    assert first["equal"] == second["equal"] and "does not go with equal_micro_batches=True" in first["equal"]
    assert first["lockstep"] == second["lockstep"] and "FSDP and SyncBatchNorm" in first["lockstep"]
    assert first["nothing fits"].startswith("RankMismatchError: rank 1 failed (NothingFitsError")
    assert second["nothing fits"].startswith("NothingFitsError: micro_batch=1 does not fit")


# -- what is kept


def test_only_the_first_rank_touches_what_is_kept(answers: Answers) -> None:
    """Each rank names another folder and storage, and those of the first one alone are made."""
    for of_rank in answers["kept"]:
        assert of_rank["files"] == [[".json"], []]
        assert of_rank["studies"] == [True, False]


def test_remembered_plan_gives_every_rank_its_own_sizes(answers: Answers) -> None:
    """A second call costs one probe and has the first one's settings, with each rank's share of an uneven target."""
    first, second = answers["kept"]
    for rank, found in enumerate((first, second)):
        assert found["again"][0] == rank and found["again"][2] == 1
        assert found["again"][3][1:3] == found["fresh"][1:3]
    assert [sum(first["again"][1]), sum(second["again"][1])] == [17, 16]


def test_stored_trials_are_taken_over_by_all_ranks(answers: Answers) -> None:
    """A second search goes on from the first one's trials, on every rank alike, and ends with the same plan."""
    first, second = answers["kept"]
    assert first["first"] == second["first"] and first["second"] == second["second"]
    assert first["second"] == [0, first["first"]]
    assert first["only first"] == second["only first"] == first["first"]


# -- in one process


def test_one_process_is_its_own_group() -> None:
    """Without a process group there is one rank, which hears itself."""
    ranks = Ranks()
    assert (ranks.world_size, ranks.rank, ranks.gather("said")) == (1, 0, ["said"])


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ([Fit(peak_bytes=1), OutOfMemory(cause="budget")], OutOfMemory(cause="budget")),
        ([Refused(bound="floor"), Fit(peak_bytes=1)], Refused(bound="floor")),
        ([Refused(bound="floor"), OutOfMemory(cause="budget")], OutOfMemory(cause="budget")),
        (
            [Fit(peak_bytes=5, step_times_s=(1.0, 2.0)), Fit(peak_bytes=3, step_times_s=(3.0, 1.0))],
            Fit(peak_bytes=5, step_times_s=(3.0, 2.0)),
        ),
    ],
)
def test_worst_outcome_is_a_failure_before_the_highest_fit(outcomes: list[Any], expected: Any) -> None:
    """Running out anywhere is running out everywhere; fits give the largest peak and the longest times."""
    assert worst(outcomes) == expected
