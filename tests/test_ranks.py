"""Several processes that train together get one answer, and none waits for ever."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import autoaccum
from autoaccum.ranks import Ranks, Report, worst
from autoaccum.records import Fit, OutOfMemory, Refused

HEAD = """
import json, os, sys
import torch
import torch.distributed as dist
from torch import nn
import autoaccum
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)

class Fuse(nn.Module):
    def __init__(self, limit):
        super().__init__()
        self.linear, self.limit = nn.Linear(4, 3), limit
    def forward(self, x):
        if len(x) > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return self.linear(x)

class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        raise torch.OutOfMemoryError("CUDA out of memory.")

def answer(value):
    print("ANSWER " + json.dumps(value), flush=True)
"""


def run_ranks(source: str, folder: Path) -> list[Any]:
    """Run the source on two gloo ranks; gives what each answered."""
    script = folder / "script.py"
    script.write_text(HEAD + textwrap.dedent(source) + "\ndist.destroy_process_group()\n")
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(folder / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=_environment(),
        )
        for rank in range(2)
    ]
    answers = []
    for process in processes:
        out, error = process.communicate(timeout=100)
        lines = [line for line in out.splitlines() if line.startswith("ANSWER ")]
        assert lines, error[-3000:]
        answers.append(json.loads(lines[-1].removeprefix("ANSWER ")))
    return answers


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(Path(autoaccum.__file__).parents[1]), "OMP_NUM_THREADS": "1"}


def test_all_ranks_get_the_worst_ranks_limit(tmp_path: Path) -> None:
    """With room for 8 rows on one rank and 3 on the other, both plan with 3, whichever it is, and under DDP."""
    answers = run_ranks(
        """
        found = []
        for limits in ((8, 3), (3, 8)):
            model = nn.parallel.DistributedDataParallel(Fuse(limits[rank]))
            plan = autoaccum.autotune(model, torch.randn(4, 4), 16, device="virtual:1GiB")
            found.append([plan.max_micro_batch, plan.micro_batch_sizes, plan.world_size, plan.effective_batch])
        model(torch.randn(2, 4)).sum().backward()      # DDP still works after the search
        answer(found)
        """,
        tmp_path,
    )
    assert answers[0] == answers[1] == [[3, [3, 3, 2], 2, 16]] * 2


def test_uneven_target_is_exact_over_ranks(tmp_path: Path) -> None:
    """A target that does not divide gives each rank its share, and each knows the other's schedule."""
    answers = run_ranks(
        """
        plan = autoaccum.autotune(Fuse(3), torch.randn(4, 4), 15, device="virtual:1GiB")
        answer([plan.micro_batch_sizes, [plan.schedule(0), plan.schedule(1)]])
        """,
        tmp_path,
    )
    assert [answers[0][0], answers[1][0]] == answers[0][1] == answers[1][1] == [[3, 3, 2], [3, 2, 2]]


def test_out_of_memory_in_backward_on_one_rank_does_not_hang(tmp_path: Path) -> None:
    """When only rank 1 fails, and in backward, both go on with the smaller size."""
    answers = run_ranks(
        """
        def step(model, batch):
            hidden = model(batch)
            return (FailsBackward.apply(hidden) if rank == 1 and len(batch) > 2 else hidden).sum()
        plan = autoaccum.autotune(Fuse(100), torch.randn(4, 4), 16, training_step=step, device="virtual:1GiB")
        answer(plan.max_micro_batch)
        """,
        tmp_path,
    )
    assert answers == [2, 2]


def test_users_error_on_one_rank_ends_all_ranks(tmp_path: Path) -> None:
    """The rank with the bug raises it, the others say which rank failed."""
    answers = run_ranks(
        """
        def step(model, batch):
            return model(batch).sum() if rank == 0 else {}["missing"]
        try:
            autoaccum.autotune(Fuse(100), torch.randn(4, 4), 16, training_step=step, device="virtual:1GiB")
        except Exception as error:
            answer(f"{type(error).__name__}: {error}")
        """,
        tmp_path,
    )
    assert answers[0].startswith("RankMismatchError: rank 1 failed")
    assert answers[1] == "KeyError: 'missing'"


def test_target_below_the_number_of_ranks_is_refused(tmp_path: Path) -> None:
    """Every rank needs at least one sample; the error says both numbers."""
    answers = run_ranks(
        """
        try:
            autoaccum.autotune(Fuse(100), torch.randn(4, 4), 1, device="virtual:1GiB")
        except autoaccum.InvalidRequestError as error:
            answer(str(error))
        """,
        tmp_path,
    )
    assert answers[0] == "target_batch=1 is smaller than world_size=2; every rank needs at least one sample."


def test_ranks_with_other_memory_and_other_data_propose_the_same_sizes(tmp_path: Path) -> None:
    """With another device size and another data length on each rank, both end at the smaller limit with equal logs."""
    answers = run_ranks(
        """
        model = nn.Sequential(nn.Linear(4, 256), nn.ReLU(), nn.Linear(256, 3))
        data = torch.utils.data.TensorDataset(torch.randn(900 if rank else 700, 4))
        step = lambda model, batch: model(batch[0]).sum()
        found = autoaccum.probe(model, data, training_step=step, device=("virtual:1MiB", "virtual:640KiB")[rank])
        answer([found.max_micro_batch, found.limited_by, [trial.candidate.micro_batch for trial in found.trials]])
        """,
        tmp_path,
    )
    assert answers[0] == answers[1]
    assert answers[0][1] == "memory"


def test_request_refused_on_one_rank_ends_all_ranks(tmp_path: Path) -> None:
    """A budget that only one rank cannot have is refused there, and the others say which rank failed."""
    answers = run_ranks(
        """
        try:
            autoaccum.autotune(Fuse(9), torch.randn(4, 4), 16, device="virtual:1GiB", budget=("1GiB", "9GiB")[rank])
        except Exception as error:
            answer(type(error).__name__ + ": " + str(error))
        """,
        tmp_path,
    )
    assert answers[0].startswith("RankMismatchError: rank 1 failed (InvalidRequestError")
    assert answers[1].startswith("InvalidRequestError: budget='9GiB'")


def test_one_process_is_its_own_group() -> None:
    """Without a process group there is one rank, and its outcome stands."""
    report = Report(Fit(peak_bytes=1))
    assert (Ranks().world_size, Ranks().agree(report)) == (1, report)


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
