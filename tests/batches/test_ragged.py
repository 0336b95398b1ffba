"""Sequences laid end to end are told by the leaf that says where they lie; what only looks a little like them is not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import autoaccum
from autoaccum.batches.layout import Layout, find_layout, refuse_doubtful_layout
from autoaccum.batches.ragged import laid_end_to_end
from autoaccum.batches.sources import source_of
from autoaccum.errors import InvalidRequestError

LENGTHS = torch.tensor([5, 3, 7, 2, 9, 4])
TOKENS = int(LENGTHS.sum())
ENDS = LENGTHS.cumsum(0)
STARTS = ENDS - LENGTHS
BOUNDS = torch.cat([STARTS, ENDS[-1:]])


def tokens(kind: torch.dtype = torch.long) -> Tensor:
    return torch.arange(TOKENS).remainder(7).to(kind)


RAGGED: dict[str, tuple[dict[str, Any], str]] = {
    "bags and their starts": ({"label": torch.ones(6), "text": tokens(), "offsets": STARTS}, "offsets"),
    "bags and their lengths": ({"label": torch.ones(6), "text": tokens(), "lengths": LENGTHS}, "lengths"),
    "attention over variable lengths": (
        {"input_ids": tokens(), "labels": tokens(), "cu_seqlens": BOUNDS.int(), "max_seqlen": 9},
        "cu_seqlens",
    ),
    "one sequence": ({"input_ids": tokens(), "labels": tokens(), "where": torch.tensor([0, TOKENS])}, "where"),
    "graphs": ({"x": torch.ones(TOKENS, 4), "batch": tokens(), "y": torch.ones(6), "ptr": BOUNDS}, "ptr"),
    "clouds of points": ({"coord": torch.ones(TOKENS, 3), "segment": tokens(), "end": ENDS}, "end"),
    "arrays": ({"x": np.ones((TOKENS, 2)), "y": np.ones(TOKENS), "bounds": BOUNDS.numpy()}, "bounds"),
    "an empty sequence": ({"x": torch.ones(9, 2), "y": torch.ones(9), "bounds": torch.tensor([0, 4, 4, 9])}, "bounds"),
    "inside": ({"a": {"x": tokens(), "y": tokens()}, "b": {"bounds": BOUNDS}}, "b.bounds"),
    "starts of bags, one of which is empty": (
        {"y": torch.ones(4), "x": torch.ones(9), "offsets": torch.tensor([0, 4, 4, 7])},
        "offsets",
    ),
}
OTHERS: dict[str, dict[str, Any]] = {
    "labels and a table": {"x": torch.ones(6, 2), "label": torch.tensor([0, 2, 4, 5, 7, 8]), "table": torch.ones(10, 3)},
    "labels that sum up to a table": {
        "x": torch.ones(4, 2),
        "label": torch.tensor([1, 2, 3, 4]),
        "table": torch.ones(10, 3),
    },
    "an index of the rows": {"x": torch.ones(9, 2), "index": torch.arange(9), "bank": torch.ones(64, 2)},
    "an index of the rows and a bank of one less": {
        "x": torch.ones(9, 2),
        "index": torch.arange(9),
        "bank": torch.ones(8, 2),
    },
    "labels in order": {"x": torch.ones(6, 2), "label": torch.tensor([0, 0, 1, 1, 2, 3]), "anchors": torch.ones(3, 2)},
    "steps of a diffusion": {"x": torch.ones(8, 2), "t": torch.arange(8) * 142, "alphas": torch.ones(1000)},
    "numbers of users": {"x": torch.ones(9, 2), "user": torch.arange(9) * 3, "users": torch.ones(40, 2)},
    "counts of classes": {"x": torch.ones(9, 2), "y": torch.ones(9), "class_counts": torch.tensor([4, 3, 2])},
    "lengths of padded rows": {"x": torch.ones(6, 9), "lengths": LENGTHS},
    "bounds of all rows whole": {"input_ids": tokens()[None], "labels": tokens()[None], "cu_seq_lens_q": BOUNDS.int()},
    "bounds of something else": {"x": torch.ones(6, 2), "y": torch.ones(6), "edges": torch.tensor([0, 3, 5, 11])},
    "rows of another kind": {"x": torch.ones(6, 2), "where": torch.linspace(0, 30, 6), "table": torch.ones(30)},
    "text": {"x": np.ones((3, 2)), "name": np.array(["a", "b", "c"]), "table": np.ones(8)},
}


@pytest.mark.parametrize("name", RAGGED)
def test_sequences_laid_end_to_end_are_refused(name: str) -> None:
    """Cut by rows the sequences would be torn, or parted from where they begin; the error names the leaf and a way on."""
    batch, bounds = RAGGED[name]
    with pytest.raises(
        InvalidRequestError,
        match=rf"leaf '{bounds}' says, beside leaf .*, that . sequences are laid end to end: .* torn apart\. Pass split=",
    ):
        refuse_doubtful_layout(batch, find_layout(batch))


@pytest.mark.parametrize(
    "batch",
    [
        {"x": torch.ones(TOKENS, 4), "graph": torch.repeat_interleave(torch.arange(6), LENGTHS), "y": torch.ones(6)},
        (torch.ones(TOKENS, 4), torch.repeat_interleave(torch.arange(6), LENGTHS), torch.ones(6, 2), torch.ones(TOKENS)),
    ],
)
def test_entries_that_say_where_they_belong_are_refused(batch: Any) -> None:
    """Nodes with the number of their graph, instances with that of their bag: what is told of six would be told of each."""
    laid = laid_end_to_end(batch, find_layout(batch).cuts)
    assert laid is not None and laid.num == 6
    with pytest.raises(InvalidRequestError, match="torn apart"):
        refuse_doubtful_layout(batch, find_layout(batch))


@pytest.mark.parametrize("name", OTHERS)
def test_other_batches_are_not(name: str) -> None:
    """Labels, tables, lengths of padded rows and the like have nothing to do with it."""
    batch = OTHERS[name]
    assert laid_end_to_end(batch, find_layout(batch).cuts) is None


@pytest.mark.parametrize("name", ["bags and their starts", "bags and their lengths", "graphs", "clouds of points"])
def test_sequences_are_counted(name: str) -> None:
    """However their places are given, they are six."""
    batch, _ = RAGGED[name]
    laid = laid_end_to_end(batch, find_layout(batch).cuts)
    assert laid is not None and laid.num == 6


def test_a_leaf_that_is_named_is_taken_at_its_word() -> None:
    """Who says that the leaf is passed on whole knows what it is."""
    batch, bounds = RAGGED["attention over variable lengths"]
    layout = find_layout(batch, {bounds: None})
    refuse_doubtful_layout(batch, layout, {bounds: None})
    assert layout.rows == TOKENS


def test_numbers_that_are_not_there_are_not_read() -> None:
    """A batch on the meta device has no numbers to tell by."""
    batch = {"x": torch.ones(TOKENS, device="meta"), "bounds": BOUNDS.to("meta")}
    assert laid_end_to_end(batch, Layout(TOKENS, {("x",): 0}).cuts) is None


def test_many_leaves_take_no_time() -> None:
    """Every leaf is looked at once, not once for every other one."""
    batch = {"bounds": BOUNDS, **{f"x{number}": torch.ones(3) for number in range(20_000)}}
    assert laid_end_to_end(batch, {(f"x{number}",): 0 for number in range(20_000)}) is None


def bags(first: int, last: int) -> dict[str, Tensor]:
    """Bags of words, laid end to end."""
    lengths = torch.tensor([3 + index % 4 for index in range(first, last)])
    text = torch.cat([torch.arange(3 + index % 4) + index for index in range(first, last)])
    return {"label": torch.arange(first, last) % 3, "text": text, "offsets": lengths.cumsum(0) - lengths}


def rows_laid_end_to_end(first: int, last: int) -> dict[str, Tensor]:
    """Sequences for attention over variable lengths."""
    found = bags(first, last)
    bounds = torch.cat([found["offsets"], torch.tensor([len(found["text"])])])
    return {"input_ids": found["text"], "labels": found["text"], "cu_seqlens": bounds.int()}


@pytest.mark.parametrize("make", [bags, rows_laid_end_to_end])
def test_a_function_of_the_number_of_sequences_is_a_sample(make: Any) -> None:
    """It is asked for so many sequences, and is known to have returned them though nothing has that many rows."""
    source = source_of(lambda count: make(0, count))
    assert [len(part["offsets" if make is bags else "cu_seqlens"]) for part in source.micro_batches([3, 2])] == (
        [3, 2] if make is bags else [4, 3]
    )


def test_a_window_of_ready_ones_is_exact() -> None:
    """Ready micro-batches that the caller weighs have the gradient of all bags at once."""
    torch.manual_seed(0)
    table, head = nn.EmbeddingBag(32, 4, dtype=torch.float64), nn.Linear(4, 3, dtype=torch.float64)
    model = nn.ModuleList([table, head])

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(head(table(batch["text"], batch["offsets"])), batch["label"])

    expected = torch.autograd.grad(step(model, bags(0, 9)), list(model.parameters()))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    acc = autoaccum.Accumulator(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        micro_batch=6,
        training_step=step,
        weight=lambda batch: len(batch["label"]),
    )
    acc.step(autoaccum.Window([bags(0, 2), bags(2, 9)]))
    moved = [old - new.detach() for old, new in zip(before, model.parameters(), strict=True)]
    assert all(torch.allclose(*pair, rtol=0, atol=1e-12) for pair in zip(moved, expected, strict=True))
