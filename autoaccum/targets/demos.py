"""Two small models to try the commands on: a GPT and a ResNet, built here, with random data."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoaccum.batches.weights import tokens
from autoaccum.errors import InvalidRequestError
from autoaccum.schedule import whole_number
from autoaccum.units import shown
from autoaccum.workload import Workload

MOST_LAYERS = 10_000  # ten times as many as the deepest models that are trained

# B rows, T positions, C channels, H heads, V vocabulary; images are B C Y X.


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention_in, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x_btc: Tensor) -> Tensor:
        """Residual attention, residual MLP."""
        batch, time, width = x_btc.shape
        split = (batch, time, 3, self.heads, width // self.heads)
        q, k, v = self.attention_in(self.norm_1(x_btc)).view(split).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_btc = x_btc + self.attention_out(attended.transpose(1, 2).reshape(batch, time, width))
        residual: Tensor = self.mlp(self.norm_2(x_btc))
        return x_btc + residual


class Gpt(nn.Module):
    """A decoder-only language model with a tied head."""

    def __init__(self, vocabulary: int, seq_len: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(seq_len, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        # torch's own start of an embedding, N(0, 1), makes logits so large that gradients are denormal numbers, which take
        # CPUs ten times as long; 0.02 is GPT-2's.
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Mean cross-entropy over the labels that are not -100."""
        x_btc = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            x_btc = block(x_btc)
        logits_btv = self.head(self.norm(x_btc))
        return {"loss": F.cross_entropy(logits_btv.flatten(0, 1), labels.flatten(), ignore_index=-100)}


class ResidualBlock(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(channels_out),
            nn.ReLU(),
            nn.Conv2d(channels_out, channels_out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(channels_out),
        )
        self.shortcut = nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)

    def forward(self, x_bcyx: Tensor) -> Tensor:
        """Residual, then ReLU."""
        return F.relu(self.body(x_bcyx) + self.shortcut(x_bcyx))


def gpt(vocabulary: int = 16384, seq_len: int = 128, layers: int = 2, width: int = 256, heads: int = 4) -> Workload:
    """A small GPT; batches are {"input_ids", "labels"} of (B, T)."""
    _check_sizes(vocabulary=vocabulary, seq_len=seq_len, layers=layers, width=width, heads=heads)
    if width % heads:
        raise InvalidRequestError(f"width={width} cannot be divided over heads={heads}; expected a multiple of heads.")
    ids = torch.randint(vocabulary, (8, seq_len))
    model = Gpt(vocabulary, seq_len, layers, width, heads)
    return Workload(model, {"input_ids": ids, "labels": ids.roll(-1, 1)}, weight=tokens("labels"))


def resnet(image: int = 32, width: int = 32, blocks: int = 2, classes: int = 10) -> Workload:
    """A small ResNet with BatchNorm; batches are (images (B, 3, image, image), classes (B,))."""
    _check_sizes(image=image, width=width, blocks=blocks, classes=classes)
    stages: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    channels = width
    for stage in range(3):
        for block in range(blocks):
            wider = width * 2**stage
            stages.append(ResidualBlock(channels, wider, 2 if stage and not block else 1))
            channels = wider
    model = nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))
    sample = (torch.randn(8, 3, image, image), torch.randint(classes, (8,)))
    return Workload(model, sample, loss_fn=F.cross_entropy)


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if whole_number(size, name, "a size of the model") > MOST_LAYERS and name in ("layers", "blocks"):
            raise InvalidRequestError(f"{name}={shown(size)} would take hours to build; expected at most {MOST_LAYERS}.")


DEMOS = {"gpt": gpt, "resnet": resnet}
