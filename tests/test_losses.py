"""The loss of one micro-batch: who gives it, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autoaccum.errors import InvalidRequestError
from autoaccum.losses import MicroBatchLoss

INPUTS, TARGET = torch.randn(4, 3), torch.tensor([0, 1, 1, 0])


class Answering(nn.Module):
    """Answers with what a function makes of its layer's output, and remembers how it was called."""

    def __init__(self, answer: Any = lambda output: output) -> None:
        super().__init__()
        self.layer, self.answer = nn.Linear(3, 2), answer
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, kwargs))
        return self.answer(self.layer(INPUTS))


class OneArgument(nn.Module):
    """A model of one argument."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, inputs: Any) -> Tensor:
        output: Tensor = self.layer(torch.stack(inputs) if isinstance(inputs, list) else inputs)
        return output


def silent(model: nn.Module, loss_fn: Any = None, training_step: Any = None) -> MicroBatchLoss:
    """As in training: nothing stands in for a loss that nobody gave."""
    return MicroBatchLoss(model, loss_fn, training_step)


# -- who gives the loss


def test_training_step_wins() -> None:
    """With a training step, it alone is called, with the model and the micro-batch."""
    model, seen = Answering(), []

    def step(module: nn.Module, batch: Any) -> Tensor:
        seen.extend((module, batch))
        return model.layer.weight.sum() * 0 + 7

    loss = silent(model, loss_fn=lambda output, target: pytest.fail("called"), training_step=step)
    assert float(loss({"any": 1}).detach()) == 7
    assert seen == [model, {"any": 1}] and model.calls == []


def test_loss_fn_gets_output_and_target() -> None:
    """`loss_fn` gets the output for the inputs, and the last part of the batch."""
    model = OneArgument()
    loss = silent(model, loss_fn=functional.cross_entropy)((INPUTS, TARGET))
    assert torch.equal(loss, functional.cross_entropy(model(INPUTS), TARGET))


def test_several_inputs_go_in_one_by_one() -> None:
    """All parts but the last are arguments of the model."""
    model = Answering()
    silent(model, loss_fn=lambda output, target: output.sum() + target)((1, 2, torch.tensor(3.0)))
    assert model.calls == [((1, 2), {})]


def test_mapping_of_inputs_goes_in_by_name() -> None:
    """A mapping in the place of the inputs is given by keywords."""
    model = Answering()
    silent(model, loss_fn=lambda output, target: output.sum())(({"left": 1, "right": 2}, TARGET))
    assert model.calls == [((), {"left": 1, "right": 2})]


def test_list_with_one_input_per_row_is_one_argument() -> None:
    """A list of as many inputs as the target has rows goes in as the one argument that it is."""
    model = Answering()
    inputs = [torch.zeros(3, 5 + row) for row in range(4)]
    silent(model, loss_fn=lambda output, target: output.sum())((inputs, TARGET))
    ((args, kwargs),) = model.calls
    assert len(args) == 1 and args[0] is inputs and kwargs == {}


def test_list_of_columns_goes_in_one_by_one() -> None:
    """A list of tensors that each hold all the rows is a list of arguments."""
    model = Answering()
    columns = [torch.zeros(2, 3), torch.zeros(2, 3)]
    silent(model, loss_fn=lambda output, target: output.sum())((columns, torch.zeros(2)))
    assert len(model.calls[0][0]) == 2


@pytest.mark.parametrize(
    "answer",
    [
        lambda output: output.mean(),
        lambda output: {"loss": output.mean(), "logits": output},
        lambda output: SimpleNamespace(loss=output.mean(), logits=output),
        lambda output: {"loss_box": output.mean() * 0.25, "loss_class": output.mean() * 0.75},
        lambda output: (output.mean(), output),
        lambda output: output.mean().reshape(1),
    ],
    ids=["scalar", "loss in a mapping", "loss as an attribute", "a mapping of losses", "first of a tuple", "one element"],
)
def test_models_own_loss(answer: Any) -> None:
    """Without a loss of the user's, that of the model is taken, wherever it is, as a scalar."""
    model = Answering(answer)
    loss = silent(model)({"x": 1})
    assert loss.shape == () and torch.allclose(loss, model.layer(INPUTS).mean())


def test_models_own_loss_gets_the_whole_batch() -> None:
    """A model that takes all parts of the batch gets all of them, the target as well."""
    model = Answering(lambda output: output.mean())
    silent(model)((INPUTS, TARGET))
    ((args, _),) = model.calls
    assert args[0] is INPUTS and args[1] is TARGET


@pytest.mark.parametrize("items", [[{"x": 1}, {"x": 2}], [(1, 2), (3, 4)]], ids=["mappings", "tuples"])
def test_list_of_items_is_one_argument(items: list[Any]) -> None:
    """A list of items, as detection models take, goes in as one argument."""

    class OfItems(Answering):
        def forward(self, items: Any) -> Any:
            return super().forward(items)

    model = OfItems(lambda output: output.mean())
    silent(model)(items)
    assert model.calls == [((items,), {})]


# -- the mean of the outputs


def test_mean_of_outputs_stands_in_with_a_warning() -> None:
    """Where somebody is told, the mean of the outputs stands in for the loss."""
    told: list[str] = []
    model = OneArgument()
    loss = MicroBatchLoss(model, None, None, warn=told.append)(INPUTS)
    assert torch.allclose(loss, model(INPUTS).mean())
    assert len(told) == 1 and "the mean of its outputs was used" in told[0]


def test_mean_of_outputs_takes_every_part_alike() -> None:
    """Of several outputs, every one with a gradient counts alike, however large, and the others do not."""
    model = Answering(lambda output: {"a": output[:, :1], "b": [output], "c": torch.full((9, 9), 100.0)})
    loss = MicroBatchLoss(model, None, None, warn=lambda text: None)(INPUTS)
    output = model.layer(INPUTS)
    assert torch.allclose(loss, (output[:, :1].mean() + output.mean()) / 2)


def test_outputs_without_a_gradient_are_refused() -> None:
    """Outputs that nothing trainable leads to cannot stand in for a loss."""
    model = Answering(lambda output: output.detach())
    with pytest.raises(InvalidRequestError, match="no part with a gradient"):
        MicroBatchLoss(model, None, None, warn=lambda text: None)({"x": 1})


def test_last_part_that_the_model_does_not_take_is_left_out() -> None:
    """A pair for a model of one argument is taken as (input, target), and that is said."""
    told: list[str] = []
    MicroBatchLoss(OneArgument(), None, None, warn=told.append)((INPUTS, TARGET))
    assert "last part was taken as the target and not used" in told[0]


def test_nobody_trains_on_the_mean_of_outputs() -> None:
    """Where nobody is told, a missing loss is an error that says what to pass."""
    for batch in (INPUTS, (INPUTS, TARGET)):
        with pytest.raises(InvalidRequestError, match=r"no loss was given .* pass loss_fn="):
            silent(OneArgument())(batch)


# -- what is refused


@pytest.mark.parametrize("name", ["loss_fn", "training_step"])
@pytest.mark.parametrize("value", ["mse", 3, torch.zeros(())], ids=type)
def test_what_cannot_be_called_is_refused(name: str, value: Any) -> None:
    """A loss or a step that is no function is refused before anything runs."""
    with pytest.raises(InvalidRequestError, match=rf"{name}=.* cannot be called; expected a function"):
        MicroBatchLoss(nn.Linear(2, 2), **{"loss_fn": None, "training_step": None, name: value})


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (lambda output: None, "NoneType as the loss"),
        (lambda output: float(output.sum()), "float as the loss"),
        (lambda output: output, r"shape \(4, 2\)"),
        (lambda output: output.sum().detach(), "does not require grad"),
    ],
    ids=["nothing", "number", "not reduced", "detached"],
)
@pytest.mark.parametrize("origin", ["training_step", "loss_fn", "the model"])
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True to a scalar")
def test_what_is_no_loss_is_refused(result: Any, said: str, origin: str) -> None:
    """A loss must be a scalar with a graph, and the error says who gave another thing."""
    model = Answering()
    if origin == "training_step":
        loss = silent(model, training_step=lambda module, batch: result(model.layer(INPUTS)))
    elif origin == "loss_fn":
        loss = silent(model, loss_fn=lambda output, target: result(output))
    else:
        loss = silent(Answering(lambda output: {"loss": result(output)}))
        said = "no loss was given" if said.endswith("as the loss") else said
    with pytest.raises(InvalidRequestError, match=said if "no loss" in said else f"{origin} returned .*{said}"):
        loss((INPUTS, TARGET))


@pytest.mark.parametrize("batch", [INPUTS, {"x": INPUTS}, (INPUTS,), "text"], ids=["tensor", "mapping", "one part", "text"])
def test_loss_fn_needs_pairs(batch: Any) -> None:
    """A batch without a target is refused where `loss_fn` needs one."""
    with pytest.raises(InvalidRequestError, match=r"loss_fn needs samples shaped \(input, target\)"):
        silent(OneArgument(), loss_fn=functional.cross_entropy)(batch)


def test_error_of_the_model_is_the_users_own() -> None:
    """Whatever the user's code raises comes out unchanged."""
    error = LookupError("mine")

    def answer(output: Tensor) -> Mapping[str, Tensor]:
        raise error

    with pytest.raises(LookupError) as caught:
        silent(Answering(answer))({"x": 1})
    assert caught.value is error
