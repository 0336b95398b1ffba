"""Training on two and three gloo ranks, started by torchrun: one gradient for all, and nobody waits for ever.

Rank 0 has more rows than the others; of three ranks the last one has none. A rank that hangs ends the run by a timeout.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import autoaccum

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "ranks_script.py"
Answers = list[dict[str, Any]]


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)], ids=["two-ranks", "three-ranks"])
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """What every rank answered to every scenario."""
    world, folder = request.param, tmp_path_factory.mktemp("ranks")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={world}",
            str(SCRIPT),
            str(folder),
        ],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(autoaccum.__file__).parents[1]), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


@pytest.mark.parametrize("how", ["plain", "ddp", "static_graph", "unused"])
def test_gradient_is_that_of_all_ranks_rows(answers: Answers, how: str) -> None:
    """With uneven rows, ignored labels and a parameter that one rank alone uses, the gradient is the whole batch's.

    A mean per rank, averaged over ranks as DistributedDataParallel does, is wrong by the factor of the ranks' weights.
    """
    for answer in answers:
        assert answer[f"exact-{how}"]["error"] <= 1e-12


@pytest.mark.parametrize("how", ["plain", "ddp", "static_graph", "unused"])
def test_loss_and_weight_are_those_of_all_ranks(answers: Answers, how: str) -> None:
    """Every rank reports the mean loss over all rows with a label that counts: 18 of 20."""
    for answer in answers:
        assert answer[f"exact-{how}"]["loss_error"] <= 1e-12
        assert answer[f"exact-{how}"]["weight"] == 18


@pytest.mark.parametrize("how", ["plain", "ddp", "static_graph", "unused"])
def test_ranks_are_bit_equal(answers: Answers, how: str) -> None:
    """After three windows gradients and parameters are the same on all ranks, bit for bit."""
    assert all(answer[f"exact-{how}"]["same"] for answer in answers)


@pytest.mark.parametrize("how", ["plain", "ddp", "static_graph", "unused"])
def test_parameter_that_no_rank_uses_has_no_gradient(answers: Answers, how: str) -> None:
    """A parameter unused everywhere stays without a gradient, so that weight decay does not move it."""
    assert all(answer[f"exact-{how}"]["never_used_is_none"] for answer in answers)


def test_ranks_have_micro_batches_of_their_own(answers: Answers) -> None:
    """Numbers of micro-batches differ between ranks; a rank without data has none."""
    sizes = [answer["exact-plain"]["sizes"] for answer in answers]
    assert sizes == ([[4, 3, 3, 3], [4, 3]] if len(answers) == 2 else [[4, 4, 4], [4, 4], []])


@pytest.mark.parametrize("how", ["plain", "static_graph"])
def test_out_of_memory_on_one_rank_is_replayed_by_all(answers: Answers, how: str) -> None:
    """Wherever one rank runs out of memory, all replay: gradients, loss and buffers as with the smaller size from the start.

    Bit for bit, with dropout and BatchNorm in the model. Every rank, micro-batch and phase is tried.
    """
    for answer in answers:
        for case in answer[f"replays-{how}"]:
            assert case["replays"] == case["expected_replays"], case
            assert all(value for name, value in case.items() if name.endswith("as_expected")), case
    happened = [case["at"] for case in answers[0][f"replays-{how}"] if case["happens"]]
    assert len(happened) >= 10


@pytest.mark.parametrize("how", ["plain", "static_graph"])
def test_ranks_are_bit_equal_after_a_replay(answers: Answers, how: str) -> None:
    """Parameters and buffers are the same on all ranks, whether or not there was a replay."""
    assert all(case["same"] for answer in answers for case in answer[f"replays-{how}"])


@pytest.mark.parametrize(
    ("scenario", "expected"),
    [
        ("users_error", "KeyError"),
        ("single_row_too_large", "OutOfMemoryError"),
        ("optimizer_out_of_memory", "OutOfMemoryError"),
        ("bad_batch", "InvalidRequestError"),
        ("failing_loader", "OSError"),
    ],
)
def test_error_on_one_rank_ends_the_window_on_all(answers: Answers, scenario: str, expected: str) -> None:
    """The rank that failed raises its own error, the others one that names it."""
    for rank, answer in enumerate(answers):
        assert answer[scenario][0] == (expected if rank == 1 else "RankMismatchError"), answer[scenario]
        if rank != 1:
            assert "rank 1" in answer[scenario][1]


def test_error_in_the_optimizer_carries_advice(answers: Answers) -> None:
    """Running out of memory in the step itself says that it is not replayed."""
    assert "does not replay an optimizer step" in answers[1]["optimizer_out_of_memory"][2]


def test_loaders_of_different_length(answers: Answers) -> None:
    """Every rank takes as many steps as the longest loader needs, and nothing is dropped."""
    weights, sizes = answers[0]["uneven_loaders"]
    assert weights == [4 * len(answers), 4, 2]
    assert sizes == [[2, 2], [2, 2], [2]]
    for answer in answers[1:]:
        assert answer["uneven_loaders"] == [weights, [[2, 2], [], []]]


def test_window_without_data_anywhere_takes_no_step(answers: Answers) -> None:
    """None, an empty batch and an empty window on all ranks are skipped."""
    assert all(answer["nothing_anywhere"] == [[True, 0.0]] * 3 for answer in answers)


def test_infinity_on_one_rank_skips_the_step_on_all(answers: Answers) -> None:
    """The scale is halved once, no parameter moves, and the next window is stepped on all ranks."""
    assert all(answer["scaler_overflow"] == [True, True, 512.0, False, True] for answer in answers)


def test_sparse_gradients_over_ranks(answers: Answers) -> None:
    """Sparse gradients of token means are those of the whole batch, and the same on all ranks."""
    for answer in answers:
        assert answer["sparse"]["error"] <= 1e-12
        assert answer["sparse"]["weight"] == answer["sparse"]["expected_weight"]
        assert answer["sparse"]["same"]


def test_clipping_by_the_norm_over_all_ranks(answers: Answers) -> None:
    """The norm reported is that of the whole batch's gradient, and the gradient is scaled to the limit."""
    for answer in answers:
        assert answer["clipped"]["norm_error"] <= 1e-12
        assert answer["clipped"]["clipped_error"] <= 1e-5  # clip_grad_norm_ adds 1e-6 to the norm


def test_half_precision_over_ranks(answers: Answers) -> None:
    """Parameters of bfloat16 have the whole batch's gradient to the precision of one backward pass in bfloat16."""
    for answer in answers:
        assert answer["half_precision"]["error"] <= 0.01
        assert answer["half_precision"]["same"]
        assert answer["half_precision"]["dtypes"] == ["torch.bfloat16"]


def test_loop_of_ones_own_over_ranks(answers: Answers) -> None:
    """The explicit form reduces as `step` does, and may call the wrapped model."""
    assert all(answer["explicit"]["error"] <= 1e-12 for answer in answers)


needs_fsdp = pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="FSDP2 does not run on this torch's CPU")


@needs_fsdp
def test_sharded_model_trains_as_the_whole_batch(answers: Answers) -> None:
    """FSDP2 with uneven rows: parameters after two clipped steps, and losses, are those of the whole batch."""
    for answer in answers:
        assert answer["sharded"]["error"] <= 1e-10
        assert answer["sharded"]["loss_error"] <= 1e-10


@needs_fsdp
def test_sharded_model_needs_data_on_every_rank(answers: Answers) -> None:
    """FSDP cannot run on some ranks only, which all of them say."""
    for answer in answers:
        kind, text = answer["sharded_without_data"][:2]
        assert kind == "InvalidRequestError"
        assert "every rank" in text


@needs_fsdp
def test_bad_batch_of_a_sharded_model(answers: Answers) -> None:
    """A batch that one rank cannot cut ends the window on all of them, and the next window is taken together."""
    for rank, answer in enumerate(answers):
        kind, weight = answer["sharded_bad_batch"]
        assert kind == ("InvalidRequestError" if rank == 1 else "RankMismatchError")
        assert weight == 4 * len(answers)


@pytest.mark.parametrize("scenario", ["forward_before-all", "forward_before-one", "inner_model", "two_networks"])
def test_wrapped_models_exchange_nothing_inside_a_window(answers: Answers, scenario: str) -> None:
    """Whoever calls a wrapped model, before or inside a window, the gradient is that of all ranks' rows.

    A forward outside of a window arms its reducer, which would add up half of the first micro-batch.
    """
    assert all(answer[scenario]["error"] <= 1e-12 for answer in answers)


@pytest.mark.parametrize(
    ("scenario", "text"),
    [
        ("other_parameters", "parameters differ before the first step"),
        ("fewer_trainable", "different numbers of parameters"),
        ("after_a_failed_step", "Load a checkpoint on every rank"),
        ("after_a_broken_step", "Load a checkpoint on every rank"),
    ],
)
def test_ranks_that_differ_are_told_so(answers: Answers, scenario: str, text: str) -> None:
    """Every rank refuses to train on when parameters differ, before the first step and after one that failed somewhere."""
    for answer in answers:
        kind, said = answer[scenario][:2]
        assert kind == "RankMismatchError"
        assert text in said
