"""The gradient of a window is the whole batch's, for every loss that is made up of its parts."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD

import autoaccum
from autoaccum import Accumulator, Window

EXACT = 1e-12


class Recording(SGD):
    """An optimizer that keeps the gradient of its last step, as one vector, and moves nothing."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.0)
        self.gradient: Tensor = torch.empty(0)

    def step(self, closure: Any = None) -> None:
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self.gradient = torch.cat([p.grad.detach().flatten().clone() for p in parameters if p.grad is not None])
        super().step(closure)


def accumulated(model: nn.Module, batch: Any, **options: Any) -> Tensor:
    """The gradient with which the optimizer steps after a window."""
    optimizer = Recording(model.parameters())
    Accumulator(model, optimizer, **options).step(batch)
    return optimizer.gradient


def gradient_of(loss: Tensor, model: nn.Module) -> Tensor:
    """What plain autograd gives for a loss."""
    parts = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return torch.cat([part.flatten() for part in parts if part is not None])


def relative(value: Tensor, reference: Tensor) -> float:
    """The size of the difference against the reference."""
    return float((value.double() - reference.double()).norm() / reference.double().norm())


def build_network(seed: int = 3) -> nn.Sequential:
    """Five inputs, three classes, float64, the same each time."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 3)).double()


def labelled(rows: int) -> tuple[Tensor, Tensor]:
    """Random inputs of five numbers with one of three classes."""
    generator = torch.Generator().manual_seed(rows)
    inputs = torch.randn(rows, 5, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(3, (rows,), generator=generator)


def mean_of_means(parts: Any, loss: Callable[[Any], Tensor], model: nn.Module) -> Tensor:
    """What a loop does that divides every micro-batch's loss by the number of micro-batches."""
    gradients = [gradient_of(loss(part), model) for part in parts]
    return torch.stack(gradients).mean(0)


# -- the smallest example: one weight, four targets

EVERY_SPLIT = [(4,), (3, 1), (1, 3), (2, 2), (2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 1, 1, 1)]


def half_square(output: Tensor, target: Tensor) -> Tensor:
    """A mean of squares, whose derivative is the mean distance."""
    return (output - target).pow(2).mean() / 2


def one_weight() -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    return model


def four_targets() -> tuple[Tensor, Tensor]:
    return torch.ones(4, 1), torch.tensor([[0.0], [0.0], [0.0], [8.0]])


@pytest.mark.parametrize("sizes", EVERY_SPLIT)
def test_every_split_takes_the_same_step(sizes: tuple[int, ...]) -> None:
    """Targets 0, 0, 0, 8 move a weight of 1 by a quarter to 1.25; 3 + 1 as a mean of means moves it to 1.75."""
    model = one_weight()
    inputs, targets = four_targets()
    acc = Accumulator(model, SGD(model.parameters(), lr=0.25), micro_batch=4, loss_fn=half_square)
    step = acc.step(Window(list(zip(inputs.split(sizes), targets.split(sizes), strict=True))))
    assert model.weight.item() == 1.25
    assert step.micro_batch_sizes == sizes
    assert step.weight == 4


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 4, 5])
def test_every_micro_batch_takes_the_same_step(micro_batch: int) -> None:
    """However large a micro-batch may be, targets 0, 0, 0, 8 move the weight to 1.25; a sum of means moves it to 2.5."""
    model = one_weight()
    acc = Accumulator(model, SGD(model.parameters(), lr=0.25), micro_batch=micro_batch, loss_fn=half_square)
    step = acc.step(four_targets())
    assert model.weight.item() == 1.25
    assert step.loss == pytest.approx((3 * 1 + 49) / 4 / 2)


def test_naive_mean_of_means_takes_another_step() -> None:
    """What the tests above would see: 3 + 1 gives a gradient of -3 where -1 is right, and 2 + 2 hides it."""
    model = one_weight()
    inputs, targets = four_targets()

    def naive(sizes: tuple[int, ...]) -> float:
        parts = list(zip(inputs.split(sizes), targets.split(sizes), strict=True))
        return mean_of_means(parts, lambda part: half_square(model(part[0]), part[1]), model).item()

    assert (naive((4,)), naive((3, 1)), naive((2, 2))) == (-1, -3, -1)


# -- means over tokens

IGNORED = -100


class Tagger(nn.Module):
    """Eleven tokens, a class for each position."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(ids))  # type: ignore[no-any-return]


def sentences(lengths: tuple[int, ...]) -> dict[str, Tensor]:
    """Sentences of six tokens, of which only the first `lengths` have a label."""
    ids = torch.randint(11, (len(lengths), 6), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    for row, length in enumerate(lengths):
        labels[row, length:] = IGNORED
    return {"ids": ids, "labels": labels}


def token_mean(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean over all labels that count."""
    return functional.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


@pytest.mark.parametrize("micro_batch", [1, 2, 3])
def test_token_means(micro_batch: int) -> None:
    """Sentences with 6, 1, 2 and 5 labels, weighted by their labels, have the gradient of the mean over all 14."""
    model, batch = Tagger().double(), sentences((6, 1, 2, 5))
    whole = gradient_of(token_mean(model, batch), model)
    options = {"training_step": token_mean, "weight": autoaccum.tokens("labels"), "micro_batch": micro_batch}
    assert relative(accumulated(model, batch, **options), whole) <= EXACT


def test_token_means_weighted_by_rows_are_wrong() -> None:
    """The same without `weight=` is off by more than a tenth, which is what the weight is for."""
    model, batch = Tagger().double(), sentences((6, 1, 2, 5))
    whole = gradient_of(token_mean(model, batch), model)
    assert relative(accumulated(model, batch, training_step=token_mean, micro_batch=1), whole) > 0.1


def test_ignored_labels_of_a_known_loss_need_no_weight() -> None:
    """Cross entropy of torch over positions is weighted by the labels that count, without being asked."""
    model, batch = Tagger().double(), sentences((6, 1, 2, 5))

    class ByPosition(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, ids: Tensor) -> Tensor:
            return self.inner(ids).transpose(1, 2)  # type: ignore[no-any-return]

    outer = ByPosition()
    whole = gradient_of(token_mean(model, batch), model)
    pair = (batch["ids"], batch["labels"])
    assert relative(accumulated(outer, pair, loss_fn=nn.CrossEntropyLoss(), micro_batch=1), whole) <= EXACT


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_micro_batch_without_labels_adds_nothing(micro_batch: int) -> None:
    """A micro-batch in which no label counts has a loss of 0 / 0, and neither the gradient nor the loss becomes NaN."""
    model, batch = Tagger().double(), sentences((6, 0, 2, 0, 0, 3))
    optimizer = Recording(model.parameters())
    acc = Accumulator(model, optimizer, training_step=token_mean, weight=autoaccum.tokens("labels"), micro_batch=micro_batch)
    loss = token_mean(model, batch)
    whole = gradient_of(loss, model)
    step = acc.step(batch)
    assert relative(optimizer.gradient, whole) <= EXACT
    assert step.loss == pytest.approx(loss.item(), rel=1e-12)
    assert step.weight == 11


def test_own_masked_mean_without_labels_adds_nothing() -> None:
    """A masked mean written by hand gives NaN gradients for such a micro-batch, even when they are multiplied by 0."""
    model, batch = Tagger().double(), sentences((6, 0, 2, 5))

    def masked_mean(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        mask = (batch["labels"] != IGNORED).double()
        losses = functional.cross_entropy(
            model(batch["ids"]).transpose(1, 2), batch["labels"].clamp(min=0), reduction="none"
        )
        return (losses * mask).sum() / mask.sum()

    alone = {name: part[1:2] for name, part in batch.items()}
    assert gradient_of(masked_mean(model, alone) * 0.0, model).isnan().any()
    whole = gradient_of(masked_mean(model, batch), model)
    options = {"training_step": masked_mean, "weight": autoaccum.tokens("labels"), "micro_batch": 1}
    assert relative(accumulated(model, batch, **options), whole) <= EXACT


# -- what torch's own losses divide by


@pytest.mark.parametrize(
    "loss_fn",
    [
        nn.CrossEntropyLoss(weight=torch.tensor([0.1, 1.0, 10.0]).double()),
        functools.partial(functional.cross_entropy, weight=torch.tensor([0.1, 1.0, 10.0]).double()),
        nn.CrossEntropyLoss(weight=torch.tensor([0.1, 1.0, 10.0]).double(), label_smoothing=0.2),
        nn.CrossEntropyLoss(label_smoothing=0.2, ignore_index=1),
        nn.CrossEntropyLoss(reduction="sum"),
        nn.NLLLoss(weight=torch.tensor([0.1, 1.0, 10.0]).double(), reduction="sum"),
    ],
    ids=["class-weights", "class-weights-partial", "weighted-smoothing", "smoothing-and-ignored", "sum", "weighted-sum"],
)
@pytest.mark.parametrize("micro_batch", [1, 2, 3])
def test_denominator_of_a_known_loss_is_found(loss_fn: Callable[[Tensor, Tensor], Tensor], micro_batch: int) -> None:
    """Class weights, label smoothing, ignored classes and sums come out exact without being asked for."""
    model, inputs = build_network(), labelled(8)[0]
    targets = torch.tensor([0, 0, 1, 0, 0, 1, 0, 2])
    whole = gradient_of(loss_fn(model(inputs), targets), model)
    assert relative(accumulated(model, (inputs, targets), loss_fn=loss_fn, micro_batch=micro_batch), whole) <= EXACT


def test_class_weights_as_a_mean_of_means_are_wrong() -> None:
    """Class weights 0.1, 1 and 10 in four pairs are off by more than 30 % when every pair counts the same."""
    model, inputs = build_network(), labelled(8)[0]
    targets, weight = torch.tensor([0, 0, 0, 0, 0, 1, 0, 2]), torch.tensor([0.1, 1.0, 10.0]).double()

    def loss(part: tuple[Tensor, Tensor]) -> Tensor:
        return functional.cross_entropy(model(part[0]), part[1], weight=weight)

    naive = mean_of_means(list(zip(inputs.split(2), targets.split(2), strict=True)), loss, model)
    assert relative(naive, gradient_of(loss((inputs, targets)), model)) > 0.3


def test_loss_of_a_summed_window_is_the_sum() -> None:
    """A loss that adds up is reported as the sum over the window, and its weight is the rows."""
    model, batch = build_network(), labelled(8)
    loss_fn = nn.CrossEntropyLoss(reduction="sum")
    step = Accumulator(model, SGD(model.parameters(), lr=0.0), loss_fn=loss_fn, micro_batch=3).step(batch)
    assert step.loss == pytest.approx(loss_fn(model(batch[0]), batch[1]).item(), rel=1e-12)
    assert step.weight == 8


def test_several_elements_for_each_row() -> None:
    """A mean over elements, as of a regression with many outputs, is weighted by them, so rows of any width are exact."""
    model, inputs = build_network(), labelled(7)[0]
    targets = torch.randn(7, 3, dtype=torch.float64)
    whole = gradient_of(functional.mse_loss(model(inputs), targets), model)
    assert relative(accumulated(model, (inputs, targets), loss_fn=nn.MSELoss(), micro_batch=3), whole) <= EXACT


# -- windows without any weight, and short ones


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_window_without_any_weight_takes_no_step(micro_batch: int) -> None:
    """Where no label of the whole window counts nothing moves: skipped, weight 0, and a loss of NaN."""
    model = Tagger().double()
    before = copy.deepcopy(model.state_dict())
    acc = Accumulator(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.1),
        training_step=token_mean,
        weight=autoaccum.tokens("labels"),
        micro_batch=micro_batch,
    )
    step = acc.step(sentences((0, 0, 0)))
    assert (step.skipped, step.weight) == (True, 0.0)
    assert step.loss != step.loss
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("batch", [None, [], (), {}, torch.empty(0, 5), (torch.empty(0, 5), torch.empty(0)), Window([])])
def test_nothing_is_a_window_without_a_step(batch: Any) -> None:
    """None, an empty container and no rows are windows that take no step, as a rank without data needs."""
    model = build_network()
    step = Accumulator(model, SGD(model.parameters(), lr=0.1), loss_fn=nn.CrossEntropyLoss(), micro_batch=2).step(batch)
    assert step.skipped
    assert step.micro_batch_sizes == ()


def unsized(batches: Any) -> Iterator[Any]:
    """An iterable whose length nobody can ask for."""
    yield from batches


@pytest.mark.parametrize("rows", [8, 9, 10, 16])
@pytest.mark.parametrize("ready", [False, True], ids=["whole-batches", "ready-micro-batches"])
def test_last_window_is_the_mean_over_its_own_rows(rows: int, ready: bool) -> None:
    """Windows of 8 rows: the short last one steps with the mean over what it has; divided by 4, ten rows end elsewhere."""
    torch.manual_seed(0)
    inputs, targets = torch.randn(rows, 3).double(), torch.randn(rows, 1).double()
    model = nn.Linear(3, 1).double()
    reference = copy.deepcopy(model)
    plain = SGD(reference.parameters(), lr=1.0)
    for x, y in zip(inputs.split(8), targets.split(8), strict=True):
        plain.zero_grad()
        functional.mse_loss(reference(x), y).backward()
        plain.step()
    acc = Accumulator(model, SGD(model.parameters(), lr=1.0), micro_batch=2, loss_fn=nn.MSELoss())
    size = 2 if ready else 8
    batches = unsized(zip(inputs.split(size), targets.split(size), strict=True))
    steps = [acc.step(batch) for batch in (acc.windows(batches, steps=4) if ready else batches)]
    assert torch.allclose(model.weight, reference.weight, rtol=1e-12, atol=1e-14)
    assert torch.allclose(model.bias, reference.bias, rtol=1e-12, atol=1e-14)
    assert [step.weight for step in steps] == [float(len(part)) for part in inputs.split(8)]


def test_short_windows_have_the_same_gradient() -> None:
    """Two passes over six micro-batches in windows of 4, 2, 4, 2 step with 1, 1, 1, 1; divided by 4 it is 1, 0.5, 1, 0.5."""
    model = nn.Linear(1, 1, bias=False).double()
    optimizer = Recording(model.parameters())
    acc = Accumulator(model, optimizer, micro_batch=2, training_step=lambda model, batch: model(batch).mean())
    seen = []
    for _ in range(2):
        for window in acc.windows(unsized(torch.ones(12, 1).double().split(2)), steps=4):
            acc.step(window)
            seen.append((len(window), optimizer.gradient.item()))
    assert seen == [(4, 1.0), (2, 1.0), (4, 1.0), (2, 1.0)]


# -- losses of more than one part


def test_penalty_on_the_weights_counts_once() -> None:
    """A term that does not depend on the rows counts once per window; summed over micro-batches it counts four times."""
    model, batch = build_network(), labelled(8)

    def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        penalty = sum(parameter.pow(2).sum() for parameter in model.parameters())
        return functional.cross_entropy(model(batch[0]), batch[1]) + 0.1 * penalty

    whole = gradient_of(step(model, batch), model)
    assert relative(accumulated(model, batch, training_step=step, micro_batch=2), whole) <= EXACT


def test_gradient_penalty_of_every_row() -> None:
    """A penalty on each row's own input gradient, which needs a graph of the graph, is exact."""
    model, inputs = build_network(), labelled(7)[0]

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        given = batch.detach().clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(given).sum(), given, create_graph=True)
        return (slope.norm(dim=1) - 1).pow(2).mean() + model(batch).pow(2).mean()

    whole = gradient_of(step(model, inputs), model)
    assert relative(accumulated(model, inputs, training_step=step, micro_batch=3), whole) <= EXACT


@pytest.mark.parametrize("layer", [nn.GroupNorm(1, 7), nn.GroupNorm(7, 7), nn.BatchNorm1d(7).eval()])
def test_normalising_within_rows_is_exact(layer: nn.Module) -> None:
    """GroupNorm and BatchNorm in eval mode see no other rows; BatchNorm in train mode is off by 40 % and more."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), copy.deepcopy(layer), nn.Linear(7, 3)).double()
    batch = labelled(8)
    whole = gradient_of(functional.cross_entropy(model(batch[0]), batch[1]), model)
    options = {"loss_fn": nn.CrossEntropyLoss(), "micro_batch": 2}
    assert relative(accumulated(model, batch, **options), whole) <= EXACT


def test_batch_norm_is_not_exact() -> None:
    """BatchNorm in train mode has another gradient in pairs of rows, which no loop repairs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)).double()
    batch = labelled(8)
    whole = gradient_of(functional.cross_entropy(model(batch[0]), batch[1]), model)
    assert relative(accumulated(model, batch, loss_fn=nn.CrossEntropyLoss(), micro_batch=2), whole) > 0.1


def test_loss_is_the_whole_batchs() -> None:
    """The loss of the result is the mean over the whole batch, however it was cut."""
    model, batch = build_network(), labelled(10)
    expected = functional.cross_entropy(model(batch[0]), batch[1]).item()
    acc = Accumulator(model, SGD(model.parameters(), lr=0.0), micro_batch=4, loss_fn=nn.CrossEntropyLoss())
    step = acc.step(batch)
    assert step.loss == pytest.approx(expected, rel=1e-12)
    assert (step.micro_batch_sizes, step.weight, step.replays, step.skipped) == ((4, 3, 3), 10.0, 0, False)
    assert step.grad_norm is None


# -- detection: lists of images of different sizes


class Detector(nn.Module):
    """Takes lists of images and of targets; returns a dict of losses, each a mean over images."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 5)

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        found = torch.stack([self.head(self.convolution(image[None]).mean((2, 3))[0]) for image in images])
        distances = [
            (boxes[:4] - target["boxes"].mean(0)).pow(2).mean() if len(target["boxes"]) else boxes.sum() * 0
            for boxes, target in zip(found, targets, strict=True)
        ]
        return {"boxes": torch.stack(distances).mean(), "scores": found[:, 4].pow(2).mean()}


def photographs(count: int) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Images of growing height with 0 to 2 boxes."""
    generator = torch.Generator().manual_seed(5)
    images = [torch.rand(3, 8 + 2 * index, 10, generator=generator).double() for index in range(count)]
    boxes = [torch.rand(index % 3, 4, generator=generator).double() for index in range(count)]
    return images, [{"boxes": box, "labels": torch.ones(len(box), dtype=torch.long)} for box in boxes]


@pytest.mark.parametrize(("micro_batch", "sizes"), [(4, (3, 3)), (2, (2, 2, 2)), (5, (3, 3)), (1, (1,) * 6)])
def test_lists_of_images_and_targets(micro_batch: int, sizes: tuple[int, ...]) -> None:
    """Lists are cut by image, targets stay with theirs, the dict of losses is summed: the gradient is that of all six."""
    model = Detector().double()
    images, targets = photographs(6)
    whole = gradient_of(sum(model(images, targets).values(), torch.zeros(())), model)
    optimizer = Recording(model.parameters())
    step = Accumulator(model, optimizer, micro_batch=micro_batch).step((images, targets))
    assert relative(optimizer.gradient, whole) <= EXACT
    assert step.micro_batch_sizes == sizes
    assert set(targets[0]) == {"boxes", "labels"}


# -- precision


@pytest.mark.parametrize("micro_batch", [1, 16, 100, 256])
def test_float32_is_as_good_as_the_whole_batch(micro_batch: int) -> None:
    """In float32 the gradient is within 2e-6 of the true one, and no worse than four times the whole batch's own error."""
    truth_model, batch = build_network(), labelled(256)
    truth = gradient_of(functional.cross_entropy(truth_model(batch[0]), batch[1]), truth_model)
    model = copy.deepcopy(truth_model).float()
    inputs = batch[0].float()
    own = relative(gradient_of(functional.cross_entropy(model(inputs), batch[1]), model), truth)
    found = accumulated(model, (inputs, batch[1]), loss_fn=nn.CrossEntropyLoss(), micro_batch=micro_batch)
    assert found.dtype == torch.float32
    assert relative(found, truth) <= min(2e-6, max(4 * own, 2e-7))


def test_bfloat16_does_not_drift() -> None:
    """With 256 micro-batches of bfloat16 the error stays that of one rounding; added up natively it is twice as large."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 4)).bfloat16()
    inputs, targets = torch.randn(256, 16).bfloat16(), torch.randint(4, (256,))
    # The parts of the sum are taken as bfloat16 gives them, so that only their addition is compared.
    parts = [
        gradient_of(functional.cross_entropy(model(x), y) / 256, model)
        for x, y in zip(inputs.split(1), targets.split(1), strict=True)
    ]
    truth = torch.stack([part.double() for part in parts]).sum(0)
    native = torch.zeros_like(parts[0])
    for part in parts:
        native += part
    one_rounding = relative(truth.bfloat16(), truth)
    found = accumulated(model, (inputs, targets), loss_fn=nn.CrossEntropyLoss(), micro_batch=1)
    assert found.dtype == torch.bfloat16
    assert relative(found, truth) <= 1.2 * one_rounding
    assert relative(native, truth) > 2 * one_rounding


@pytest.mark.parametrize("count", [1, 4, 16, 64, 256])
def test_bfloat16_error_is_flat(count: int) -> None:
    """From 1 to 256 micro-batches the error against float64 is at most 1.2 times that of a single one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8)).bfloat16()
    inputs, targets = torch.randn(256, 32).bfloat16(), torch.randint(8, (256,))
    exact = copy.deepcopy(model).double()
    truth = gradient_of(functional.cross_entropy(exact(inputs.double()), targets), exact)
    own = relative(gradient_of(functional.cross_entropy(model(inputs), targets), model), truth)
    found = accumulated(model, (inputs, targets), loss_fn=nn.CrossEntropyLoss(), micro_batch=256 // count)
    assert relative(found, truth) <= 1.2 * own


def test_bfloat16_does_not_stagnate() -> None:
    """512 equal contributions add up to 1; natively in bfloat16 they stop at a half, where a part is too small."""
    model = nn.Linear(1, 1, bias=False).bfloat16()
    ones = torch.ones(512, 1).bfloat16()
    natively = torch.zeros(1).bfloat16()
    for _ in range(512):
        natively += 1 / 512
    assert natively.item() == 0.5
    found = accumulated(model, ones, training_step=lambda model, batch: model(batch).mean(), micro_batch=1)
    assert found.item() == 1.0


@pytest.mark.parametrize("count", [512, 1024])
def test_bfloat16_loss_does_not_stagnate(count: int) -> None:
    """The loss of a window of equal bfloat16 losses of 1 is 1; added up natively it stops at a half and at a quarter."""
    model = nn.Linear(1, 1, bias=False).bfloat16()
    nn.init.ones_(model.weight)
    acc = Accumulator(model, SGD(model.parameters(), lr=0.0), micro_batch=1, training_step=lambda model, x: model(x).mean())
    assert acc.step(torch.ones(count, 1).bfloat16()).loss == 1.0


def test_low_precision_gradients_leave_no_mark() -> None:
    """After the window a bfloat16 parameter takes bfloat16 gradients again, and AdamW keeps its state in that."""
    model = nn.Linear(3, 1).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    acc = Accumulator(model, optimizer, training_step=lambda model, batch: model(batch).mean(), micro_batch=2)
    acc.step(torch.randn(6, 3).bfloat16())
    model(torch.randn(2, 3).bfloat16()).mean().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.dtype == torch.bfloat16
    assert optimizer.state[model.weight]["exp_avg"].dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("micro_batch", [1, 8])
def test_autocast_in_the_training_step(dtype: torch.dtype, micro_batch: int) -> None:
    """Under autocast parameters stay float32, and cutting adds nothing to the error that the precision has by itself."""
    truth_model, batch = build_network(), labelled(64)
    truth = gradient_of(functional.cross_entropy(truth_model(batch[0]), batch[1]), truth_model)
    model = copy.deepcopy(truth_model).float()
    data = (batch[0].float(), batch[1])

    def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return functional.cross_entropy(model(batch[0]), batch[1])

    own = relative(gradient_of(step(model, data), model), truth)
    found = accumulated(model, data, training_step=step, micro_batch=micro_batch)
    assert found.dtype == torch.float32
    assert own > 1e-6  # autocast was on
    assert relative(found, truth) <= 1.2 * own


# -- transformers, from tiny configurations


@pytest.fixture(scope="module")
def transformers() -> Any:
    """The library, where it is installed."""
    return pytest.importorskip("transformers", reason="transformers is not installed")


def tiny_gpt(transformers: Any) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=23, n_embd=8, n_layer=1, n_head=2, n_positions=8, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config).double()  # type: ignore[no-any-return]


def tiny_bert(transformers: Any) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=23,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=8,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(config).double()  # type: ignore[no-any-return]


def test_causal_language_model_of_transformers(transformers: Any) -> None:
    """With the shifted labels counted the gradient is the whole batch's; its loss is float32 inside, so to 2e-6.

    As a mean of means it is off by more than a tenth, and with the labels counted unshifted by more than a thousandth.
    """
    model = tiny_gpt(transformers)
    ids = torch.randint(23, (4, 6), generator=torch.Generator().manual_seed(2))
    labels = ids.clone()
    for row, length in enumerate((6, 2, 3, 5)):
        labels[row, length:] = IGNORED
    batch = {"input_ids": ids, "labels": labels}
    whole = gradient_of(model(**batch).loss, model)

    def error(weight: Any) -> float:
        return relative(accumulated(model, batch, weight=weight, micro_batch=1), whole)

    assert error(autoaccum.tokens("labels", shift=True)) <= 2e-6
    assert error("samples") > 0.1
    assert error(autoaccum.tokens("labels")) > 1e-3


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_sequence_classification_of_transformers(transformers: Any, micro_batch: int) -> None:
    """A head that knows nothing of accumulation has the whole batch's gradient, not four times that."""
    model = tiny_bert(transformers)
    generator = torch.Generator().manual_seed(2)
    batch = {
        "input_ids": torch.randint(23, (7, 5), generator=generator),
        "attention_mask": torch.ones(7, 5, dtype=torch.long),
        "labels": torch.randint(3, (7,), generator=generator),
    }
    whole = gradient_of(model(**batch).loss, model)
    assert relative(accumulated(model, batch, micro_batch=micro_batch), whole) <= EXACT


# -- packed sequences


class Last(nn.Module):
    """The last state of a GRU, which says one of three classes."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.out = nn.GRU(2, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, rows: Any) -> Tensor:
        out: Tensor = self.out(self.recurrent(rows)[1][0])
        return out


@pytest.mark.parametrize("enforce_sorted", [True, False])
def test_packed_sequences(enforce_sorted: bool) -> None:
    """Sequences of different length in one PackedSequence are cut with their labels, and the gradient is the whole one's."""
    torch.manual_seed(0)
    model, lengths = Last().double(), [9, 7, 6, 4, 3, 2, 1]
    sequences = [torch.randn(length, 2, dtype=torch.float64) for length in (lengths if enforce_sorted else lengths[::-1])]
    batch = (nn.utils.rnn.pack_sequence(sequences, enforce_sorted=enforce_sorted), torch.arange(7) % 3)
    whole = gradient_of(functional.cross_entropy(model(batch[0]), batch[1]), model)
    assert relative(accumulated(model, batch, micro_batch=3, loss_fn=functional.cross_entropy), whole) <= EXACT
