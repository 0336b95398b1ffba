"""Dropout off: of layers, of functions, and of layers that draw inside; and everything as it was afterwards."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from autoaccum.checking.dropout import without_dropout


class Function(nn.Module):
    """A layer around a function that draws."""

    def __init__(self, run: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.run = run

    def forward(self, values: Tensor) -> Tensor:
        return self.run(values)


class Recurrent(nn.Module):
    """The outputs of a recurrent layer with dropout between its two parts."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.inner = kind(8, 4, num_layers=2, dropout=0.6, batch_first=True)

    def forward(self, values: Tensor) -> Tensor:
        return self.inner(values)[0]  # type: ignore[no-any-return]


class Attending(nn.Module):
    """Attention with dropout on its weights."""

    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.inner, self.need_weights = nn.MultiheadAttention(8, 2, dropout=0.6, batch_first=True), need_weights

    def forward(self, values: Tensor) -> Tensor:
        return self.inner(values, values, values, need_weights=self.need_weights)[0]  # type: ignore[no-any-return]


def attention(values: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(values, values, values, dropout_p=0.6)


DRAWING: dict[str, nn.Module] = {
    "layer": nn.Dropout(0.6),
    "layer-1d": nn.Dropout1d(0.6),
    "alpha-layer": nn.AlphaDropout(0.6),
    "feature-alpha-layer": nn.FeatureAlphaDropout(0.6),
    "nested": nn.Sequential(nn.Identity(), nn.Sequential(nn.Dropout(0.6))),
    "function-positions": Function(lambda values: functional.dropout(values, 0.6, True)),
    "function-names": Function(lambda values: functional.dropout(values, p=0.6)),
    "function-default": Function(lambda values: functional.dropout(values)),
    "function-1d": Function(lambda values: functional.dropout1d(values, 0.6)),
    "function-alpha": Function(lambda values: functional.alpha_dropout(values, 0.6, True)),
    "function-feature-alpha": Function(lambda values: functional.feature_alpha_dropout(values, 0.6, True)),
    "torch-function": Function(lambda values: torch.dropout(values, 0.6, True)),
    "attention-names": Function(attention),
    "attention-positions": Function(
        lambda values: functional.scaled_dot_product_attention(values, values, values, None, 0.6)
    ),
    "lstm": Recurrent(nn.LSTM),
    "gru": Recurrent(nn.GRU),
    "multihead-attention": Attending(True),
    "fast-multihead-attention": Attending(False),
    "encoder-layer": nn.TransformerEncoderLayer(8, 2, 16, dropout=0.6, batch_first=True),
    "checkpointed": Function(lambda values: checkpoint(functional.dropout, values, 0.6, use_reentrant=False)),
}


def twice(module: nn.Module) -> tuple[Tensor, Tensor]:
    """Two runs one after the other."""
    values = torch.linspace(-1, 1, 3 * 5 * 8).reshape(3, 5, 8)
    return module(values), module(values)


@pytest.mark.parametrize("name", DRAWING)
def test_nothing_is_dropped_inside(name: str) -> None:
    """Two runs are the same inside and draw no number, and outside they differ, as before."""
    module = DRAWING[name].train()
    torch.manual_seed(0)
    with without_dropout(module):
        state = torch.get_rng_state()
        first, second = twice(module)
        assert torch.equal(first, second)
        if "attention" not in name and "encoder" not in name:
            assert torch.equal(torch.get_rng_state(), state)
    first, second = twice(module)
    assert not torch.equal(first, second)


def test_values_pass_unchanged() -> None:
    """What is not dropped is not scaled either."""
    values = torch.randn(4, 6)
    model = nn.Sequential(nn.Dropout(0.5), Function(lambda values: functional.dropout(values, 0.5)))
    with without_dropout(model):
        assert torch.equal(model(values), values)


def test_modes_stay() -> None:
    """Train mode stays on inside, because it chooses what detection models return and how BatchNorm works."""
    model = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(3)).train()
    with without_dropout(model):
        assert all(module.training for module in model.modules())


def test_numbers_are_back_after_an_error() -> None:
    """Every layer has its own number again, also when the inside raises."""
    model = nn.Sequential(nn.Dropout(0.1), nn.Dropout(0.2), nn.LSTM(3, 3, 2, dropout=0.3), nn.MultiheadAttention(4, 2, 0.4))
    with pytest.raises(ZeroDivisionError), without_dropout(model):
        raise ZeroDivisionError
    assert [model[0].p, model[1].p, model[2].dropout, model[3].dropout] == [0.1, 0.2, 0.3, 0.4]
    assert not torch.equal(functional.dropout(torch.ones(100)), torch.ones(100))


def test_other_functions_are_left_alone() -> None:
    """Noise that is no dropout stays: it is for the comparison to find."""
    with without_dropout(nn.Identity()):
        assert not torch.equal(torch.randn(5), torch.randn(5))
        assert float(functional.threshold(torch.ones(1), 0.5, 7.0)) == 1.0
