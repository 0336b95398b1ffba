"""One's own trials are known again, and those of anything else are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from autoaccum.fingerprint import digest, fingerprint_of
from autoaccum.request import Request
from autoaccum.session import Search
from autoaccum.tune import _plain
from autoaccum.workload import Workload


class Net(nn.Module):
    """A layer, as often as it is told."""

    def __init__(self, width: int = 8, times: int = 2, activation: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.layer, self.drop, self.times, self.activation = nn.Linear(width, width), nn.Dropout(0.1), times, activation
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.activation(self.layer(x))
        out: Tensor = self.drop(x)
        return out


def another_net() -> nn.Module:
    """A model that looks the same, to which something else happens."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.drop, self.times, self.activation = nn.Linear(8, 8), nn.Dropout(0.1), 2, torch.tanh
            self.register_buffer("scale", torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(torch.cat([x, x, x, x]))
            return out

    Net.__qualname__ = "Net"
    return Net()


def mean_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).mean()


def sgd(**options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.SGD(parameters, **{"lr": 0.1, **options})


def fingerprint(
    model: nn.Module | None = None,
    sample: Any = None,
    *,
    device: str = "virtual:1MiB",
    world_size: int = 1,
    optimizer: Any = None,
    training_step: Any = mean_of,
    loss_fn: Any = None,
    batch_dim: Any = None,
    **numbers: Any,
) -> dict[str, str]:
    """Of a small call, with these changes."""
    workload = Workload(
        Net() if model is None else model,
        torch.ones(4, 8) if sample is None else sample,
        optimizer=sgd() if optimizer is None else optimizer,
        training_step=None if loss_fn is not None else training_step,
        loss_fn=loss_fn,
        batch_dim=batch_dim,
    )
    with Search(workload, Request(**{"target_batch": 48, "levers": "exact", **numbers}), device, None, None, ()) as search:
        return fingerprint_of(workload, search.device, search.request, world_size)


def frozen() -> nn.Module:
    model = Net()
    model.layer.bias.requires_grad_(False)
    return model


def with_parts_in_eval() -> nn.Module:
    model = Net()
    model.drop.eval()
    return model


def with_larger_buffer() -> nn.Module:
    model = Net()
    model.register_buffer("scale", torch.ones(5))
    return model


def pairs(*shape: int) -> TensorDataset:
    return TensorDataset(torch.ones(*shape), torch.zeros(shape[0]))


# -- the same


def test_same_call_has_the_same_fingerprint() -> None:
    """A model made anew, with other weights, is the same search."""
    assert fingerprint() == fingerprint()


def test_values_of_weights_do_not_count() -> None:
    """Nor do gradients that lie there, or where the generators are."""
    model = Net()
    before = fingerprint(model)
    torch.manual_seed(3)
    with torch.no_grad():
        model.layer.weight.normal_()
    model(torch.ones(1, 8)).sum().backward()
    assert fingerprint(model) == before


@pytest.mark.parametrize(
    "changes", [{"time_budget_s": 60.0}, {"predict": False}, {"storage": "runs.db"}, {"cache": "plans"}], ids=str
)
def test_what_does_not_change_the_answer_does_not_count(changes: dict[str, Any]) -> None:
    """How long the search may take and where its trials are kept make no other search."""
    assert fingerprint(**changes) == fingerprint()


def test_addresses_in_a_modules_text_do_not_count() -> None:
    """A module that shows a function shows where it lies, which is another place in every process."""

    class Shown(nn.Linear):
        def extra_repr(self) -> str:
            return f"function={(lambda: None)!r}"

    assert fingerprint(Shown(8, 8)) == fingerprint(Shown(8, 8))


@pytest.mark.slow
def test_call_is_known_again_in_another_process(run_child: Callable[..., Any]) -> None:
    """Another process, whose hashes and addresses are other ones, has the same fingerprint for the same call."""
    source = """
        import torch
        from autoaccum.fingerprint import fingerprint_of
        from autoaccum.request import Request
        from autoaccum.session import Search
        from autoaccum.tune import _plain
        from autoaccum.workload import Workload
        torch.rand(3)
        model = torch.nn.TransformerEncoderLayer(8, 2, 16, activation=torch.nn.functional.gelu)
        workload = Workload(model, torch.ones(4, 3, 8), optimizer=torch.optim.SGD, batch_dim=0)
        request = Request(target_batch=48, levers=_plain({"checkpointing", "offload", "optimizer_impl", "precision"}))
        with Search(workload, request, "virtual:1MiB", None, None, ()) as search:
            answer(fingerprint_of(workload, search.device, search.request, 1))
    """
    assert run_child(source, PYTHONHASHSEED="1") == run_child(source, PYTHONHASHSEED="2")


def test_order_of_names_does_not_count() -> None:
    """Names of levers, and levels, are the same in whatever order a set gives them."""
    names = ["checkpointing", "offload", "optimizer_impl", "precision"]
    assert _plain(set(names)) == sorted(names)
    levels = _plain({"checkpointing": {"off", "selective", "full"}})
    assert levels["checkpointing"] == sorted(levels["checkpointing"])


# -- not the same


@pytest.mark.parametrize(
    "changes",
    [
        {"model": Net(16), "sample": torch.ones(4, 16)},
        {"model": Net(times=3)},
        {"model": Net(activation=torch.sigmoid)},
        {"model": another_net()},
        {"model": Net().double(), "sample": torch.ones(4, 8).double()},
        {"model": Net().to(torch.bfloat16), "sample": torch.ones(4, 8).bfloat16()},
        {"model": frozen()},
        {"model": with_parts_in_eval()},
        {"model": with_larger_buffer()},
        {"model": nn.Sequential(Net())},
        {"sample": torch.ones(4, 3, 8)},
        {"sample": torch.ones(8, 8)},
        {"sample": torch.ones(4, 8).double(), "training_step": lambda model, batch: model(batch.float()).mean()},
        {"sample": lambda count: torch.ones(count, 8)},
        {"sample": pairs(40, 8), "training_step": lambda model, batch: model(batch[0]).mean()},
        {"optimizer": torch.optim.AdamW},
        {"optimizer": sgd(momentum=0.9)},
        {"optimizer": sgd(lr=0.2)},
        {"optimizer": sgd(foreach=True)},
        {"training_step": lambda model, batch: model(batch).mean()},
        {"device": "virtual:2MiB"},
        {"target_batch": 64},
        {"budget": "512KiB"},
        {"levers": "none"},
        {"levers": ["checkpointing"]},
        {"levers": {"checkpointing": ["full"]}},
        {"objective": "memory"},
        {"max_micro_batch": 7},
        {"multiple_of": 2},
        {"equal_micro_batches": True},
        {"seed": 1},
        {"world_size": 2},
    ],
    ids=lambda changes: ",".join(changes),
)
def test_what_changes_the_answer_is_another_search(changes: dict[str, Any]) -> None:
    """Structure, types, settings of modules, sample, optimizer, device and every number that decides count."""
    assert digest(fingerprint(**changes)) != digest(fingerprint())


def test_two_functions_of_one_name_are_two_losses() -> None:
    """A loss is told by what it does, since every lambda has the same name."""
    one = fingerprint(training_step=lambda model, batch: model(batch).mean())
    other = fingerprint(training_step=lambda model, batch: torch.cdist(model(batch), model(batch)).mean())
    assert one != other


def test_settings_of_a_loss_module_count() -> None:
    """Smoothed labels are another loss, and a module is another one than the function that it calls."""
    sample = torch.ones(4, 8), torch.ones(4, dtype=torch.int64)
    losses = nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.1)
    one, other = (fingerprint(nn.Linear(8, 4), sample, loss_fn=loss) for loss in losses)
    assert one != other
    assert one != fingerprint(nn.Linear(8, 4), sample, loss_fn=F.cross_entropy)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pairs(40, 8), pairs(40, 3, 8)),
        (pairs(40, 8), pairs(41, 8)),
        (lambda count: torch.ones(count, 8), lambda count: torch.ones(count, 500, 8)),
        ([{"x": torch.ones(3, 8)}] * 2, [{"x": torch.ones(9, 8)}] * 2),
    ],
    ids=["items", "length", "function", "list"],
)
def test_size_of_a_row_counts_for_every_kind_of_sample(one: Any, other: Any) -> None:
    """Longer sequences need more memory, whether they come from a batch, a data set or a function."""

    def step(model: nn.Module, batch: Any) -> Tensor:
        part = batch[0] if isinstance(batch, (list, tuple)) else batch
        return model(part["x"] if isinstance(part, dict) else part).mean()

    assert fingerprint(sample=one, training_step=step) != fingerprint(sample=other, training_step=step)


def test_settings_of_a_models_configuration_count() -> None:
    """A model whose configuration says how attention is computed needs other memory when that says something else."""

    class Configuration:
        def __init__(self, attention: str) -> None:
            self.attention = attention

    def configured(attention: str) -> nn.Module:
        model = Net()
        model.config = Configuration(attention)  # type: ignore[assignment]
        return model

    assert fingerprint(configured("eager")) != fingerprint(configured("sdpa"))
    assert fingerprint(configured("eager")) == fingerprint(configured("eager"))


# -- its form


def test_fingerprint_is_plain_text() -> None:
    """It is written into studies and files: names and texts, and nothing of the weights."""
    found = fingerprint()
    assert msgspec.json.decode(msgspec.json.encode(found), type=dict[str, str]) == found
    assert found["model_name"] == "Net" and "SGD" in str(fingerprint(optimizer=torch.optim.SGD)["optimizer"])
    assert all(len(value) < 1000 for value in found.values())


def test_digest_does_not_depend_on_the_order_of_names() -> None:
    """The same values under the same names have the same short name."""
    assert digest({"a": 1, "b": [2, "c"]}) == digest({"b": [2, "c"], "a": 1}) != digest({"a": 1, "b": [2, "d"]})


def test_making_a_fingerprint_leaves_no_trace() -> None:
    """Weights, generators and the caller's optimizer are as they were."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    weights, state, generator = model.layer.weight.clone(), optimizer.state_dict(), torch.get_rng_state()
    fingerprint(model, optimizer=optimizer)
    assert torch.equal(model.layer.weight, weights) and optimizer.state_dict() == state
    assert torch.equal(torch.get_rng_state(), generator)
