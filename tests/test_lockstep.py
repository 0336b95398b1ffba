"""Models whose ranks run together (FSDP2, SyncBatchNorm) on two to four gloo ranks.

Wherever one rank fails in a trial, all leave it together, and nothing is left of it. A rank that hangs ends the run by a
timeout.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.fsdp import FSDPModule

import autoaccum

SCRIPT = Path(__file__).parent / "lockstep_script.py"
Answers = list[dict[str, Any]]
Run = Callable[..., Answers]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not hasattr(FSDPModule, "reset_iter_state"),
        reason="FSDP2 of this torch cannot go on after a step that was broken off",
    ),
    pytest.mark.timeout(500),  # a fixture runs many scenarios in one start of the rank]
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run scenarios on some ranks; gives what every rank answered, by scenario."""

    def run_scenarios(world: int, *scenarios: str) -> Answers:
        folder = tmp_path_factory.mktemp("lockstep")
        common = {**os.environ, "PYTHONPATH": str(Path(autoaccum.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
        processes = [
            subprocess.Popen(
                [sys.executable, str(SCRIPT), str(folder), *scenarios],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                env={**common, "RANK": str(rank), "WORLD_SIZE": str(world)},
            )
            for rank in range(world)
        ]
        try:
            errors = [process.communicate(timeout=400)[1] for process in processes]
        finally:
            for process in processes:
                process.kill()
        files = [folder / f"{rank}.json" for rank in range(world)]
        answered = [json.loads(file.read_text()) if file.exists() else {} for file in files]
        for error, answer in zip(errors, answered, strict=True):
            assert list(answer) == list(scenarios) or scenarios == ("ends",), error[-4000:]
        return answered

    return run_scenarios


@pytest.fixture(scope="module")
def answers(run: Run) -> Answers:
    """What two ranks answered to the quick scenarios."""
    return run(
        2,
        *("users_error", "different_paths", "partly_sharded", "uneven", "only_replicas", "other_ranks", "peaks"),
        *("everywhere-kept-whole", "wrapped_checkpointed", "wrapped_memory"),
    )


@pytest.fixture(scope="module")
def searches(run: Run) -> Answers:
    """What two ranks answered to whole searches and long series of trials."""
    return run(2, "at_every_allocation", "tuned", "tuned-levers", "statistics", "checkpointed", "probed_on_cpu")


def assert_all_left_together(cases: list[dict[str, Any]]) -> None:
    """Each trial failed where it was to, left nothing behind, and the next one ran as if it had not been."""
    for case in cases:
        assert case["outcome"] == ["OutOfMemory", case["at"][1]], case
        assert case["kept"], case
        assert case["after"] == ["Fit", None], case
        assert case["same_gradients"] and case["same_peak"], case


def test_out_of_memory_anywhere_hangs_nobody(answers: Answers) -> None:
    """At every rank, block and phase, the trial fails on all; weights come back bit for bit; the next trial is as the first.

    Weights stay whole after the forward pass here, and are gathered in bfloat16.
    """
    for answer in answers:
        assert len(answer["everywhere-kept-whole"]) == 2 * (2 * 3 + 1)
        assert_all_left_together(answer["everywhere-kept-whole"])


@pytest.mark.slow
def test_whole_weights_are_let_go_of_wherever_memory_ran_out(searches: Answers) -> None:
    """With thirty capacities on one rank, of which none is enough: gathered weights are freed, shards are as they were."""
    for answer in searches:
        found = answer["at_every_allocation"]
        assert {kind for kind, _ in found["phases"]} == {"OutOfMemory"}
        assert {"forward", "backward"} <= {phase for _, phase in found["phases"]}
        assert found["clean"]
        assert found["after"] == ["Fit", None]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "scenario"), [(3, "everywhere"), (2, "everywhere-checkpointed"), (4, "replicas")], ids=lambda value: str(value)
)
def test_out_of_memory_anywhere_hangs_nobody_either(run: Run, world: int, scenario: str) -> None:
    """As above, with shards of uneven size on three ranks, with blocks computed again, and with replicas of shards."""
    for answer in run(world, scenario):
        assert_all_left_together(answer[scenario])


def test_users_error_on_one_rank_ends_the_search_on_all(answers: Answers) -> None:
    """The rank with the bug raises it, the other one says which rank failed."""
    assert answers[0]["users_error"]["raised"][0] == "RankMismatchError"
    assert "rank 1 failed (KeyError" in answers[0]["users_error"]["raised"][1]
    assert answers[1]["users_error"]["raised"][0] == "KeyError"


def test_search_after_an_error_runs(answers: Answers) -> None:
    """Weights are as they were, FSDP has its own exchanges back, and another search on the same model runs."""
    for answer in answers:
        assert answer["users_error"]["kept"] and answer["users_error"]["own_exchanges"]
        assert answer["users_error"]["after"] == ["Fit", None]


def test_ranks_that_do_different_things_are_told_so(answers: Answers) -> None:
    """One that leaves out a module does not leave the other waiting in an exchange."""
    for answer in answers:
        kind, text = answer["different_paths"]
        assert kind == "RankMismatchError"
        assert "do different things" in text


@pytest.mark.parametrize(
    ("scenario", "text"),
    [
        ("partly_sharded", "parameter 'blocks.1.first.weight' is trained and not sharded"),
        ("only_replicas", "its mesh has replicas only"),
        ("other_ranks", "sharded over 2 ranks, and 1 train together"),
    ],
)
def test_what_cannot_be_probed_is_refused(answers: Answers, scenario: str, text: str) -> None:
    """On every rank, with the reason, before anything runs."""
    for answer in answers:
        kind, said = answer[scenario]
        assert kind == "InvalidRequestError"
        assert text in said


def test_uneven_numbers_of_micro_batches(answers: Answers) -> None:
    """A rank that has a micro-batch less runs its last one again for nothing, in the search as in training."""
    assert [answer["uneven"]["steps"] for answer in answers] == [2, 1]
    for answer in answers:
        assert answer["uneven"]["trained"]["error"] <= 2e-6


@pytest.mark.slow
def test_recomputed_blocks_of_sharded_models_are_exact(searches: Answers) -> None:
    """Full and selective, with blocks that are sharded as a whole or in parts, bit for bit; full ones take less memory."""
    for answer in searches:
        for found in answer["checkpointed"]:
            assert found["full"] == [True, True]
            assert found["selective"][0]


def test_whole_parameters_are_in_the_peak(answers: Answers) -> None:
    """Keeping blocks whole after the forward pass takes more, by less than all of their weights."""
    for answer in answers:
        freed, kept = answer["peaks"]
        assert 0 < kept - freed < 3 * 4 * (2 * 16 * 64 + 64 + 16)


@pytest.mark.slow
def test_statistics_over_ranks_hang_nobody(searches: Answers) -> None:
    """Out of memory on one rank around SyncBatchNorm, in forward and backward: all leave, and the next trial runs."""
    for answer in searches:
        *cases, _ = answer["statistics"]
        assert [case[0] for case in cases] == [["OutOfMemory", "forward"]] * 3 + [["OutOfMemory", "backward"]] * 3
        assert all(kept and after == ["Fit", None] for _, kept, after in cases)


def test_reduction_is_in_the_peak_of_wrapped_models(answers: Answers) -> None:
    """Buckets of DistributedDataParallel and the buffers of our own reduction, in float32 and bfloat16.

    When an exchange lets go of a small tensor is for gloo's thread to say, hence the 5 %; the buckets are twice that.
    """
    for answer in answers:
        for measured, in_training in answer["wrapped_memory"]:
            assert 0.95 * in_training <= measured <= 1.05 * in_training


@pytest.mark.parametrize("index", [0, 1], ids=["full", "selective"])
def test_recomputed_blocks_under_distributed_data_parallel(answers: Answers, index: int) -> None:
    """Three steps with a plan that computes blocks again equal the whole batch's in one process without."""
    for answer in answers:
        found = answer["wrapped_checkpointed"][index]
        assert found["runs_per_micro_batch"] == 2.0
        assert found["error"] <= 2e-6
        assert found["loss_error"] <= 2e-6


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["tuned", "tuned-levers"])
def test_tuned_and_trained(searches: Answers, scenario: str) -> None:
    """One plan for all ranks inside the budget; then three steps equal the whole batch's in one process."""
    plans = [{name: answer[scenario][name] for name in ("schedules", "peak", "trials", "levers")} for answer in searches]
    assert plans[0] == plans[1]
    for answer in searches:
        assert answer[scenario]["fits"] and answer[scenario]["kept"]
        assert answer[scenario]["trained"]["error"] <= 2e-6
        assert answer[scenario]["trained"]["loss_error"] <= 2e-6


@pytest.mark.slow
def test_search_says_that_it_has_no_prediction(searches: Answers) -> None:
    """Exchanges cannot be traced."""
    assert all(any("No prediction" in said for said in answer["tuned"]["warnings"]) for answer in searches)


@pytest.mark.slow
def test_levers_that_do_not_go_with_shards_are_skipped(searches: Answers) -> None:
    """Autocast and offload, with the reason; the optimizer's implementations can be turned."""
    for answer in searches:
        skipped = answer["tuned-levers"]["skipped"]
        assert "MixedPrecisionPolicy" in skipped["precision bf16"]
        assert "FSDP frees" in skipped["offload cpu"]
        assert "optimizer_impl foreach" not in skipped


@pytest.mark.slow
def test_process_that_ends_in_a_trial_is_noticed(run: Run) -> None:
    """The others do not wait for it."""
    *others, ended = run(2, "ends")
    assert not ended
    for answer in others:
        assert answer["ends"][0] == "RankMismatchError"
        assert "another rank has ended" in answer["ends"][1]


@pytest.mark.slow
def test_probe_in_host_memory(searches: Answers) -> None:
    """Peaks are those of the process, and the limit is the caller's."""
    assert all(answer["probed_on_cpu"] == [16, "caller", "measured"] for answer in searches)
