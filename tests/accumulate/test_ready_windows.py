"""Windows of ready micro-batches: grouped from a loader, taken as they are, none left over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD

import autoaccum
from autoaccum import Accumulator, Window
from autoaccum.errors import InvalidRequestError


def mean_step(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).pow(2).mean()  # type: ignore[no-any-return]


def build() -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(3, 2).double()


def accumulator(model: nn.Module, micro_batch: int = 4, training_step: Any = mean_step, **options: Any) -> Accumulator:
    return Accumulator(
        model, SGD(model.parameters(), lr=1.0), micro_batch=micro_batch, training_step=training_step, **options
    )


def rows(count: int) -> Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(count), dtype=torch.float64)


@pytest.mark.parametrize(("count", "lengths"), [(0, []), (1, [1]), (3, [3]), (4, [4]), (6, [4, 2]), (8, [4, 4])])
def test_last_window_may_be_short(count: int, lengths: list[int]) -> None:
    """Micro-batches are grouped in order, none is left over, and none is made up."""
    given = [torch.full((2, 3), float(index)) for index in range(count)]
    windows = list(accumulator(build()).windows(iter(given), steps=4))
    assert [len(window) for window in windows] == lengths
    assert [part for window in windows for part in window] == given


def test_micro_batches_are_drawn_a_window_at_a_time() -> None:
    """No more than one window is drawn from the loader before it is asked for."""
    drawn = []

    def loader() -> Iterator[Tensor]:
        for index in range(6):
            drawn.append(index)
            yield rows(2)

    windows = accumulator(build()).windows(loader(), steps=2)
    next(windows)
    assert drawn == [0, 1]


def test_error_of_the_loader_comes_out() -> None:
    """An error of the loader's own is the user's, unchanged."""
    error = ZeroDivisionError("mine")

    def loader() -> Iterator[Tensor]:
        yield rows(2)
        raise error

    with pytest.raises(ZeroDivisionError) as raised:
        list(accumulator(build()).windows(loader(), steps=4))
    assert raised.value is error


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "4"])
def test_impossible_number_of_steps(steps: Any) -> None:
    """A window has a whole number of micro-batches, and that is said at the call."""
    with pytest.raises(InvalidRequestError, match="steps="):
        accumulator(build()).windows([], steps=steps)


def test_number_of_steps_is_needed_without_a_plan() -> None:
    """Without a plan nobody knows how many micro-batches make a window."""
    with pytest.raises(InvalidRequestError, match="steps=None needs a plan"):
        accumulator(build()).windows([])


@pytest.mark.parametrize("sizes", [(5, 1, 3), (9,), (1,) * 9, (2, 7)])
def test_window_is_the_mean_over_all_its_rows(sizes: tuple[int, ...]) -> None:
    """However uneven the ready micro-batches are, the step is that of all their rows, and they are not cut."""
    model, reference, batch = build(), build(), rows(9)
    mean_step(reference, batch).backward()
    SGD(reference.parameters(), lr=1.0).step()
    step = accumulator(model, micro_batch=2).step(Window(list(batch.split(sizes))))
    assert step.micro_batch_sizes == sizes
    assert torch.allclose(model.weight, reference.weight, rtol=1e-12, atol=1e-14)


def test_list_is_a_batch() -> None:
    """A plain list is one batch that is cut, a Window holds micro-batches: they are not the same."""
    model = build()
    parts = [(rows(1)[0], 0.5) for _ in range(4)]

    def step(model: nn.Module, batch: list[tuple[Tensor, float]]) -> Tensor:
        return model(torch.stack([row for row, _ in batch])).pow(2).mean()  # type: ignore[no-any-return]

    assert accumulator(model, micro_batch=2, training_step=step).step(parts).micro_batch_sizes == (2, 2)
    ready = accumulator(model, micro_batch=2, training_step=step).step(Window([parts[:1], parts[1:]]))
    assert ready.micro_batch_sizes == (1, 3)


def test_labels_popped_by_the_step_are_there_in_a_replay() -> None:
    """Micro-batches that are dicts come in new containers: the loader's own keep their labels, and a replay finds them."""
    model = build()

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        labels = batch.pop("labels")
        if len(labels) > 2:
            raise torch.OutOfMemoryError("full")
        return functional.cross_entropy(model(batch["x"]), labels)

    def batch(count: int) -> dict[str, Tensor]:
        return {"x": rows(count), "labels": torch.arange(count) % 2}

    window = Window([batch(2), batch(2), batch(4)])
    step_result = accumulator(model, training_step=step).step(window)
    assert (step_result.replays, step_result.micro_batch_sizes) == (1, (2, 2, 2, 2))
    assert [sorted(part) for part in window] == [["labels", "x"]] * 3


class Graphs:
    """Something that nobody but its maker can look into."""

    def __init__(self, nodes: Tensor, graphs: int) -> None:
        self.nodes, self.graphs = nodes, graphs


def mean_over_nodes(model: nn.Module, batch: Graphs) -> Tensor:
    if len(batch.nodes) > 6:
        raise torch.OutOfMemoryError("full")
    return mean_step(model, batch.nodes)


def test_opaque_micro_batches_with_a_weight() -> None:
    """Micro-batches of an unknown kind are taken as they are, weighted by what the user counts."""
    model, reference, nodes = build(), build(), rows(9)
    mean_step(reference, nodes).backward()
    SGD(reference.parameters(), lr=1.0).step()
    acc = accumulator(model, training_step=mean_over_nodes, weight=lambda batch: len(batch.nodes))
    step = acc.step(Window([Graphs(nodes[:6], 2), Graphs(nodes[6:], 5)]))
    assert (step.micro_batch_sizes, step.weight) == ((None, None), 9.0)
    assert torch.allclose(model.weight, reference.weight, rtol=1e-12, atol=1e-14)


def test_opaque_micro_batches_without_a_weight_are_refused() -> None:
    """Where rows cannot be counted, a mean over samples cannot be weighted, and the message says what to pass."""
    acc = accumulator(build(), training_step=mean_over_nodes)
    with pytest.raises(InvalidRequestError, match="rows of a ready micro-batch cannot be counted; pass weight="):
        acc.step(Window([Graphs(rows(2), 1)]))


def test_opaque_micro_batch_that_does_not_fit() -> None:
    """One that runs out of memory cannot be cut: its error comes out with that note, and nothing is left behind."""
    model = build()
    acc = accumulator(model, training_step=mean_over_nodes, weight=lambda batch: len(batch.nodes))
    with pytest.raises(torch.OutOfMemoryError) as raised:
        acc.step(Window([Graphs(rows(2), 1), Graphs(rows(7), 1)]))
    assert "a micro-batch that cannot be cut (batch_dim= or split= may help)" in raised.value.__notes__[0]
    assert model.weight.grad is None


def test_opaque_micro_batch_with_a_split_is_cut() -> None:
    """With `split=` such a micro-batch is cut by the user's own function, and the step is that of all nodes."""
    model, reference, nodes = build(), build(), rows(8)
    mean_step(reference, nodes).backward()
    SGD(reference.parameters(), lr=1.0).step()

    class Sized(Graphs):
        def __len__(self) -> int:
            return len(self.nodes)

    def split(batch: Graphs, sizes: list[int]) -> list[Graphs]:
        return [Sized(part, 1) for part in batch.nodes.split(list(sizes))]

    acc = accumulator(model, training_step=mean_over_nodes, weight=lambda batch: len(batch.nodes), split=split)
    step = acc.step(Window([Sized(nodes, 1)]))
    assert (step.replays, step.micro_batch_sizes) == (1, (4, 4))
    assert torch.allclose(model.weight, reference.weight, rtol=1e-12, atol=1e-14)


def test_uneven_tokens_over_ready_micro_batches() -> None:
    """Ready micro-batches with different numbers of labels are weighted by them; as a mean of means they are far off."""
    model, reference = build(), build()
    labels = torch.tensor([[0, 1, -100, -100], [1, -100, -100, -100], [0, 0, 1, 1], [-100, -100, -100, -100]])
    inputs = torch.randn(4, 4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["labels"].flatten())

    step(reference, {"x": inputs, "labels": labels}).backward()
    SGD(reference.parameters(), lr=1.0).step()
    acc = accumulator(model, training_step=step, weight=autoaccum.tokens("labels"))
    result = acc.step(Window([{"x": inputs[row : row + 1], "labels": labels[row : row + 1]} for row in range(4)]))
    assert result.weight == 7
    assert torch.allclose(model.weight, reference.weight, rtol=1e-12, atol=1e-14)


def test_window_cannot_be_checked() -> None:
    """A check needs one batch that it can cut; ready micro-batches are none."""
    with pytest.raises(InvalidRequestError, match="ready micro-batches is no whole batch"):
        accumulator(build()).check(Window([rows(2), rows(2)]))
