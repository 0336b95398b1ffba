"""What autotune and probe answer, from troubles that users of batch-size finders reported."""

from __future__ import annotations

import copy
import math
import random
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoaccum
from autoaccum.records import Fit, OutOfMemory, Refused


def out_of_memory() -> RuntimeError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")


class Fuse(nn.Module):
    """Runs out of memory above a number of rows, and writes down every size that was really run."""

    def __init__(self, limit: int, error: Callable[[], BaseException] = out_of_memory, width: int = 4) -> None:
        super().__init__()
        self.limit, self.error, self.sizes = limit, error, []
        self.linear = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        if len(x) > self.limit:
            raise self.error()
        return self.linear(x)


def rows(count: int = 8, width: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(count, width), torch.randint(3, (count,))


def tune(model: nn.Module, target: int, sample: Any = None, **more: Any) -> autoaccum.Plan:
    more.setdefault("loss_fn", F.cross_entropy)
    return autoaccum.autotune(
        model, rows() if sample is None else sample, target, device="virtual:4GiB", **more, levers="none"
    )


def look(model: nn.Module, sample: Any = None, **more: Any) -> autoaccum.ProbeResult:
    more.setdefault("loss_fn", F.cross_entropy)
    return autoaccum.probe(model, rows() if sample is None else sample, device="virtual:4GiB", **more)


# -- the answer was run


@pytest.mark.parametrize(
    "limit", [1, 7, 33, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3, 5, 11, 12, 31, 32, 100))]
)
def test_probe_finds_the_exact_limit(limit: int) -> None:
    """The largest size that runs is found, whatever it is, with the size above it tried and failed."""
    model = Fuse(limit)
    result = look(model, max_micro_batch=1000)
    assert (result.max_micro_batch, result.limited_by, result.evidence) == (limit, "memory", "exact")
    assert {limit, limit + 1} <= set(model.sizes)


@pytest.mark.parametrize("limit", [11, 513, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3, 5, 37, 64, 100))])
def test_probe_stays_within_its_number_of_trials(limit: int) -> None:
    """A search takes at most 2 * ceil(log2(limit)) + 2 trials, and 4 more where the limit is none that can be predicted."""
    result = look(Fuse(limit))
    assert len(result.trials) <= 2 * math.ceil(math.log2(limit)) + 2 + 4


def test_plan_uses_only_sizes_that_were_run() -> None:
    """With room for 11 rows and a target of 64, the plan sums to 64 with nothing above 11, and 11 was run."""
    model = Fuse(11)
    plan = tune(model, 64)
    assert plan.max_micro_batch == 11
    assert 11 in model.sizes
    assert sum(plan.micro_batch_sizes) == plan.effective_batch == 64
    assert max(plan.micro_batch_sizes) <= 11


def test_upper_end_of_the_range_is_tried() -> None:
    """A bound that fits exactly is the answer, not the size below it."""
    assert look(Fuse(12), max_micro_batch=12).max_micro_batch == 12


def test_nothing_above_the_bound_is_tried() -> None:
    """Without a memory limit the search ends at the caller's bound and never goes past it."""
    model = Fuse(10**9)
    result = look(model, max_micro_batch=16)
    assert (result.max_micro_batch, result.limited_by, result.evidence, max(model.sizes)) == (16, "caller", "measured", 16)


def test_log_lists_every_size_with_its_outcome() -> None:
    """Every size that the model saw is a trial, with what came of it."""
    model = Fuse(5)
    result = look(model, max_micro_batch=64)
    assert {trial.candidate.micro_batch for trial in result.trials} == set(model.sizes)
    assert all(isinstance(t.outcome, Fit) == (t.candidate.micro_batch <= 5) for t in result.trials)


def test_inexact_probe_is_within_five_percent() -> None:
    """exact=False ends earlier, with an answer that fits and is at most 5 % too small."""
    result = look(Fuse(1000), exact=False)
    assert 950 <= result.max_micro_batch <= 1000
    assert len(result.trials) < len(look(Fuse(1000)).trials)


# -- small models and small data


def test_target_that_fits_is_one_micro_batch() -> None:
    """Where everything fits the plan is the target in one piece, and no larger size is tried."""
    model = Fuse(10**9)
    plan = tune(model, 32)
    assert (plan.micro_batch_sizes, plan.limited_by, max(model.sizes)) == ((32,), "target", 32)


def test_data_set_bounds_the_micro_batch() -> None:
    """With 50 samples no micro-batch is above 50, and a larger target is said to see samples twice."""
    model = Fuse(10**9)
    data = torch.utils.data.TensorDataset(torch.randn(50, 4), torch.randint(3, (50,)))
    plan = tune(model, 200, data)
    assert max(model.sizes) == 50
    assert (sum(plan.micro_batch_sizes), plan.limited_by) == (200, "data")
    assert any("more than once" in warning for warning in plan.warnings)


def test_data_set_without_length_is_bounded_by_the_target() -> None:
    """An iterable data set of unknown length is searched up to the target only."""

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            return iter([(torch.randn(4), torch.tensor(1))] * 50)

    model = Fuse(10**9)
    assert tune(model, 32, Stream()).micro_batch_sizes == (32,)
    assert max(model.sizes) == 32


def test_pair_for_a_model_of_one_argument_is_input_and_target() -> None:
    """A data set of pairs works without a loss: the target is left out, and the plan says so."""
    data = torch.utils.data.TensorDataset(torch.randn(50, 4), torch.randn(50, 1))
    plan = tune(Fuse(10**9), 32, data, loss_fn=None)
    assert plan.micro_batch_sizes == (32,)
    assert any("mean of its outputs" in warning for warning in plan.warnings)


# -- effective batch


@pytest.mark.parametrize(
    ("limit", "target", "steps"),
    [
        *((10, 97, 10), (1, 7, 7)),
        *(
            pytest.param(*numbers, marks=pytest.mark.slow)
            for numbers in ((100, 128, 2), (40, 32, 1), (5, 32, 7), (6, 13, 3), (7, 8, 2))
        ),
    ],
)
def test_effective_batch_is_the_target_in_the_fewest_near_even_pieces(limit: int, target: int, steps: int) -> None:
    """The sizes sum to the target, differ by at most one, and are as few as the limit allows."""
    plan = tune(Fuse(limit), target)
    assert plan.effective_batch == sum(plan.micro_batch_sizes) == target
    assert plan.accumulation_steps == steps
    assert max(plan.micro_batch_sizes) - min(plan.micro_batch_sizes) <= 1
    assert max(plan.micro_batch_sizes) <= limit


@pytest.mark.parametrize(
    ("limit", "target", "size"),
    [
        (100, 128, 64),
        *(
            pytest.param(*numbers, marks=pytest.mark.slow)
            for numbers in ((5, 32, 4), (10, 97, 1), (40, 32, 32), (5, 256, 4))
        ),
    ],
)
def test_equal_micro_batches_are_the_largest_divisor(limit: int, target: int, size: int) -> None:
    """Where one number must serve, it divides the target and is the largest that fits."""
    plan = tune(Fuse(limit), target, equal_micro_batches=True)
    assert plan.micro_batch_sizes == (size,) * (target // size)


@pytest.mark.slow
def test_poor_divisor_is_said_with_near_targets() -> None:
    """A prime target is warned about, naming targets that divide well."""
    plan = tune(Fuse(10), 97, equal_micro_batches=True)
    assert any("96 = 8 x 12" in warning and "100 = 10 x 10" in warning for warning in plan.warnings)


def test_good_divisor_is_not_warned_about() -> None:
    """A target that divides well gets no such warning."""
    assert not any("divide" in warning for warning in tune(Fuse(5), 32, equal_micro_batches=True).warnings)


def test_multiple_of_holds_for_all_but_the_last() -> None:
    """Every micro-batch but the last is a multiple of what was asked for."""
    plan = tune(Fuse(45), 100, multiple_of=8)
    assert plan.micro_batch_sizes == (40, 32, 28)


# -- recognising out of memory


SPELLINGS: list[Callable[[], BaseException]] = [
    out_of_memory,
    lambda: RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    lambda: getattr(torch, "AcceleratorError", RuntimeError)(
        "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in the manual", 2
    ),
    lambda: RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    lambda: torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2.00 MiB."),
    lambda: RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: 12"),
    lambda: RuntimeError("cuda runtime error (2) : out of memory at THCStorage.cu:58"),
    lambda: MemoryError("Unable to allocate 3.00 GiB for an array"),
    lambda: RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"),
    lambda: RuntimeError("GET was unable to find an engine to execute this computation"),
]


def _make(spelling: Callable[[], BaseException]) -> BaseException:
    try:
        return spelling()
    except TypeError:  # it takes one argument in some versions
        return getattr(torch, "AcceleratorError", RuntimeError)(
            "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in the manual"
        )


@pytest.mark.parametrize(
    "spelling",
    [
        pytest.param(spelling, marks=pytest.mark.slow if index in (1, 2, 3, 4, 5, 6, 7) else ())
        for index, spelling in enumerate(SPELLINGS)
    ],
)
def test_every_spelling_of_out_of_memory_leads_to_a_smaller_size(spelling: Callable[[], BaseException]) -> None:
    """However a library says that memory ran out, the search goes on below."""
    assert tune(Fuse(6, lambda: _make(spelling)), 24).max_micro_batch == 6


def test_cause_behind_another_error_counts() -> None:
    """A training step that catches out of memory and raises its own error was out of memory all the same."""

    def step(model: nn.Module, batch: Any) -> Tensor:
        try:
            return model(batch[0]).mean()
        except torch.OutOfMemoryError as error:
            raise ValueError("training failed") from error

    assert tune(Fuse(6), 24, training_step=step).max_micro_batch == 6


def test_search_started_while_an_error_is_handled_still_sees_the_users_bug() -> None:
    """A search in the handler of an out-of-memory error does not take a later bug for one."""

    def step(model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0]).mean() + {}["missing"]

    try:
        raise out_of_memory()
    except torch.OutOfMemoryError:
        with pytest.raises(KeyError):
            tune(Fuse(6), 24, training_step=step)


def test_limit_that_is_not_memory_is_a_ceiling() -> None:
    """A launch limit ends the search upwards, is called other than memory, and its text is kept."""
    plan = tune(Fuse(6, lambda: RuntimeError("CUDA error: invalid configuration argument")), 24)
    assert (plan.max_micro_batch, plan.limited_by) == (6, "other")
    assert any("invalid configuration argument" in warning for warning in plan.warnings)
    assert any(isinstance(trial.outcome, Refused) for trial in plan.trials)


def test_killed_loader_worker_is_a_limit_of_the_host() -> None:
    """A loader worker that was killed is a ceiling that the host sets."""
    error = "DataLoader worker (pid 7) is killed by signal: Killed."
    assert tune(Fuse(6, lambda: RuntimeError(error)), 24).limited_by == "host"


def test_limit_that_is_not_memory_comes_out_unchanged_when_nothing_runs() -> None:
    """When no size runs, the error that is not memory is raised as it was, with its traceback."""
    error = RuntimeError("CUDA error: invalid configuration argument")
    with pytest.raises(RuntimeError) as caught:
        tune(Fuse(0, lambda: error), 24)
    assert caught.value is error
    assert any(entry.name == "forward" for entry in caught.traceback)


def test_unclear_error_at_every_size_comes_out_unchanged() -> None:
    """An error that is memory only sometimes is the user's own when no smaller size runs."""
    with pytest.raises(RuntimeError, match="CUDNN_STATUS_INTERNAL_ERROR"):
        tune(Fuse(0, lambda: RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR")), 24)


def test_lost_context_ends_the_search_at_once() -> None:
    """A device-side assert is raised at the first trial; nothing is tried after it."""
    model = Fuse(0, lambda: RuntimeError("CUDA error: device-side assert triggered"))
    with pytest.raises(RuntimeError, match="device-side assert"):
        tune(model, 24)
    assert len(model.sizes) == 1


# -- the user's own errors


def test_shape_error_comes_out_at_the_first_trial() -> None:
    """A bug in the model is raised with its type and text after one forward, with a note saying where."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(9, 2))
    calls = []
    model.register_forward_pre_hook(lambda module, args: calls.append(type(args[0])))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        tune(model, 24)
    assert calls == [torch.Tensor]  # traces run in a process of their own
    assert any("micro_batch=1" in note for note in caught.value.__notes__)


def test_error_in_the_loss_comes_out_as_itself() -> None:
    """A KeyError from the training step stays a KeyError."""
    with pytest.raises(KeyError, match="lables"):
        tune(Fuse(9), 8, {"x": torch.randn(8, 4)}, training_step=lambda model, batch: model(batch["lables"]).mean())


def test_interrupt_passes_through_at_once() -> None:
    """Ctrl-C during a trial ends the search there."""
    model = Fuse(4, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        tune(model, 64)
    assert model.sizes[-1] > 4


# -- what is no training step


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (lambda model, batch: model(batch[0]), "not a scalar"),
        (lambda model, batch: model(batch[0]).mean().detach(), "does not require grad"),
        (lambda model, batch: model(batch[0]).mean().item(), "returned float"),
        (lambda model, batch: None, "returned NoneType"),
        (lambda model, batch: torch.zeros((), requires_grad=True), "received a gradient"),
        (lambda model, batch: model(batch[0]).mean() * math.nan, "NaN on the sample"),
    ],
)
def test_step_that_trains_nothing_is_refused(step: Any, said: str) -> None:
    """A training step without a usable loss is an error that says what is wrong, never a size that fits."""
    with pytest.raises(autoaccum.InvalidRequestError, match=said):
        tune(Fuse(9), 8, training_step=step)


# -- BatchNorm


def norm_model(limit: int) -> nn.Module:
    return nn.Sequential(Fuse(limit), nn.BatchNorm1d(3), nn.Linear(3, 3))


@pytest.mark.parametrize(("target", "sizes"), [(12, (6, 6)), (13, (5, 4, 4))])
def test_batch_norm_refusing_one_row_is_not_a_ceiling(target: int, sizes: tuple[int, ...]) -> None:
    """The failure at one row leads upwards, and no micro-batch of the plan is that small."""
    plan = tune(norm_model(6), target)
    assert plan.micro_batch_sizes == sizes
    assert plan.limited_by == "memory"


class Standardised(nn.Module):
    """Divides by the spread over the rows, which is NaN for a single one."""

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(0)
        return centred / (centred.square().sum(0) / (len(x) - 1)).sqrt()


@pytest.mark.parametrize(("limit", "target", "sizes"), [(2, 6, (2, 2, 2)), (3, 7, (3, 2, 2))])
def test_nan_at_one_row_is_not_a_ceiling(limit: int, target: int, sizes: tuple[int, ...]) -> None:
    """A loss that is NaN for one row and not for more leads upwards, and no micro-batch of the plan is that small."""
    plan = tune(nn.Sequential(Fuse(limit), Standardised()), target)
    assert (plan.micro_batch_sizes, plan.min_micro_batch, plan.limited_by) == (sizes, 2, "memory")


def test_nan_at_the_only_size_is_said() -> None:
    """Where no more than one row can be tried, the NaN is the error."""
    with pytest.raises(autoaccum.InvalidRequestError, match="the loss is NaN with a micro-batch of one row"):
        tune(nn.Sequential(Fuse(6), Standardised()), 1)


@pytest.mark.slow
def test_batch_norm_is_named_as_not_exact_under_accumulation() -> None:
    """The plan names the layers that make accumulation differ from the big batch, where there is any."""
    assert any("'1'" in w or ": 1" in w for w in tune(norm_model(6), 12).warnings if "BatchNorm in train mode" in w)
    assert not any("BatchNorm in train mode" in w for w in tune(norm_model(60), 12).warnings)


@pytest.mark.parametrize("frozen", ["layer", "model"])
def test_frozen_batch_norm_gets_neither_limit_nor_warning(frozen: str) -> None:
    """A BatchNorm in eval mode takes single rows and is not warned about."""
    model = norm_model(6)
    (model if frozen == "model" else model[1]).eval()
    plan = tune(model, 13)
    assert plan.min_micro_batch == 1
    assert not any("BatchNorm in train mode" in warning for warning in plan.warnings)


def test_target_that_needs_a_single_row_is_refused_with_a_remedy() -> None:
    """Where only two rows fit and one row cannot run, an odd target is refused, naming one that works."""
    with pytest.raises(autoaccum.InvalidRequestError, match="use target_batch=2") as caught:
        tune(norm_model(2), 3)
    assert "at least 2" in str(caught.value)


def test_batch_norm_that_never_runs_comes_out_unchanged() -> None:
    """With a target of one row the model's own error is raised."""
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        tune(norm_model(6), 1)


# -- nothing is left


class Traced(nn.Module):
    """Remembers weakly what it made, and counts at every entry how much of it is still alive."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.linear, self.limit = nn.Linear(4, 4), limit
        self.made, self.alive = [], []

    def forward(self, x: Tensor) -> Tensor:
        self.alive.append((len(x), sum(ref() is not None for ref in self.made)))
        hidden = self.linear(x)
        self.made.append(weakref.ref(hidden))
        if len(x) > self.limit:
            raise out_of_memory()
        self.kept = hidden  # as attention maps are kept: it must not outlive the trial either
        return hidden.sum()


def test_nothing_of_a_failed_trial_is_alive_in_the_next() -> None:
    """At the first forward of every trial no activation of an earlier one exists."""
    model = Traced(11)
    autoaccum.probe(model, torch.randn(8, 4), device="virtual:4GiB", max_micro_batch=100)
    firsts = [alive for (size, alive), (before, _) in zip(model.alive[1:], model.alive, strict=False) if size != before]
    assert len(firsts) > 5
    assert set(firsts) == {0}
    assert not hasattr(model, "kept")


class Fragile(nn.Module):
    """Dropout, BatchNorm and a linear layer; fails at one forward of the whole search."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5))
        self.frozen = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
        self.head = nn.Linear(6, 2)
        self.calls, self.fail_at, self.error = 0, -1, out_of_memory

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        random.random()
        np.random.rand()
        if self.calls == self.fail_at:
            raise self.error()
        return self.head(self.frozen(self.body(x)))


def trained() -> tuple[Fragile, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Fragile()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(8, 6)).pow(2).mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    model.frozen.eval()
    model.head.weight.grad = torch.ones_like(model.head.weight)
    model.calls = 0
    return model, optimizer


def state(model: Fragile, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return copy.deepcopy(
        {
            "tensors": dict(model.state_dict()),
            "grads": {name: p.grad for name, p in model.named_parameters()},
            "requires_grad": [p.requires_grad for p in model.parameters()],
            "modes": [m.training for m in model.modules()],
            "hooks": [len(m._forward_hooks) for m in model.modules()],
            "optimizer": optimizer.state_dict(),
            "torch": torch.get_rng_state(),
            "numpy": np.random.get_state(),
            "python": random.getstate(),
            "grad_mode": torch.is_grad_enabled(),
            "default_dtype": torch.get_default_dtype(),
        }
    )


def assert_same(before: Any, after: Any, path: str = "") -> None:
    if isinstance(before, dict):
        assert before.keys() == after.keys(), path
        for key in before:
            assert_same(before[key], after[key], f"{path}.{key}")
    elif isinstance(before, (list, tuple)):
        assert len(before) == len(after), path
        for index, (one, other) in enumerate(zip(before, after, strict=True)):
            assert_same(one, other, f"{path}.{index}")
    elif isinstance(before, Tensor):
        assert torch.equal(before, after), path
    elif isinstance(before, np.ndarray):
        assert np.array_equal(before, after), path
    else:
        assert before == after, path


def search(model: Fragile, optimizer: torch.optim.Optimizer, device: str) -> autoaccum.Plan:
    return autoaccum.autotune(
        model,
        torch.randn(4, 6),
        12,
        training_step=lambda m, batch: m(batch).pow(2).mean(),
        optimizer=optimizer,
        device=device,
        max_micro_batch=4,
        levers="none",
    )


@pytest.mark.parametrize("device", ["virtual:1GiB", "cpu"])
def test_search_leaves_the_state_as_it_was(device: str) -> None:
    """After a search everything of model, optimizer and generators is as before, bit for bit."""
    model, optimizer = trained()
    sample_state = torch.get_rng_state()
    torch.randn(4, 6)
    before = state(model, optimizer)
    torch.set_rng_state(sample_state)
    search(model, optimizer, device)
    assert_same(before, state(model, optimizer))


def test_training_after_a_search_is_training_without_one() -> None:
    """Five optimizer steps after a search end at the same weights as without it."""

    def five_steps(model: Fragile, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        torch.manual_seed(5)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(8, 6)).pow(2).mean().backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    model, optimizer = trained()
    search(model, optimizer, "virtual:1GiB")
    with_search = five_steps(model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(with_search, five_steps(*trained()), strict=True))


ERRORS: dict[str, Callable[[], BaseException]] = {
    "oom": out_of_memory,
    "user": lambda: KeyError("mine"),
    "ctrl-c": KeyboardInterrupt,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "errors",
    [list(ERRORS.values()), *(pytest.param([error], marks=pytest.mark.slow) for error in ERRORS.values())],
    ids=["in-turn", *ERRORS],
)
@pytest.mark.usefixtures("one_trace")
def test_failure_at_any_forward_leaves_the_state_as_it_was(
    errors: Sequence[Callable[[], BaseException]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever forward of the search fails, and however, everything is put back."""
    monkeypatch.setattr("autoaccum.session.pace._MOST_STEPS", 2)  # of the plan's step, which is timed; they are all alike
    model, optimizer = trained()
    forwards = []
    handle = model.register_forward_pre_hook(lambda module, batch: forwards.append(batch))
    search(model, optimizer, "virtual:1GiB")
    handle.remove()
    assert len(forwards) > 8
    for fail_at in range(1, len(forwards) + 1):
        model, optimizer = trained()
        model.fail_at, model.error = fail_at, errors[fail_at % len(errors)]
        sample_state = torch.get_rng_state()
        torch.randn(4, 6)
        before = state(model, optimizer)
        torch.set_rng_state(sample_state)
        try:
            search(model, optimizer, "virtual:1GiB")
        except (autoaccum.NothingFitsError, KeyError, KeyboardInterrupt):
            pass
        assert_same(before, state(model, optimizer))


@pytest.mark.parametrize("kind", ["map", "stream", "function"])
def test_random_data_leaves_the_generators_as_they_were(kind: str) -> None:
    """Data that is drawn when it is looked at does not move the generators of python, numpy or torch."""

    def draw() -> Tensor:
        random.random()
        np.random.rand()
        return torch.randn(4)

    class Items(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> Tensor:
            return draw()

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            return iter([draw() for _ in range(20)])

    sample = {"map": Items(), "stream": Stream(), "function": lambda count: torch.stack([draw() for _ in range(count)])}[
        kind
    ]
    model = nn.Linear(4, 2)
    before = [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]
    autoaccum.autotune(model, sample, 8, device="virtual:1GiB", levers="none")
    assert before == [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]


# -- variable length


def test_probe_sees_the_longest_samples_of_a_loader() -> None:
    """One long sequence at the end of the data decides: 8 rows of it fit, although 128 short ones would."""
    lengths = [8 + index % 25 for index in range(200)] + [512]
    data = [torch.randint(1, 50, (length,)) for length in lengths]

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.out = nn.Embedding(50, 4, padding_idx=0), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            if x.numel() > 4096:
                raise out_of_memory()
            return self.out(self.embedding(x).mean(1))

    class Sequences(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return len(data)

        def __getitem__(self, index: int) -> Tensor:
            return data[index]

    loader = torch.utils.data.DataLoader(
        Sequences(), batch_size=16, collate_fn=lambda items: nn.utils.rnn.pad_sequence(items, batch_first=True)
    )
    plan = tune(Padded(), 64, loader, loss_fn=None)
    assert plan.max_micro_batch == 8
    assert plan.environment is not None
    assert "512" in plan.environment.batch


# -- memory


def test_optimizer_state_is_in_the_measurement() -> None:
    """AdamW allows fewer rows than SGD on the same device, since its state lies beside the activations."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64))

    def limit(optimizer: Any) -> int:
        sample = torch.randn(4, 64)
        return autoaccum.probe(model(), sample, device="virtual:6MiB", optimizer=optimizer).max_micro_batch

    assert limit(torch.optim.AdamW) < limit(lambda parameters: torch.optim.SGD(parameters, lr=0.1))


def test_account_counts_a_tied_weight_once() -> None:
    """A tied weight is counted once, a frozen one without gradient and state, and AdamW holds two per weight."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.out = nn.Embedding(500, 16), nn.Linear(16, 500, bias=False)
            self.out.weight = self.inside.weight
            self.frozen = nn.Linear(16, 16, bias=False).requires_grad_(False)

        def forward(self, ids: Tensor) -> Tensor:
            return self.out(self.frozen(self.inside(ids))).mean()

    account = autoaccum.probe(Tied(), torch.randint(500, (4, 3)), device="virtual:1GiB", max_micro_batch=4).memory
    assert account is not None
    assert (account.trainable_parameters, account.frozen_parameters) == (8000, 256)
    assert (account.trainable_bytes, account.gradient_bytes, account.frozen_bytes) == (32000, 32000, 1024)
    assert account.optimizer_state_bytes is not None
    assert 64000 <= account.optimizer_state_bytes <= 64064


def test_nothing_fits_says_what_was_tried() -> None:
    """A model that does not fit at one row is an error with the trials, the budget and what was held."""
    with pytest.raises(autoaccum.NothingFitsError, match=r"micro_batch=1 does not fit into 1.00 MiB") as caught:
        autoaccum.probe(nn.Linear(256, 256), torch.randn(2, 256), device="virtual:1MiB")
    assert isinstance(caught.value.trials[0].outcome, OutOfMemory)


def test_time_budget_ends_the_search_with_what_fits() -> None:
    """When the time is up the largest size so far is the answer, and the plan says that it may be larger."""
    plan = tune(Fuse(10**9), 1000, time_budget_s=1e-6)
    assert plan.evidence == "measured"
    assert plan.effective_batch == 1000
    assert any("time_budget_s" in warning for warning in plan.warnings)


# -- requests that cannot be satisfied


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"target_batch": 0}, "target_batch"),
        ({"target_batch": -4}, "target_batch"),
        ({"target_batch": 2.5}, "target_batch"),
        ({"target_batch": "many"}, "target_batch"),
        ({"budget": "lots"}, "cannot be read"),
        ({"budget": 0}, "not above zero"),
        ({"budget": "9GiB"}, "larger than virtual"),
        ({"budget": 1}, "already holds"),
        ({"max_micro_batch": 0}, "max_micro_batch"),
        ({"multiple_of": 0}, "multiple_of"),
        ({"multiple_of": 8, "max_micro_batch": 4}, "multiple_of"),
        ({"levers": "every"}, "levers"),
        ({"levers": {"precision": ["fp8"]}}, "its levels are"),
        ({"levers": {"checkpointing": ["full"], "blocks": ["nowhere"]}}, "no block 'nowhere'"),
        ({"objective": "latency"}, "objective"),
        ({"storage": "nowhere://"}, "storage"),
        ({"time_budget_s": -1}, "time_budget_s"),
        ({"weight": "rows"}, "weight"),
        ({"loss_fn": 3}, "loss_fn"),
        ({"optimizer": 3}, "optimizer"),
        ({"optimizer": lambda parameters: None}, "factory"),
        ({"optimizer": torch.optim.LBFGS}, "closure"),
        ({"device": "gpu"}, "not a device"),
        ({"device": "cuda:99"}, "model is on|not available"),
        ({"sample": torch.randn(0, 4)}, "empty"),
        ({"sample": (torch.randn(3, 4), torch.randn(5, 4))}, "batch_dim"),
        ({"sample": lambda count: torch.randn(count + 1, 4)}, "asked for"),
    ],
)
def test_impossible_request_is_refused_before_anything_runs(change: dict[str, Any], said: str) -> None:
    """Each argument that cannot be satisfied is named in the error, and the model was never run."""
    model = Fuse(9)
    arguments = {"sample": torch.randn(8, 4), "target_batch": 8, "device": "virtual:1GiB", **change}
    with pytest.raises(autoaccum.InvalidRequestError, match=said):
        autoaccum.autotune(model, arguments.pop("sample"), arguments.pop("target_batch"), **{"levers": "none", **arguments})
    assert model.sizes == []


def test_optimizer_over_another_model_is_refused() -> None:
    """An optimizer that holds other parameters is named as such."""
    with pytest.raises(autoaccum.InvalidRequestError, match="not the model's"):
        tune(Fuse(9), 8, optimizer=torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))


def test_model_without_trainable_parameters_is_refused() -> None:
    """A wholly frozen model cannot be trained."""
    with pytest.raises(autoaccum.InvalidRequestError, match="no trainable parameter"):
        tune(Fuse(9).requires_grad_(False), 8)


def test_sample_on_another_device_is_refused() -> None:
    """A sample that is neither on the model's device nor on the host is refused."""
    with pytest.raises(autoaccum.InvalidRequestError, match="sample on meta"):
        tune(Fuse(9), 8, torch.randn(8, 4, device="meta"))


def test_time_axis_is_not_guessed_for_time_first_layers() -> None:
    """A model with layers that take time first gets no guess where both dimensions could be rows."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LSTM(5, 7)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)[0].mean()

    x = torch.randn(20, 12, 5)
    with pytest.raises(autoaccum.InvalidRequestError, match="batch_dim=0 or batch_dim=1"):
        tune(Recurrent(), 12, x, loss_fn=None)
    assert tune(Recurrent(), 12, x, loss_fn=None, batch_dim=1).micro_batch_sizes == (12,)


def test_caller_under_no_grad_and_autocast_is_left_so() -> None:
    """A search under no_grad trains all the same, and the caller's mode is as it was."""
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert tune(Fuse(9), 8).micro_batch_sizes == (8,)
        assert not torch.is_grad_enabled()
        assert torch.is_autocast_enabled("cpu")


def test_optimizer_step_hooks_are_left_out() -> None:
    """Averages and loggers that hang on the optimizer's steps see nothing of a search."""
    model, seen = Fuse(9), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *args: seen.append(args))
    tune(model, 8, optimizer=optimizer)
    assert seen == []
    optimizer.step()
    assert len(seen) == 1


# -- found by people who tried to break it


@pytest.mark.slow
def test_list_sample_is_probed_with_its_largest_items() -> None:
    """Items of a list differ in size: the largest are used, wherever they stand."""

    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv2d(3, 8, 3)

        def forward(self, images: list[Tensor]) -> Tensor:
            return torch.stack([self.convolution(image[None]).relu().mean() for image in images]).mean()

    small, large = [torch.rand(3, 16, 16)] * 12, [torch.rand(3, 100, 100)] * 4

    def limit(images: list[Tensor]) -> int:
        sample = (images, torch.arange(16))
        step = lambda model, batch: model(batch[0])  # noqa: E731
        return autoaccum.probe(Images(), sample, 16, training_step=step, device="virtual:1500KiB").max_micro_batch

    assert limit([*small, *large]) == limit([*large, *small]) < 16


def test_compiled_model_still_compiles_after_a_virtual_search() -> None:
    """A search on a virtual device leaves torch.compile as it was for the user's model."""
    graphs: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(1)
        return graph.forward

    model = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)), backend=backend)
    autoaccum.autotune(model, torch.randn(4, 8), 8, device="virtual:1GiB", levers="none")
    graphs.clear()
    model(torch.randn(4, 8))
    assert graphs == [1]


def test_split_of_a_mapping_counts_rows_not_keys() -> None:
    """With a split function for a batch that can be looked into, its rows are those of its tensors."""

    def split(batch: dict[str, Tensor], sizes: Any) -> list[dict[str, Tensor]]:
        return [
            dict(zip(batch, parts, strict=True))
            for parts in zip(*(v.split(list(sizes)) for v in batch.values()), strict=True)
        ]

    sample = {"x": torch.randn(64, 4), "y": torch.randint(3, (64,))}
    step = lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"])  # noqa: E731
    assert tune(Fuse(40), 64, sample, split=split, training_step=step).micro_batch_sizes == (32, 32)


def test_memory_that_grows_over_the_window_is_named() -> None:
    """A model that keeps tensors of every micro-batch ends after few plans, with a message that says so."""
    kept: list[Tensor] = []

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(256, 256)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.linear(x)
            kept.append(hidden.detach().clone())
            return hidden.sum()

    with pytest.raises(autoaccum.NothingFitsError, match="memory grows from one micro-batch to the next") as caught:
        autoaccum.autotune(Keeps(), torch.randn(4, 256), 4096, device="virtual:3MiB", levers="none")
    assert len(caught.value.trials) < 40


def test_rest_that_is_too_small_names_the_right_floor() -> None:
    """Where only the last micro-batch is too small, the floor is one row more than that, and the remedy works."""
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    arguments: dict[str, Any] = {"max_micro_batch": 6, "multiple_of": 4, "device": "virtual:1GiB"}
    with pytest.raises(autoaccum.InvalidRequestError, match=r"needs at least 2; use target_batch=12") as caught:
        autoaccum.autotune(model, torch.randn(4, 5), 13, **arguments, levers="none")
    assert "leaves a micro-batch of 1 rows" in str(caught.value)
    assert autoaccum.autotune(model, torch.randn(4, 5), 12, **arguments, levers="none").micro_batch_sizes == (4, 4, 4)


def test_list_of_inputs_is_one_argument() -> None:
    """With a loss function, a list of one input per row goes to the model as it is."""

    class Ragged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, inputs: list[Tensor]) -> Tensor:
            return torch.stack([self.linear(x) for x in inputs])

    sample = ([torch.randn(3) for _ in range(8)], torch.randint(2, (8,)))
    plan = autoaccum.autotune(Ragged(), sample, 8, loss_fn=F.cross_entropy, device="virtual:1GiB", levers="none")
    assert plan.micro_batch_sizes == (8,)


def test_stream_that_ends_is_known_to_be_short() -> None:
    """A stream of 50 items and a target of 200 give a plan that says so."""

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            return iter([(torch.randn(4), torch.tensor(1))] * 50)

    plan = tune(Fuse(10**9), 200, Stream())
    assert plan.limited_by == "data"
    assert any("more than once" in warning for warning in plan.warnings)


def test_bound_that_fits_is_tried() -> None:
    """With room for 12 rows and a bound of 12, a target of 64 reports 12, although the plan's own size is 11."""
    plan = tune(Fuse(12), 64, max_micro_batch=12)
    assert (plan.max_micro_batch, plan.limited_by, plan.micro_batch) == (12, "caller", 11)


def test_search_without_a_bound_says_where_it_stopped() -> None:
    """Where nothing bounds the search, its own end is named."""
    result = autoaccum.probe(nn.Linear(1, 1), torch.randn(2, 1), device="virtual:4GiB")
    assert result.max_micro_batch == 1_048_576
    assert any("Nothing bounds this search" in warning for warning in result.warnings)


def test_autotune_without_a_target_points_to_probe() -> None:
    """target_batch=None is refused with the name of the other function."""
    with pytest.raises(autoaccum.InvalidRequestError, match=r"probe\(\)"):
        autoaccum.autotune(nn.Linear(1, 1), torch.randn(2, 1), None, levers="none")  # type: ignore[arg-type]


def test_device_smaller_than_the_model_is_refused() -> None:
    """A virtual device that the weights alone do not fit on is refused before anything runs, with both numbers."""
    with pytest.raises(autoaccum.InvalidRequestError, match=r"has 1\.00 KiB, less than this process already holds"):
        autoaccum.probe(nn.Linear(64, 64), torch.randn(4, 64), device="virtual:1KiB")


class ActNorm(nn.Module):
    """Sets its scale by the first batch that it sees, and notes that it has."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.is_initialized = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_initialized:
            with torch.no_grad():
                self.scale.copy_(1 / (x.std(0, correction=0) + 0.1))
            self.is_initialized = True
        return x * self.scale


def test_weights_set_by_the_first_batch_are_set_by_the_users() -> None:
    """A model that initialises itself at its first call does so in training, as without the search before it."""
    model = nn.Sequential(ActNorm(4), nn.Linear(4, 3))
    found = tune(model, 12)
    assert not model[0].is_initialized and torch.equal(model[0].scale, torch.ones(4))
    model(rows()[0])
    assert found.effective_batch == 12 and not torch.equal(model[0].scale, torch.ones(4))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("compiled", [torch.jit.script, lambda m: torch.jit.trace(m, rows()[0])], ids=["script", "trace"])
def test_torchscript_model(compiled: Callable[[nn.Module], nn.Module]) -> None:
    """A model of TorchScript's is tuned as any other, without a prediction, and its weights are as before."""
    model = compiled(nn.Linear(4, 3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert tune(model, 12).effective_batch == 12
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(("target", "told"), [(6, True), (2, False)])
def test_loss_of_ones_own_is_said_to_be_taken_at_its_word(target: int, told: bool) -> None:
    """Where it is accumulated, a plan says that the loss may not be a mean over samples; one micro-batch is the whole."""
    plan = tune(Fuse(2), target, loss_fn=lambda output, labels: F.cross_entropy(output, labels, weight=torch.ones(3)))
    assert any("taken to be a mean over samples" in warning for warning in plan.warnings) == told
