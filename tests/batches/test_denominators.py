"""What torch's losses divide by, measured against torch itself."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from autoaccum.batches.denominators import DENOMINATORS, DenominatorRow, denominator_of

# KLDivLoss says of its own default that it is no mean over rows.
pytestmark = pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss")

ROWS, CLASSES = 11, 3
SPLITS = [(7, 4), (1, 10), (5, 3, 2, 1), (11,)]
Module = type[nn.Module]


def drawn(*shape: int) -> Tensor:
    """The same numbers each time, in float64."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def labels(*shape: int, below: int = CLASSES) -> Tensor:
    """The same labels each time."""
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(7 + sum(shape)))


def signs(*shape: int) -> Tensor:
    """-1 and 1."""
    return labels(*shape, below=2).double() * 2 - 1


class Case(NamedTuple):
    """A loss of torch as a module and as a function, with an output and a target for it."""

    module: Module
    function: Callable[..., Tensor]
    output: Tensor
    target: Tensor


def multi_label_targets() -> Tensor:
    """Lists of labels that end with -1, as multilabel_margin_loss takes them."""
    target = torch.full((ROWS, CLASSES), -1)
    target[:, 0] = labels(ROWS)
    return target


CASES = [
    Case(nn.CrossEntropyLoss, F.cross_entropy, drawn(ROWS, CLASSES), labels(ROWS)),
    Case(nn.NLLLoss, F.nll_loss, drawn(ROWS, CLASSES), labels(ROWS)),
    Case(nn.MSELoss, F.mse_loss, drawn(ROWS, 4), drawn(ROWS, 4) * 2),
    Case(nn.L1Loss, F.l1_loss, drawn(ROWS, 4), drawn(ROWS, 4) * 2),
    Case(nn.SmoothL1Loss, F.smooth_l1_loss, drawn(ROWS, 4), drawn(ROWS, 4) * 2),
    Case(nn.HuberLoss, F.huber_loss, drawn(ROWS, 4), drawn(ROWS, 4) * 2),
    Case(nn.BCELoss, F.binary_cross_entropy, drawn(ROWS, 4).sigmoid(), labels(ROWS, 4, below=2).double()),
    Case(nn.BCEWithLogitsLoss, F.binary_cross_entropy_with_logits, drawn(ROWS, 4), labels(ROWS, 4, below=2).double()),
    Case(nn.PoissonNLLLoss, F.poisson_nll_loss, drawn(ROWS, 4), drawn(ROWS, 4).abs()),
    Case(nn.KLDivLoss, F.kl_div, drawn(ROWS, 4).log_softmax(1), drawn(ROWS, 4).softmax(1)),
    Case(nn.HingeEmbeddingLoss, F.hinge_embedding_loss, drawn(ROWS, 4), signs(ROWS, 4)),
    Case(nn.SoftMarginLoss, F.soft_margin_loss, drawn(ROWS, 4), signs(ROWS, 4)),
    Case(nn.MultiLabelMarginLoss, F.multilabel_margin_loss, drawn(ROWS, CLASSES), multi_label_targets()),
    Case(
        nn.MultiLabelSoftMarginLoss,
        F.multilabel_soft_margin_loss,
        drawn(ROWS, CLASSES),
        labels(ROWS, CLASSES, below=2).double(),
    ),
    Case(nn.MultiMarginLoss, F.multi_margin_loss, drawn(ROWS, CLASSES), labels(ROWS)),
]


def named(case: Case) -> str:
    """How a case is called in a test's name."""
    return case.module.__name__


def is_the_whole(loss_fn: Any, output: Tensor, target: Tensor, sizes: Sequence[int]) -> bool:
    """Whether the losses of the parts, weighed by what they are said to divide by, are the loss of the whole."""
    denominator = denominator_of(loss_fn)
    assert denominator is not None
    parts = list(zip(output.split(list(sizes)), target.split(list(sizes)), strict=True))
    whole = loss_fn(output, target)
    if denominator.summed:
        return torch.allclose(torch.stack([loss_fn(*part) for part in parts]).sum(), whole, rtol=1e-12, atol=0)
    weighed = [(denominator(of_part), loss_fn(out, of_part)) for out, of_part in parts]
    sums = [weight * loss for weight, loss in weighed if weight]  # a mean over nothing is NaN, and is left out
    return torch.allclose(torch.stack(sums).sum() / sum(weight for weight, _ in weighed), whole, rtol=1e-12, atol=0)


def test_every_row_is_measured_here() -> None:
    """The cases cover every row of the table, and each row pairs a module with the function of the same loss."""
    rows = [(row.forward, row.function) for row in DENOMINATORS]
    assert rows == [(case.module.forward, case.function) for case in CASES]


@pytest.mark.parametrize("row", DENOMINATORS, ids=lambda row: row.function.__name__)
def test_every_row_has_its_source(row: DenominatorRow) -> None:
    """Every row says where its denominator is written."""
    assert row.source and row.rule in ("classes", "elements", "rows")


@pytest.mark.parametrize("case", CASES, ids=named)
@pytest.mark.parametrize("sizes", SPLITS, ids=str)
def test_module(case: Case, sizes: Sequence[int]) -> None:
    """For any uneven split, the weighed mean of the parts' losses is the module's loss of the whole."""
    assert is_the_whole(case.module(), case.output, case.target, sizes)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_function(case: Case) -> None:
    """The function of the same loss has the same denominator."""
    assert is_the_whole(case.function, case.output, case.target, (7, 4))


@pytest.mark.parametrize("case", CASES, ids=named)
def test_partial_with_a_sum(case: Case) -> None:
    """A partial of the function with `reduction="sum"` is a sum, whose parts add up as they are."""
    loss_fn = functools.partial(case.function, reduction="sum")
    assert denominator_of(loss_fn).summed and is_the_whole(loss_fn, case.output, case.target, (7, 4))  # type: ignore[union-attr]


@pytest.mark.parametrize("case", CASES, ids=named)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_module_by_its_reduction(case: Case, reduction: str) -> None:
    """A module is a sum or a mean as its `reduction` says."""
    module = case.module(reduction=reduction)
    denominator = denominator_of(module)
    assert denominator is not None and denominator.summed == (reduction == "sum")
    assert is_the_whole(module, case.output, case.target, (7, 4))


@pytest.mark.parametrize("case", CASES, ids=named)
def test_without_reduction_there_is_no_denominator(case: Case) -> None:
    """A loss that is not reduced is no scalar, so nothing is said of it."""
    assert denominator_of(case.module(reduction="none")) is None
    assert denominator_of(functools.partial(case.function, reduction="none")) is None


def test_plain_weights_would_be_wrong() -> None:
    """Weighing by rows is not the loss of the whole where labels are ignored: this measurement can fail."""
    output, target = drawn(ROWS, CLASSES), labels(ROWS).index_fill(0, torch.tensor([1, 2, 3]), -100)
    parts = zip(output.split([7, 4]), target.split([7, 4]), strict=True)
    by_rows = sum(F.cross_entropy(*part) * len(part[1]) for part in parts) / ROWS
    assert not torch.allclose(torch.as_tensor(by_rows), F.cross_entropy(output, target), rtol=1e-3)


# -- classes

CLASS_WEIGHT = torch.tensor([0.1, 1.0, 7.0], dtype=torch.float64)
CLASS_LOSSES = [(nn.CrossEntropyLoss, F.cross_entropy), (nn.NLLLoss, F.nll_loss)]


def ignoring(target: Tensor, index: int = -100) -> Tensor:
    """The labels, with some of them ignored."""
    return target.clone().masked_fill_(torch.arange(target.numel()).reshape(target.shape) % 3 == 1, index)


@pytest.mark.parametrize("made", ["module", "partial"])
@pytest.mark.parametrize("ignore_index", [-100, 1, 255])
@pytest.mark.parametrize("weight", [None, CLASS_WEIGHT], ids=["even", "class weights"])
@pytest.mark.parametrize(("module", "function"), CLASS_LOSSES, ids=["cross_entropy", "nll_loss"])
def test_class_weights_and_ignored_labels(
    module: Any, function: Any, weight: Tensor | None, ignore_index: int, made: str
) -> None:
    """The denominator is the class weights of the labels that are not ignored, whichever label that is."""
    settings_of = {"weight": weight, "ignore_index": ignore_index}
    loss_fn = module(**settings_of) if made == "module" else functools.partial(function, **settings_of)
    target = ignoring(labels(ROWS), ignore_index)
    counts = target[target != ignore_index]
    assert denominator_of(loss_fn)(target) == pytest.approx(  # type: ignore[misc]
        float(len(counts) if weight is None else weight[counts].sum()), rel=1e-15
    )
    assert is_the_whole(loss_fn, drawn(ROWS, CLASSES), target, (7, 4))


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("weight", [None, CLASS_WEIGHT], ids=["even", "class weights"])
@pytest.mark.parametrize("shape", [(ROWS,), (ROWS, 5), (ROWS, 2, 3)], ids=str)
@pytest.mark.parametrize("ignored", [False, True], ids=["all count", "some ignored"])
def test_label_smoothing_and_more_dimensions(
    smoothing: float, weight: Tensor | None, shape: tuple[int, ...], ignored: bool
) -> None:
    """With label smoothing, class weights, ignored labels and targets of any number of dimensions, the whole is met."""
    loss_fn = nn.CrossEntropyLoss(weight=weight, label_smoothing=smoothing)
    target = ignoring(labels(*shape)) if ignored else labels(*shape)
    assert is_the_whole(loss_fn, drawn(ROWS, CLASSES, *shape[1:]), target, (5, 3, 2, 1))


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("weight", [None, CLASS_WEIGHT], ids=["even", "class weights"])
@pytest.mark.parametrize("shape", [(ROWS, CLASSES), (ROWS, CLASSES, 5)], ids=str)
def test_class_probabilities(smoothing: float, weight: Tensor | None, shape: tuple[int, ...]) -> None:
    """Targets that are class probabilities are a mean over their rows alone, whatever the class weights."""
    loss_fn = nn.CrossEntropyLoss(weight=weight, label_smoothing=smoothing)
    assert is_the_whole(loss_fn, drawn(*shape), drawn(*shape).softmax(1), (7, 4))


@given(
    target=st.lists(st.sampled_from([-100, 0, 1, 2]), min_size=2, max_size=12),
    weight=st.lists(st.floats(0.125, 8), min_size=3, max_size=3),
    data=st.data(),
)
@settings(max_examples=40)
def test_denominators_add_up(target: list[int], weight: list[float], data: st.DataObject) -> None:
    """Wherever a target is cut, the denominators of its parts add up to that of the whole."""
    denominator = denominator_of(nn.CrossEntropyLoss(weight=torch.tensor(weight)))
    cut, whole = data.draw(st.integers(0, len(target))), torch.tensor(target)
    assert denominator is not None
    assert denominator(whole[:cut]) + denominator(whole[cut:]) == pytest.approx(denominator(whole), rel=1e-12)


def test_all_ignored_is_zero() -> None:
    """Where every label is ignored the mean is over nothing."""
    for weight in (None, CLASS_WEIGHT):
        assert denominator_of(nn.CrossEntropyLoss(weight=weight))(torch.full((4,), -100)) == 0  # type: ignore[misc]


def test_class_weights_are_summed_in_double_precision() -> None:
    """Many float32 weights are summed without the error that a float32 sum has."""
    weight, target = torch.tensor([0.1, 0.3]), torch.tensor([0, 1]).repeat(50_001)
    exact = 50_001 * (float(weight[0]) + float(weight[1]))
    found = denominator_of(nn.CrossEntropyLoss(weight=weight))(target)  # type: ignore[misc]
    assert found == pytest.approx(exact, rel=1e-12)
    assert float(weight[target].sum()) != pytest.approx(exact, rel=1e-9)


def test_denominator_is_a_plain_float() -> None:
    """A denominator is a number and keeps no graph."""
    weight = CLASS_WEIGHT.clone().requires_grad_()
    for loss_fn in (functools.partial(F.cross_entropy, weight=weight), F.cross_entropy, nn.MSELoss()):
        assert type(denominator_of(loss_fn)(labels(4))) is float  # type: ignore[misc]


# -- weights that are none of the denominator

ELEMENT = torch.tensor([0.5, 2.0, 1.0, 4.0], dtype=torch.float64)


@pytest.mark.parametrize(
    "loss_fn",
    [
        nn.BCELoss(weight=ELEMENT),
        nn.BCEWithLogitsLoss(weight=ELEMENT, pos_weight=ELEMENT),
        functools.partial(F.binary_cross_entropy, weight=ELEMENT),
        functools.partial(F.binary_cross_entropy_with_logits, pos_weight=ELEMENT),
    ],
    ids=["BCELoss", "BCEWithLogitsLoss", "binary_cross_entropy", "pos_weight"],
)
def test_binary_weights_do_not_count(loss_fn: Any) -> None:
    """The weights of binary losses scale the terms and leave the denominator as it is."""
    assert is_the_whole(loss_fn, drawn(ROWS, 4).sigmoid(), labels(ROWS, 4, below=2).double(), (7, 4))


@pytest.mark.parametrize(
    ("loss_fn", "target"),
    [
        (nn.MultiMarginLoss(weight=CLASS_WEIGHT), labels(ROWS)),
        (nn.MultiLabelSoftMarginLoss(weight=CLASS_WEIGHT), labels(ROWS, CLASSES, below=2).double()),
    ],
    ids=["MultiMarginLoss", "MultiLabelSoftMarginLoss"],
)
def test_class_weights_of_margin_losses_do_not_count(loss_fn: Any, target: Tensor) -> None:
    """Margin losses with class weights are still a mean over their rows."""
    assert is_the_whole(loss_fn, drawn(ROWS, CLASSES), target, (7, 4))


@pytest.mark.parametrize("function", [F.mse_loss, F.l1_loss, F.huber_loss], ids=lambda function: function.__name__)
def test_elementwise_weight_is_not_recognised(function: Any) -> None:
    """A loss that divides by the sum of an elementwise weight is left to the user: that weight is not cut."""
    if "weight" not in inspect.signature(function).parameters:
        pytest.skip("this torch has no elementwise weight")
    assert denominator_of(functools.partial(function, weight=torch.ones(ROWS, 4))) is None
    assert denominator_of(functools.partial(function, weight=None)) is not None


# -- reductions and older names


def test_batchmean_divides_by_rows() -> None:
    """KL divergence with `batchmean` is a mean over rows, as a module and as a partial."""
    output, target = drawn(ROWS, 4).log_softmax(1), drawn(ROWS, 4).softmax(1)
    for loss_fn in (nn.KLDivLoss(reduction="batchmean"), functools.partial(F.kl_div, reduction="batchmean")):
        assert denominator_of(loss_fn)(target) == ROWS  # type: ignore[misc]
        assert is_the_whole(loss_fn, output, target, (7, 4))


@pytest.mark.parametrize("legacy", [{"size_average": False}, {"reduce": False}, {"size_average": True}, {"reduce": True}])
def test_older_names_in_a_partial_are_not_recognised(legacy: dict[str, bool]) -> None:
    """A partial with `size_average` or `reduce` overrules its `reduction`, so nothing is said of it."""
    assert denominator_of(functools.partial(F.cross_entropy, **legacy)) is None


@pytest.mark.parametrize(("size_average", "summed"), [(False, True), (True, False)])
def test_older_names_of_a_module_have_become_its_reduction(size_average: bool, summed: bool) -> None:
    """A module that was built with `size_average` has turned it into its reduction."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = nn.MSELoss(size_average=size_average)
    denominator = denominator_of(module)
    assert denominator is not None and denominator.summed == summed
    assert is_the_whole(module, drawn(ROWS, 4), drawn(ROWS, 4) * 2, (7, 4))


# -- what is believed


class WithOwnForward(nn.CrossEntropyLoss):
    """A loss of the user's own."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return super().forward(output, target) * 2


class WithTorchForward(nn.CrossEntropyLoss):
    """Torch's loss with other defaults."""

    def __init__(self) -> None:
        super().__init__(weight=CLASS_WEIGHT, ignore_index=1)


def test_subclass_with_torchs_forward_is_recognised() -> None:
    """A subclass that only has other settings is torch's loss."""
    assert is_the_whole(WithTorchForward(), drawn(ROWS, CLASSES), labels(ROWS), (7, 4))


def lambda_loss(output: Tensor, target: Tensor) -> Tensor:
    """A function of the user's own around one of torch's."""
    return F.cross_entropy(output, target)


@pytest.mark.parametrize(
    "loss_fn",
    [
        WithOwnForward(),
        lambda_loss,
        functools.partial(lambda_loss),
        functools.partial(F.cross_entropy, drawn(2, CLASSES)),
        functools.partial(nn.CrossEntropyLoss(), target=None),
        nn.CTCLoss(),
        nn.CosineEmbeddingLoss(),
        nn.GaussianNLLLoss(),
        nn.Linear(2, 2),
        F.softmax,
        nn.CrossEntropyLoss,
        None,
        "cross_entropy",
    ],
)
def test_anything_else_is_not_recognised(loss_fn: Any) -> None:
    """A loss of one's own, a partial with positions, other losses and other things have no known denominator."""
    assert denominator_of(loss_fn) is None


@pytest.mark.parametrize(
    "call", [lambda m: m.forward, lambda m: m.__call__, functools.partial], ids=["forward", "call", "partial"]
)
def test_call_of_a_module_is_the_module(call: Any) -> None:
    """A module's bound forward or call, and a partial without settings, divide by what the module divides by."""
    assert is_the_whole(call(nn.CrossEntropyLoss(weight=CLASS_WEIGHT)), drawn(ROWS, CLASSES), labels(ROWS), (7, 4))
    assert denominator_of(call(WithOwnForward())) is None


def test_partial_of_a_partial() -> None:
    """A partial of a partial is one partial with the settings of both."""
    loss_fn = functools.partial(functools.partial(F.cross_entropy, weight=CLASS_WEIGHT), ignore_index=1)
    assert is_the_whole(loss_fn, drawn(ROWS, CLASSES), labels(ROWS), (7, 4))


def test_compiled_loss_is_the_one_inside() -> None:
    """A loss that torch.compile has wrapped divides by what it divides by without."""
    weight = torch.tensor([0.5, 2.0])
    compiled = torch.compile(nn.CrossEntropyLoss(weight=weight), backend="eager")
    found = denominator_of(compiled)
    assert found is not None
    assert found(torch.tensor([0, 1, 1])) == 4.5
