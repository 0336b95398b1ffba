"""A small training step whose every part can be made to fail."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from faulting.injection import Injector, out_of_memory

FITTING_ROWS = 5


class Passing(torch.autograd.Function):
    """Says that the backward pass comes by."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, injector: Injector) -> Tensor:
        ctx.injector = injector
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.injector.passing("backward")
        return gradient, None


class Block(nn.Module):
    """A block that draws random numbers; recomputed in the backward pass where it is checkpointed."""

    def __init__(self, injector: Injector) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(6, 6), nn.Dropout(0.3)
        self.injector = [injector]  # no setting of the model's, by which remembered plans are told apart

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        self.injector[0].passing("forward", len(x))
        drawn: Tensor = Passing.apply(self.dropout(self.linear(x)).relu(), self.injector[0])
        return drawn


class FailingSGD(torch.optim.SGD):
    """Momentum, with a step that can be made to fail halfway."""

    injector = Injector()  # of the bench made last; on the class, because searches make optimizers of this class anew

    def step(self, closure: Any = None) -> Any:
        """One step."""
        self.injector.passing("optimizer step")
        return super().step(closure)


class Bench:
    """A small model on its way through training, whose every part can be made to fail."""

    def __init__(self, injector: Injector) -> None:
        self.injector = FailingSGD.injector = injector
        torch.manual_seed(0)
        self.model = nn.Sequential(Block(injector), nn.BatchNorm1d(6), nn.Linear(6, 2))
        self.optimizer = self.make_optimizer(self.model.parameters())
        for _ in range(2):
            self.optimizer.zero_grad()
            self.step(self.model, torch.randn(FITTING_ROWS, 6)).backward()
            self.optimizer.step()
        self.optimizer.zero_grad()

    def with_oddities(self) -> Bench:
        """What a search has to leave alone: a frozen part, a gradient, a hook, a layer in eval mode."""
        self.model[0].linear.bias.requires_grad_(False)
        self.model[2].weight.grad = torch.ones_like(self.model[2].weight)
        self.model[2].register_forward_hook(lambda *_: None)
        self.model[0].dropout.eval()
        return self

    def make_optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        """A new optimizer."""
        self.injector.passing("optimizer made")
        return FailingSGD(parameters, lr=0.1, momentum=0.9)

    def sample(self, rows: int) -> Tensor:
        """So many rows."""
        self.injector.passing("data")
        return torch.ones(rows, 6)

    def step(self, model: nn.Module, batch: Tensor) -> Tensor:
        """The loss of a batch; above a number of rows memory runs out."""
        if len(batch) > FITTING_ROWS:
            raise out_of_memory()
        out = model(batch)
        self.injector.passing("loss")
        return out.pow(2).mean()
