"""Objects that Accelerate has prepared: used as they are, and refused where Accelerate would change what a step does."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from torch.optim import SGD

from autoaccum import Accumulator
from autoaccum.errors import InvalidRequestError


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    """One that would divide every loss by four."""
    yield Accelerator(cpu=True, gradient_accumulation_steps=4)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).pow(2).mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("micro_batch", "sizes"), [(2, (2, 2, 2, 2)), (3, (3, 3, 2))])
def test_prepared_objects_take_the_whole_batchs_step(
    accelerator: Accelerator, micro_batch: int, sizes: tuple[int, ...]
) -> None:
    """Each loss is scaled once, by its share: through `accelerator.backward` it would be a quarter of that."""
    torch.manual_seed(0)
    plain, batch = nn.Linear(3, 1).double(), torch.randn(8, 3).double()
    whole = copy.deepcopy(plain)
    optimizer = SGD(whole.parameters(), lr=1.0)
    square(whole, batch).backward()
    optimizer.step()
    model, prepared = accelerator.prepare(plain, SGD(plain.parameters(), lr=1.0))
    step = Accumulator(model, prepared, micro_batch=micro_batch, training_step=square).step(batch)
    assert step.micro_batch_sizes == sizes
    assert torch.allclose(plain.weight, whole.weight, rtol=1e-12)


def test_accelerator_is_left_as_it_was(accelerator: Accelerator) -> None:
    """Nothing is prepared again, and its own accumulation is where it was."""
    plain = nn.Linear(3, 1)
    model, prepared = accelerator.prepare(plain, SGD(plain.parameters(), lr=1.0))
    before = (list(accelerator._models), list(accelerator._optimizers), accelerator.step, accelerator.sync_gradients)
    Accumulator(model, prepared, micro_batch=2, training_step=square).step(torch.randn(8, 3))
    assert before == (list(accelerator._models), list(accelerator._optimizers), accelerator.step, accelerator.sync_gradients)


def test_window_inside_its_accumulation_is_refused(accelerator: Accelerator) -> None:
    """Inside `accumulate` its optimizers do not step, which would go unnoticed."""
    plain = nn.Linear(3, 1)
    model, prepared = accelerator.prepare(plain, SGD(plain.parameters(), lr=1.0))
    acc = Accumulator(model, prepared, micro_batch=2, training_step=square)
    with accelerator.accumulate(model), pytest.raises(InvalidRequestError, match="Take the window outside"):
        acc.step(torch.randn(8, 3))
