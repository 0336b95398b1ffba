"""Cutting by cost: no micro-batch above the limit, and the gradient of the whole batch all the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD

import autoaccum
from autoaccum import Accumulator
from autoaccum.errors import InvalidRequestError

IGNORED = -100
Sentences = dict[str, Tensor]


def sentences(lengths: Sequence[int]) -> Sentences:
    """Rows padded with zeros to the longest, each with a label for every number."""
    generator = torch.Generator().manual_seed(sum(lengths))
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.randint(1, 30, (length,), generator=generator)
    return {"ids": ids, "labels": torch.where(ids == 0, IGNORED, ids)}


def longest(batch: Sentences) -> int:
    return int((batch["ids"] != 0).sum(1).max())


def padded_cost(batch: Sentences) -> int:
    """Rows times the longest of them."""
    return len(batch["ids"]) * longest(batch)


class Model(nn.Module):
    """Trims its batch to the longest row; keeps what every micro-batch cost, and may have room for less."""

    def __init__(self, room: float = math.inf) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(30, 5), nn.Linear(5, 30)
        self.room, self.costs, self.failures = room, list[int](), 0

    def forward(self, batch: Sentences) -> Tensor:
        self.costs.append(padded_cost(batch))
        if self.costs[-1] > self.room:
            self.failures += 1
            raise torch.OutOfMemoryError("full")
        ids = batch["ids"][:, : longest(batch)]
        return self.head(self.embedding(ids))  # type: ignore[no-any-return]


def mean_over_tokens(model: nn.Module, batch: Sentences) -> Tensor:
    labels = batch["labels"][:, : longest(batch)]
    return functional.cross_entropy(model(batch).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def accumulator(model: Model, max_cost: float, **options: Any) -> Accumulator:
    return Accumulator(
        model,
        SGD(model.parameters(), lr=1.0),
        cost=padded_cost,
        max_cost=max_cost,
        training_step=mean_over_tokens,
        weight=autoaccum.tokens("labels"),
        **options,
    )


def whole_step(batch: Sentences) -> Tensor:
    """The parameters after one step on the whole batch."""
    model = Model().double()
    mean_over_tokens(model, batch).backward()
    SGD(model.parameters(), lr=1.0).step()
    return values_of(model)


def values_of(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])


@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=12))
@settings(max_examples=25)
def test_no_micro_batch_costs_more_than_the_limit(lengths: list[int]) -> None:
    """Whatever the lengths, every micro-batch stays within the limit, every row is used once, and the step is exact."""
    batch, model = sentences(lengths), Model().double()
    step = accumulator(model, 16).step(batch)
    expected = whole_step(batch)
    assert max(model.costs) <= 16
    assert sum(size or 0 for size in step.micro_batch_sizes) == len(lengths)
    assert (values_of(model) - expected).norm() <= 1e-12 * expected.norm()


def test_rows_are_put_together_well() -> None:
    """Long and short rows are sorted apart: 5 micro-batches, where equal numbers of rows within the limit need 16."""
    lengths = [16, 1, 1, 1] * 4
    model = Model()
    accumulator(model, 16).step(sentences(lengths))
    assert sorted(model.costs) == [12, 16, 16, 16, 16]


def test_running_out_of_memory_lowers_the_cost() -> None:
    """Where the limit was too high the window is run again at half of what failed, exact, and the next one at once."""
    batch, model = sentences([8, 3, 5, 2, 7, 1, 4, 4]), Model(room=20).double()
    acc = accumulator(model, 40)
    first = acc.step(batch)
    expected = whole_step(batch)
    assert (values_of(model) - expected).norm() <= 1e-12 * expected.norm()
    assert first.replays == model.failures == 1
    assert acc.step(batch).replays == 0
    assert model.failures == 1


def test_row_above_the_limit_is_named() -> None:
    """A row that costs more than the limit by itself is refused with its number and cost, and nothing is run."""
    model = Model()
    with pytest.raises(InvalidRequestError, match="row 1 costs 9, row 3 costs 12, above max_cost=8"):
        accumulator(model, 8).step(sentences([3, 9, 4, 12]))
    assert model.costs == []


def test_single_row_that_does_not_fit() -> None:
    """A row that runs out of memory by itself comes out with a note."""
    model = Model(room=6)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        accumulator(model, 100).step(sentences([3, 9, 4]))
    assert "with a single row" in raised.value.__notes__[0]


@pytest.mark.parametrize("cost", [-1.0, math.nan, math.inf])
def test_impossible_cost_is_refused(cost: float) -> None:
    """A cost that is negative or no number is refused with its value."""
    model = Model()
    acc = Accumulator(
        model, SGD(model.parameters(), lr=1.0), cost=lambda batch: cost, max_cost=5, training_step=mean_over_tokens
    )
    with pytest.raises(InvalidRequestError, match=f"cost= gave {cost}"):
        acc.step(sentences([3, 2]))


def test_outputs_in_the_order_of_the_rows() -> None:
    """In a loop of one's own the outputs of reordered micro-batches come back in the order of the batch's rows."""
    batch, model = sentences([8, 3, 5, 2, 7, 1, 4, 4]), Model()
    acc = accumulator(model, 16)
    outputs, rows = [], []
    with acc.window(batch) as window:
        for micro_batch in window:
            outputs.append(micro_batch["ids"][:, 0] * 100 + (micro_batch["ids"] != 0).sum(1))
            rows.append(len(micro_batch["ids"]))
            window.backward(mean_over_tokens(model, micro_batch))
        ordered = window.in_order(outputs)
    expected = batch["ids"][:, 0] * 100 + (batch["ids"] != 0).sum(1)
    assert not torch.equal(torch.cat(outputs), expected)
    assert torch.equal(ordered, expected)
    assert len(rows) > 1


def test_outputs_of_rows_that_were_not_moved() -> None:
    """Where rows are cut in order, the outputs in order are simply the outputs one after the other."""
    model = nn.Linear(3, 1)
    acc = Accumulator(model, SGD(model.parameters(), lr=0.1), micro_batch=2)
    batch = torch.arange(15.0).reshape(5, 3)
    seen = []
    with acc.window(batch) as window:
        for micro_batch in window:
            seen.append(micro_batch)
            window.backward(model(micro_batch).mean())
    assert torch.equal(window.in_order(seen), batch)
