"""The models, batches and memory caps that every tool is given: small, from configurations or own modules, never downloaded.

All models are called as `model(**batch)` and return an object or mapping with a `loss`, as those of transformers do, so that
each tool can take them the way its documentation shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from math import ceil, log2
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

Batch = dict[str, Tensor]
_DATA_ROWS = 32768  # above every size that is tried: Lightning's binsearch does not end once it reaches the data's length
_CLASSES = 10
_WANTED = 8  # times what fits: a batch for which gradients have to be accumulated


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model under a memory cap.

    Attributes:
        room_bytes: How much more than after a first step at one row the process may take.
        target_batch: The batch that the user wants to train with, above what fits.
        guess: About how many rows fit; where the search of the true limit begins. It changes how long that takes, not what
            is found.
    """

    name: str
    build: Callable[[], nn.Module]
    row: Callable[[], Batch]
    optimizer: type[torch.optim.Optimizer]
    room_bytes: int
    target_batch: int
    guess: int

    def model(self) -> nn.Module:
        """The model, the same in every process."""
        torch.manual_seed(0)
        return self.build().train()

    def optimizer_of(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer, with a learning rate at which weights change and stay finite."""
        return self.optimizer(parameters, lr=1e-3)  # type: ignore[call-arg]

    def batch(self, rows: int, device: torch.device | str = "cpu") -> Batch:
        """So many equal rows."""
        return {name: value.to(device).expand(rows, *value.shape).clone() for name, value in self.row().items()}

    def mapped(self, rows: int, device: torch.device | str = "cpu") -> Batch:
        """So many equal rows that take no memory, as rows of a memory-mapped file take none of the process's own."""
        return {name: value.to(device).expand(rows, *value.shape) for name, value in self.row().items()}

    def data(self) -> Dataset[Batch]:
        """Rows one by one, for tools that take a data set."""
        return _Rows(self.row())


class _Rows(Dataset[Batch]):
    def __init__(self, row: Batch) -> None:
        self.row = row

    def __len__(self) -> int:
        return _DATA_ROWS

    def __getitem__(self, index: int) -> Batch:
        return self.row


class Lstm(nn.Module):
    """Two layers of LSTM and a classifier at the last position."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, _CLASSES)

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Inputs are (B, T, 16)."""
        return _output(self.head(self.lstm(inputs)[0][:, -1]), labels)


class UNet(nn.Module):
    """Two levels down and up with skip connections; every pixel is classified."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down1, self.down2 = _convolutions(3, width), _convolutions(width, 2 * width)
        self.middle = _convolutions(2 * width, 4 * width)
        self.up2, self.up1 = _convolutions(6 * width, 2 * width), _convolutions(3 * width, width)
        self.head = nn.Conv2d(width, _CLASSES, 1)

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Inputs are (B, 3, H, W), labels (B, H, W)."""
        first = self.down1(inputs)
        second = self.down2(F.max_pool2d(first, 2))
        lowest = self.middle(F.max_pool2d(second, 2))
        second = self.up2(torch.cat([second, F.interpolate(lowest, scale_factor=2.0)], 1))
        first = self.up1(torch.cat([first, F.interpolate(second, scale_factor=2.0)], 1))
        return _output(self.head(first), labels)


def _output(logits: Tensor, labels: Tensor | None) -> dict[str, Tensor]:
    return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


def _convolutions(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before in (inputs, outputs):
        layers += [nn.Conv2d(before, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.ReLU()]
    return nn.Sequential(*layers)


def _gpt(layers: int, width: int, length: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=_VOCABULARY, n_positions=length, n_embd=width, n_layer=layers, n_head=4, use_cache=False)
    return GPT2LMHeadModel(config)


def _bert(layers: int, width: int, length: int) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(max_position_embeddings=length, **_transformer(layers, width)))


def _llama(layers: int, width: int, length: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = _transformer(layers, width)
    return LlamaForCausalLM(LlamaConfig(max_position_embeddings=length, num_key_value_heads=2, use_cache=False, **sizes))


def _vit(layers: int, width: int, image: int) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = _transformer(layers, width)
    return ViTForImageClassification(ViTConfig(image_size=image, patch_size=4, num_labels=_CLASSES, **sizes))


def _resnet(width: int) -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=width, hidden_sizes=[width, 2 * width], depths=[1, 1], layer_type="basic", num_labels=_CLASSES
    )
    return ResNetForImageClassification(config)


_VOCABULARY = 512


def _transformer(layers: int, width: int) -> dict[str, Any]:
    return {
        "vocab_size": _VOCABULARY,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "intermediate_size": 4 * width,
    }


def _text(length: int) -> Batch:
    ids = torch.arange(length) % _VOCABULARY
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def _image(pixels: int) -> Batch:
    return {"pixel_values": torch.linspace(-1, 1, 3 * pixels * pixels).view(3, pixels, pixels), "labels": torch.tensor(1)}


def _pixels(pixels: int) -> Batch:
    image = torch.linspace(-1, 1, 3 * pixels * pixels).view(3, pixels, pixels)
    return {"inputs": image, "labels": torch.ones(pixels, pixels, dtype=torch.long)}


def _series(length: int) -> Batch:
    return {"inputs": torch.linspace(-1, 1, 16 * length).view(length, 16), "labels": torch.tensor(1)}


_ADAMW, _SGD = torch.optim.AdamW, torch.optim.SGD


def _case(
    name: str,
    build: Callable[[], nn.Module],
    row: Callable[[], Batch],
    optimizer: type[torch.optim.Optimizer],
    room_mib: int,
    guess: int,
) -> tuple[str, Case]:
    room_bytes = room_mib * 2**20
    target_batch = 2 ** ceil(log2(_WANTED * guess))
    return name, Case(
        name=name,
        build=build,
        row=row,
        optimizer=optimizer,
        room_bytes=room_bytes,
        target_batch=target_batch,
        guess=guess,
    )


CASES: dict[str, Case] = dict(
    [
        _case("gpt-long-adamw", partial(_gpt, 2, 64, 512), partial(_text, 512), _ADAMW, 150, 3),
        _case("gpt-adamw", partial(_gpt, 2, 64, 64), partial(_text, 64), _ADAMW, 150, 82),
        _case("gpt-sgd", partial(_gpt, 2, 64, 64), partial(_text, 64), _SGD, 100, 57),
        _case("bert-adamw", partial(_bert, 2, 64, 64), partial(_text, 64), _ADAMW, 100, 70),
        _case("bert-sgd", partial(_bert, 2, 64, 32), partial(_text, 32), _SGD, 120, 190),
        _case("llama-adamw", partial(_llama, 2, 64, 128), partial(_text, 128), _ADAMW, 100, 40),
        _case("llama-sgd", partial(_llama, 2, 64, 64), partial(_text, 64), _SGD, 60, 48),
        _case("vit-adamw", partial(_vit, 2, 64, 32), partial(_image, 32), _ADAMW, 100, 160),
        _case("vit-sgd", partial(_vit, 2, 64, 16), partial(_image, 16), _SGD, 80, 500),
        _case("resnet-adamw", partial(_resnet, 16), partial(_image, 64), _ADAMW, 50, 140),
        _case("resnet-sgd", partial(_resnet, 16), partial(_image, 32), _SGD, 60, 600),
        _case("lstm-adamw", partial(Lstm, 256), partial(_series, 16), _ADAMW, 140, 390),
        _case("lstm-sgd", Lstm, partial(_series, 8), _SGD, 165, 1950),
        _case("unet-adamw", UNet, partial(_pixels, 128), _ADAMW, 120, 5),
        _case("unet-sgd", UNet, partial(_pixels, 64), _SGD, 30, 23),
    ]
)
SMALL = ("gpt-long-adamw", "llama-sgd")
