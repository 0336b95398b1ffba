"""A trace on fake tensors leaves nothing behind and takes no memory."""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from autoaccum.prediction import recording
from autoaccum.prediction.fake_tensors import fake_trace, self_test
from autoaccum.workload import Workload

from .cases import Attention, Case, Doing, Language, classified, ids, live_bytes, measured, mlp, pairs
from .trained import Trained, generators, same, state_of


@pytest.mark.parametrize("fails", [False, True], ids=["ran", "raised"])
def test_model_and_optimizer_are_as_they_were(trained: Trained, fails: bool) -> None:
    """Parameters, buffers, gradients, state and hooks are the same objects with the same bits, even after an error."""
    trained.model.fails = fails
    before = state_of(trained.model, trained.optimizer)
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        fake_trace(trained.workload, 3, host_batch=False)
    after = state_of(trained.model, trained.optimizer)
    assert [name for name in before if not same(before[name], after[name])] == []
    assert trained.seen == []


@pytest.mark.parametrize("fails", [False, True], ids=["ran", "raised"])
def test_generators_are_as_they_were(trained: Trained, fails: bool) -> None:
    """The generators of torch, numpy and Python give the numbers that they would have given, even after an error."""
    trained.model.fails = fails
    before = generators()
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        fake_trace(trained.workload, 3, host_batch=False)
    assert generators() == before


@pytest.mark.parametrize("fails", [False, True], ids=["ran", "raised"])
def test_torch_is_as_it_was(trained: Trained, fails: bool) -> None:
    """No patch, dispatch mode, log level or garbage collector setting is left, even after an error."""

    def settings() -> list[Any]:
        logger = logging.getLogger("torch._subclasses.fake_tensor")
        return [
            nn.Parameter.__deepcopy__, Tensor.__deepcopy__, torch.autocast.__init__, logger.level, gc.isenabled(),
            gc.get_freeze_count(), _get_current_dispatch_mode(), torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
        ]  # fmt: skip

    trained.model.fails = fails
    before = settings()
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        fake_trace(trained.workload, 3, host_batch=False)
    assert settings() == before
    assert type(torch.ones(2) + 1) is Tensor
    assert torch.equal(copy.deepcopy(trained.model.layers[0].weight), trained.model.layers[0].weight)


def test_trained_model_trains_on(trained: Trained) -> None:
    """After a trace a real step runs as it would have without one, bit for bit."""
    other = copy.deepcopy((trained.model, trained.optimizer))
    fake_trace(trained.workload, 3, host_batch=False)
    found = []
    for model, optimizer in ((trained.model, trained.optimizer), other):
        torch.manual_seed(7)
        optimizer.zero_grad()
        model(torch.ones(4, 16)).square().sum().backward()
        optimizer.step()
        found.append(torch.cat([parameter.flatten() for parameter in model.parameters()]))
    assert torch.equal(*found)


def test_step_that_reaches_for_the_real_model(trained: Trained) -> None:
    """A training step that runs the real model instead of the one that it is given changes nothing of it either."""
    model = trained.model
    workload = Workload(model, torch.randn(4, 16), training_step=lambda _, batch: model(batch).mean())
    before = state_of(model, trained.optimizer)
    with suppress(Exception):
        fake_trace(workload, 3, host_batch=False)
    after = state_of(model, trained.optimizer)
    kept = ("values", "types", "gradients", "optimizer", "modes")
    assert [name for name in kept if not same(before[name], after[name])] == []


def test_sample_is_as_it_was() -> None:
    """A training step that writes into its batch writes into a fake one."""
    sample = torch.ones(4, 16)
    workload = Workload(mlp(), sample, training_step=lambda model, batch: model(batch.mul_(2)).mean())
    fake_trace(workload, 3, host_batch=False)
    assert torch.equal(sample, torch.ones(4, 16))


def test_model_without_gradients_gets_none() -> None:
    """A model that had no gradients has none afterwards."""
    case = Case(mlp(), pairs(), classified())
    fake_trace(case.workload(), 3, host_batch=False)
    assert [parameter.grad for parameter in case.model.parameters()] == [None] * 6


def test_nothing_of_a_trace_stays_alive() -> None:
    """After a second trace as many tensors are alive as after the first."""
    workload = Case(Language(Attention(dropout=0.1)), ids()).workload()
    fake_trace(workload, 2, host_batch=False)

    def alive() -> int:
        gc.collect()
        return sum(issubclass(type(each), Tensor) for each in gc.get_objects())

    before = alive()
    fake_trace(workload, 2, host_batch=False)
    assert alive() == before


def test_hooks_of_modules_run_in_a_trace() -> None:
    """Forward hooks of the user run on the copy, because they may keep tensors alive."""
    model, seen = mlp(), []
    model[0].register_forward_hook(lambda module, inputs, output: seen.append(type(output).__name__))
    fake_trace(Case(model, pairs(), classified()).workload(), 2, host_batch=False)
    assert seen == ["FakeTensor"] * 4


@pytest.mark.parametrize("training", [True, False])
def test_model_in_eval_mode_is_traced_in_train_mode(training: bool) -> None:
    """As a probe does it, dropout runs in a model that is wholly in eval mode, which stays so."""
    model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.5), nn.Linear(64, 8)).train(training)
    case = Case(model, pairs(), classified())
    trace = fake_trace(case.workload(), 5, host_batch=False)
    assert max(live_bytes(trace)) == measured(case, 5)
    assert [module.training for module in model.modules()] == [training] * 4


# -- no memory is taken


@pytest.mark.slow
def test_trace_of_a_billion_parameters_takes_no_memory(run_child: Any) -> None:
    """A model of a billion parameters on the meta device is traced within 300 MiB of resident memory."""
    grown, weights = run_child(
        """
        import psutil, torch
        from torch import nn
        from autoaccum.prediction.fake_tensors import fake_trace
        from autoaccum.workload import Workload

        def build(width, depth):
            with torch.device("meta"):
                return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(depth)])

        fake_trace(Workload(build(8, 4), torch.randn(2, 8)), 2, host_batch=False)  # imports what tracing needs
        before = psutil.Process().memory_info().rss
        trace = fake_trace(Workload(build(16384, 4), torch.randn(2, 16384)), 64, host_batch=False)
        held = sum(size for size, kind in zip(trace.sizes, trace.kinds) if kind == "weights")
        answer([psutil.Process().memory_info().rss - before, held])
        """,
        OMP_NUM_THREADS="1",
    )
    assert weights == 4 * 16384**2 * 4 >= 4 * 10**9
    assert grown < 300 * 2**20


@pytest.mark.slow
def test_trace_of_a_model_with_values_makes_no_copy(run_child: Any) -> None:
    """A model of 400 MiB in host memory is traced, for a large batch, within 100 MiB more."""
    grown = run_child(
        """
        import psutil, torch
        from torch import nn
        from autoaccum.prediction.fake_tensors import fake_trace
        from autoaccum.workload import Workload

        def build(width):
            return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 8))

        fake_trace(Workload(build(8), torch.randn(2, 8)), 2, host_batch=False)  # imports what tracing needs
        workload = Workload(build(10240), torch.randn(2, 10240))
        before = psutil.Process().memory_info().rss
        fake_trace(workload, 4096, host_batch=False)
        answer(psutil.Process().memory_info().rss - before)
        """,
        OMP_NUM_THREADS="1",
    )
    assert grown < 100 * 2**20


COPIES: dict[str, Callable[[Tensor], Any]] = {
    "values": lambda y: copy.deepcopy(y.detach()) + y,
    "parameter": lambda y: y * copy.deepcopy(nn.Parameter(y.detach())),
    "module": lambda y: copy.deepcopy(nn.Linear(8, 8))(y),
}


@pytest.mark.parametrize("what", COPIES)
def test_copies_made_inside_are_traced(what: str) -> None:
    """A step that copies tensors by copy.deepcopy, which torch cannot do to fake ones, is traced as it runs."""
    case = Case(Doing(COPIES[what]), torch.randn(4, 16))
    assert max(live_bytes(fake_trace(case.workload(), 5, host_batch=False))) == measured(case, 5)


def test_self_test_is_content() -> None:
    """Fake tensors of this torch do what is expected of them."""
    assert self_test() is None


def test_self_test_notices_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch in which fake tensors cannot be made any more is named as such."""

    def changed(*args: object, **more: object) -> None:
        raise TypeError("unexpected keyword argument")

    monkeypatch.setattr("torch._subclasses.fake_tensor.FakeTensorMode", changed)
    assert self_test() == "TypeError: unexpected keyword argument"


def test_self_test_notices_another_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch in which something is no longer seen is named with what is missing."""
    monkeypatch.setattr(recording, "_state_of", lambda optimizer: [])
    assert self_test() == "optimizer state 0, not 8192"
