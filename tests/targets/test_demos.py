"""The built-in models: they take a training step at any size, and their options do what they say."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from autoaccum.targets import load_target
from autoaccum.targets.demos import DEMOS, Gpt
from autoaccum.workload import Workload

SMALL = {
    "gpt": "demo:gpt?layers=2&width=16&heads=2&vocabulary=32&seq_len=8",
    "resnet": "demo:resnet?image=8&width=4&blocks=1&classes=3",
}


def test_every_demo_is_tried_here() -> None:
    """No demo is left out of the tests below."""
    assert SMALL.keys() == DEMOS.keys()


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("rows", [2, 7])
def test_loss_and_gradients(name: str, rows: int) -> None:
    """One step gives a finite scalar loss at any number of rows, and every parameter gets a gradient."""
    workload = load_target(SMALL[name])
    loss = workload.loss(workload.source.take(rows))
    loss.backward()
    assert loss.shape == () and math.isfinite(loss.item())
    assert all(parameter.grad is not None for parameter in workload.module.parameters())


@pytest.mark.parametrize("name", SMALL)
def test_in_train_mode_without_a_word(name: str) -> None:
    """A demo is in train mode, and running it gives no warning to the user."""
    workload = load_target(SMALL[name])
    workload.loss(workload.source.take(2))
    assert workload.module.training and workload.warnings == []


def test_gpt_options() -> None:
    """The GPT's options set its vocabulary, positions, blocks and width."""
    workload = load_target("demo:gpt?layers=3&width=24&heads=2&vocabulary=40&seq_len=6")
    model = workload.module
    assert isinstance(model, Gpt)
    assert (len(model.blocks), model.blocks[0].heads, tuple(model.tokens.weight.shape)) == (3, 2, (40, 24))
    assert workload.source.take(5)["input_ids"].shape == (5, 6)


def test_resnet_options() -> None:
    """The ResNet's options set the image's side, the width, the blocks of each of three stages and the classes."""
    workload = load_target("demo:resnet?image=16&width=8&blocks=2&classes=5")
    images, labels = workload.source.take(3)
    assert images.shape == (3, 3, 16, 16) and labels.shape == (3,)
    assert workload.module(images).shape == (3, 5)
    convolutions = [layer for layer in workload.module.modules() if isinstance(layer, nn.Conv2d)]
    assert (len(convolutions), convolutions[0].out_channels, convolutions[-1].out_channels) == (1 + 3 * 2 * 3, 8, 32)


def test_gpt_head_is_tied() -> None:
    """The GPT's head and its token embedding are one parameter, which is counted once."""
    small, large = (load_target(f"demo:gpt?layers=1&width=8&heads=1&seq_len=4&vocabulary={v}") for v in (10, 11))
    assert large.num_trainable - small.num_trainable == 8


def test_gpt_sees_no_later_token() -> None:
    """The GPT is causal: changing the last token changes no logits before it."""
    model = load_target(SMALL["gpt"]).module
    logits: list[torch.Tensor] = []
    model.head.register_forward_hook(lambda layer, args, out: logits.append(out))
    ids = torch.randint(32, (2, 8))
    other = ids.clone()
    other[:, -1] = (other[:, -1] + 1) % 32
    model(ids, ids), model(other, ids)
    assert torch.equal(logits[0][:, :-1], logits[1][:, :-1])
    assert not torch.equal(logits[0][:, -1], logits[1][:, -1])


def test_gpt_weight_counts_the_labels_of_its_loss() -> None:
    """The GPT's micro-batches weigh as many tokens as its loss is a mean over."""
    workload = load_target(SMALL["gpt"])
    batch = workload.source.take(3)
    batch["labels"][0, :5] = -100
    assert isinstance(workload, Workload) and callable(workload.weight)
    assert workload.weight(batch) == 3 * 8 - 5
