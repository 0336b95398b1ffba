"""What a plan says of a loss that does not split over its micro-batches, seen from a few rows of the sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autoaccum
from autoaccum import Plan
from autoaccum.checking import glance as glance_module

Step = Callable[[nn.Module, Any], Tensor]
WEIGHTS = torch.tensor([0.1, 1.0, 10.0])
LABELS = torch.tensor([0, 0, 0, 0, 0, 1, 0, 2])


def labelled() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return nn.Linear(5, 3), (torch.randn(8, 5), LABELS)


def plan_of(model: nn.Module, sample: Any, **more: Any) -> Plan:
    """Of two micro-batches of four rows."""
    settings = {"max_micro_batch": 4, "device": "virtual:1GiB", "levers": "none", "progress": False} | more
    return autoaccum.autotune(model, sample, 8, **settings)


def told(plan: Plan) -> list[str]:
    return [text for text in plan.warnings if text.startswith("The loss does not split")]


def weighted(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], weight=WEIGHTS)


def plain(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def summed(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def contrasted(model: nn.Module, batch: Any) -> Tensor:
    rows = F.normalize(model(batch[0]), dim=-1)
    return F.cross_entropy(rows @ rows.T / 0.1, torch.arange(len(rows)))


def spread(model: nn.Module, batch: Any) -> Tensor:
    result: Tensor = model(batch[0]).var(0, correction=1).mean()  # NaN of one row
    return result


@pytest.mark.filterwarnings("ignore:var():UserWarning")
@pytest.mark.parametrize("step", [weighted, contrasted, summed, spread])
def test_loss_that_does_not_split_is_told(step: Step) -> None:
    """A plan for weighted classes, for rows that are compared, or for a sum says so, though nobody called check."""
    assert len(told(plan_of(*labelled(), training_step=step))) == 1


def test_figures_are_those_of_the_loss() -> None:
    """What is told are the losses of four rows at once and of three and one of them, as a window would weigh these."""
    model, (inputs, labels) = labelled()
    (text,) = told(plan_of(model, (inputs, labels), training_step=weighted))
    with torch.no_grad():
        whole, three, one = (
            float(weighted(model, (inputs[rows], labels[rows]))) for rows in (slice(4, 8), slice(4, 7), slice(7, 8))
        )
    assert f"on 4 rows of the sample it is {whole:.4g}, and {0.75 * three + 0.25 * one:.4g} from micro-batches of 3" in text


def test_loss_fn_that_was_measured_is_not_called_unknown() -> None:
    """For a loss_fn of one's own that does not split, the finding stands in place of the doubt."""
    plan = plan_of(*labelled(), loss_fn=lambda output, target: F.cross_entropy(output, target, weight=WEIGHTS))
    assert told(plan)
    assert not any("none of torch's own losses" in text for text in plan.warnings)


def test_tokens_weighed_by_rows_are_told() -> None:
    """A mean over labels that is weighed by rows is told; weighed by its labels it is not."""
    torch.manual_seed(0)
    model = nn.Linear(6, 9)
    labels = torch.randint(0, 9, (8, 5))
    for row in range(8):
        labels[row, 1 + row % 4 :] = -100
    sample = {"x": torch.randn(8, 5, 6), "labels": labels}

    def step(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["labels"].flatten())

    assert told(plan_of(model, sample, training_step=step))
    assert not told(plan_of(model, sample, training_step=step, weight=autoaccum.tokens("labels")))


def test_batch_with_nothing_that_counts() -> None:
    """Groups of rows in which no label counts are passed over."""
    model, (inputs, _) = labelled()
    labels = torch.tensor([-100, -100, -100, 0, -100, -100, -100, 2])

    def step(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["labels"], reduction="sum") / max(
            1, int((batch["labels"] >= 0).sum())
        )

    plan = plan_of(model, {"x": inputs, "labels": labels}, training_step=step, weight=autoaccum.tokens("labels"))
    assert not told(plan)


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(5, 3),
        nn.Sequential(nn.Linear(5, 3), nn.Dropout(0.5)),
        nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)),
        nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3, track_running_stats=False)),
    ],
    ids=["plain", "dropout", "batch norm", "batch norm without statistics"],
)
def test_mean_over_rows_is_not_told(model: nn.Module) -> None:
    """A loss that splits is not told of; nor is dropout, or BatchNorm, which has its own words."""
    assert not told(plan_of(model, labelled()[1], training_step=plain))


def test_random_loss_is_not_told() -> None:
    """Where the loss is another one each time, nothing can be seen in it."""

    def step(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0] + torch.randn(len(batch[0]), 5)), batch[1])

    assert not told(plan_of(*labelled(), training_step=step))


def test_weighted_classes_that_torch_knows_are_not_told() -> None:
    """`nn.CrossEntropyLoss(weight=...)` is weighed by what it divides by, so it splits."""
    assert not told(plan_of(*labelled(), loss_fn=nn.CrossEntropyLoss(weight=WEIGHTS)))


def test_half_precision_is_looked_at_coarsely() -> None:
    """A loss computed in bfloat16 differs by its rounding, which is not told of; comparing rows is."""
    model, (inputs, labels) = labelled()
    model, sample = model.bfloat16(), (inputs.bfloat16(), labels)
    assert not told(plan_of(model, sample, training_step=plain))
    assert told(plan_of(model, sample, training_step=contrasted))


def test_autocast_is_looked_at_coarsely() -> None:
    """Under autocast, also one within the step, a difference of less than a percent is not told of."""

    def slightly(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch[0]) ** 2).mean() + 1 + 0.02 / len(batch[0])

    def under_autocast(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return slightly(model, batch)

    assert told(plan_of(*labelled(), training_step=slightly))
    assert not told(plan_of(*labelled(), training_step=under_autocast))


# -- where nothing is looked at


@pytest.fixture
def glances(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The sizes of every comparison from here on."""
    found = []
    compared = glance_module._compared
    monkeypatch.setattr(glance_module, "_compared", lambda *args: (found.append(args[2]), compared(*args))[1])
    return found


def test_one_micro_batch_is_not_looked_at(glances: list[tuple[int, int]]) -> None:
    """Without accumulation there is nothing to say."""
    plan_of(*labelled(), training_step=weighted, max_micro_batch=8)
    assert glances == []


@pytest.mark.filterwarnings("ignore:var():UserWarning")
@pytest.mark.parametrize(
    ("more", "sizes"),
    [
        ({"training_step": spread}, [(3, 1), (2, 2)]),
        ({}, [(3, 1)]),
        ({"max_micro_batch": 2}, [(1, 1)]),
        ({"max_micro_batch": 1}, []),
        ({"multiple_of": 2}, [(2, 2)]),
        ({"multiple_of": 4}, []),
    ],
    ids=["spread", "any", "at most 2", "at most 1", "even", "all four"],
)
def test_sizes_are_uneven_and_allowed(more: dict[str, Any], sizes: list[Any], glances: list[tuple[int, int]]) -> None:
    """The rows are cut as unevenly as the caller's conditions let them be, and not at all where two parts do not fit."""
    plan_of(*labelled(), **({"training_step": plain} | more))
    assert glances == sizes


def test_sample_of_one_row_is_not_looked_at(glances: list[tuple[int, int]]) -> None:
    """Copies of one row would hide every difference."""
    model, (inputs, labels) = labelled()
    plan_of(model, (inputs[:1], labels[:1]), training_step=weighted)
    assert glances == []


def test_compiled_model_is_not_looked_at(glances: list[tuple[int, int]]) -> None:
    """It would be compiled anew for sizes that training never has."""
    model, sample = labelled()
    plan_of(torch.compile(model, backend="eager"), sample, training_step=weighted)
    assert glances == []


def test_step_that_is_weighed_elsewhere_is_not_looked_at(glances: list[tuple[int, int]]) -> None:
    """A Trainer's window is measured as the trainer weighs it, so its step is left alone here."""

    class Step:
        is_weighed_elsewhere = True

        def __call__(self, model: nn.Module, batch: Any) -> Tensor:
            return weighted(model, batch)

    assert not told(plan_of(*labelled(), training_step=Step()))
    assert glances == []


@pytest.mark.parametrize("error", [ValueError("even batches only"), torch.OutOfMemoryError("CUDA out of memory")], ids=repr)
def test_step_that_refuses_these_sizes(error: Exception) -> None:
    """A step that runs with the plan's sizes alone gets its plan, with nothing told."""
    refusing = False

    def step(model: nn.Module, batch: Any) -> Tensor:
        nonlocal refusing
        refusing = refusing or len(batch[0]) == 3
        if refusing:
            raise error
        return weighted(model, batch)

    plan = plan_of(*labelled(), training_step=step, equal_micro_batches=True)
    assert refusing
    assert plan.micro_batch_sizes == (4, 4)
    assert not told(plan)


def test_step_that_refuses_odd_sizes() -> None:
    """Where a part of one row does not run, parts of two are looked at."""

    def step(model: nn.Module, batch: Any) -> Tensor:
        if len(batch[0]) % 2:
            raise ValueError("even batches only")
        return weighted(model, batch)

    (text,) = told(plan_of(*labelled(), training_step=step))
    assert "from micro-batches of 2 and 2" in text


def test_interrupt_is_the_users() -> None:
    """Ctrl-C while it is looked at ends the call, and the model is as it was."""
    model, sample = labelled()
    before = model.weight.detach().clone()

    def step(model: nn.Module, batch: Any) -> Tensor:
        if len(batch[0]) == 3:
            raise KeyboardInterrupt
        return weighted(model, batch)

    with pytest.raises(KeyboardInterrupt):
        plan_of(model, sample, training_step=step)
    assert torch.equal(model.weight, before)


def test_nothing_is_left_behind() -> None:
    """Statistics, modes, hooks, gradients and generators are as they were, with layers that were held still."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 3))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [part.training for part in model.modules()]
    generator = torch.get_rng_state()
    assert told(plan_of(model, labelled_sample(), training_step=weighted))
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [part.training for part in model.modules()] == modes
    assert not any(part._forward_pre_hooks for part in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def labelled_sample() -> tuple[Tensor, Tensor]:
    """Without moving the generator of the test."""
    numbers = torch.Generator().manual_seed(1)
    return torch.randn(8, 5, generator=numbers), LABELS
