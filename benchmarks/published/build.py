"""Rebuilds a published training run: its model, its batches, its optimizer and its loop, to be run under any mode.

    python benchmarks/published/build.py cnn            # counts the parameters of every model of a family
    python benchmarks/published/build.py transformer

Decides nothing of memory. The loop keeps what the published one kept alive, and drops what it dropped, at the same places.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from cases import CNN_PARAMETERS, IMAGE_PIXELS, TEXT_MODELS, Case
from torch import nn
from torch.optim.lr_scheduler import StepLR

Batch = dict[str, torch.Tensor]
Mark = Callable[[str], None]

ITERATIONS = 4
LEARNING_RATE = 1e-3


def build_model(name: str) -> nn.Module:
    """A model in float32, built under whatever device or mode is active.

    Args:
        name: A key of `CNN_PARAMETERS`, or any call of `torchvision.models` as text with literal arguments; or a key of
            `TEXT_MODELS`.
    """
    return _text_model(name) if name in TEXT_MODELS else _torchvision_model(name)


def _torchvision_model(call: str) -> nn.Module:
    import torchvision

    tree = ast.parse(call, mode="eval").body
    assert isinstance(tree, ast.Call) and isinstance(tree.func, ast.Attribute), call
    arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in tree.keywords}
    with _shapes_only():
        model: nn.Module = getattr(torchvision.models, tree.func.attr)(**arguments)
    return model


@contextmanager
def _shapes_only() -> Iterator[None]:
    """While active, models can be built of tensors without values.

    RegNet computes its widths with real tensors; ConvNeXt's weights are not drawn again and again until they are in bounds.
    """
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torchvision.models.regnet import BlockParams

    computed = BlockParams.from_init_params

    def with_values(**keywords: Any) -> Any:
        with unset_fake_temporarily(), torch.device("cpu"):
            return computed(**keywords)

    with (
        mock.patch.object(BlockParams, "from_init_params", with_values),
        mock.patch.object(nn.init, "trunc_normal_", lambda tensor, *arguments, **keywords: tensor),
    ):
        yield


def _text_model(name: str) -> nn.Module:
    import transformers

    entry = TEXT_MODELS[name]
    config = getattr(transformers, entry.config)(**entry.dimensions)
    kind = "AutoModelForSeq2SeqLM" if config.is_encoder_decoder else "AutoModelForCausalLM"
    model: nn.Module = getattr(transformers, kind).from_config(config, torch_dtype=torch.float32)
    return model


def make_batch(case: Case, rows: int | None = None, tokens: int = 128) -> Batch:
    """A batch as the run's loader gave it, on whatever device is active.

    Args:
        case: The run.
        rows: Samples; the run's batch size by default.
        tokens: Length of the lines; of no meaning for images.

    Returns:
        inputs (rows, 3, 86, 86) float32 and labels (rows,) int64; or input_ids, attention_mask, labels (rows, tokens) int64.
    """
    rows = rows or case.batch_size
    if case.family == "cnn":
        return {
            "inputs": torch.empty(rows, 3, IMAGE_PIXELS, IMAGE_PIXELS),
            "labels": torch.zeros(rows, dtype=torch.int64),
        }
    return {name: torch.ones(rows, tokens, dtype=torch.int64) for name in ("input_ids", "attention_mask", "labels")}


def make_optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    """The run's optimizer. It works on lists of tensors, as torch does by default on CUDA (and, untold, not on the CPU)."""
    if case.optimizer == "Adafactor":
        return _adafactor(model)
    kind: type[torch.optim.Optimizer] = getattr(torch.optim, case.optimizer)
    return kind(model.parameters(), lr=LEARNING_RATE, foreach=True)  # type: ignore[call-arg]


def _adafactor(model: nn.Module) -> torch.optim.Optimizer:
    import transformers

    class ShapeOnlyAdafactor(transformers.Adafactor):  # type: ignore[misc, name-defined, unused-ignore]
        """Takes the larger of two numbers on the device: max() asks for a value, which fake tensors do not have."""

        @staticmethod
        def _get_lr(param_group: dict[str, Any], param_state: dict[str, Any]) -> torch.Tensor:
            return param_group["lr"] * param_state["RMS"].clamp(min=param_group["eps"][1])  # type: ignore[no-any-return]

    return ShapeOnlyAdafactor(model.parameters(), lr=LEARNING_RATE, relative_step=False)


def run_loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Callable[[], Batch]],
    *,
    family: str,
    zero_grad_mode: int,
    mark: Mark = lambda phase: None,
) -> None:
    """Train as the published loop did, one iteration a batch.

    Args:
        model: In training mode.
        optimizer: Over the model's parameters.
        batches: What moves each batch to the device; called after the batch before has been dropped.
        family: "cnn" or "transformer".
        zero_grad_mode: As `Case.zero_grad_mode`.
        mark: Called with "data", "forward", "backward" and "optimizer" as each begins.

    On fake tensors, transformers need `answered`.

    Leaves behind:
        Gradients, unless they are dropped after the step. The last output and loss die with this call.
    """
    loop = _cnn_loop if family == "cnn" else _transformer_loop
    loop(model, optimizer, batches, zero_grad_mode, mark)


def _cnn_loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Callable[[], Batch]],
    zero_grad_mode: int,
    mark: Mark,
) -> None:
    criterion = nn.CrossEntropyLoss()
    scheduler = StepLR(optimizer, step_size=7, gamma=0.1)
    for to_device in batches:
        inputs = labels = None
        mark("data")
        if zero_grad_mode == 0:
            optimizer.zero_grad()
        inputs, labels = to_device().values()
        mark("forward")
        outputs = model(inputs)
        loss_value = criterion(outputs, labels)
        if zero_grad_mode == 1:
            optimizer.zero_grad()
        mark("backward")
        loss_value.backward()
        mark("optimizer")
        optimizer.step()
        _, preds = torch.max(outputs, 1)  # noqa: RUF059 - both stay bound until the next iteration's
        if zero_grad_mode == 2:
            optimizer.zero_grad()
        scheduler.step()


def _transformer_loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Callable[[], Batch]],
    zero_grad_mode: int,
    mark: Mark,
) -> None:
    scheduler = StepLR(optimizer, step_size=7, gamma=0.1)
    for to_device in batches:
        batch = None
        mark("data")
        if zero_grad_mode == 0:
            optimizer.zero_grad()
        batch = to_device()
        mark("forward")
        outputs = model(**batch)
        if zero_grad_mode == 1:
            optimizer.zero_grad()
        loss = outputs.loss
        mark("backward")
        loss.backward()
        mark("optimizer")
        optimizer.step()
        if zero_grad_mode == 2:
            optimizer.zero_grad()
        scheduler.step()


@contextmanager
def answered(rows: int) -> Iterator[None]:
    """While active, a transformer's questions about values are answered as in the published runs: fake tensors have none.

    OPT draws a number on the host to decide whether it skips a layer (it never does). Attention asks whether any token is
    padding: lines of text differ in length, so yes, unless there is only one.

    Args:
        rows: Samples of each batch.
    """
    from transformers.modeling_attn_mask_utils import AttentionMaskConverter

    drawn = torch.rand

    def rand(*sizes: Any, **keywords: Any) -> torch.Tensor:
        return torch.tensor(0.5) if sizes == ([],) else drawn(*sizes, **keywords)

    with (
        mock.patch.object(torch, "rand", rand),
        mock.patch.object(AttentionMaskConverter, "_ignore_causal_mask_sdpa", lambda *arguments, **keywords: rows == 1),
    ):
        yield


def wrong_counts(family: str) -> list[str]:
    """What is wrong with the parameter counts of a family's models, a sentence each; empty where all is as published."""
    wanted = CNN_PARAMETERS if family == "cnn" else {name: entry.parameters for name, entry in TEXT_MODELS.items()}
    wrong = []
    for name, count in wanted.items():
        with torch.device("meta"):
            model = build_model(name)
        found = sum(parameter.numel() for parameter in model.parameters())
        kinds = {parameter.dtype for parameter in model.parameters()}
        print(f"{name:72} {found:15,}")
        if found != count or kinds != {torch.float32}:
            wrong.append(f"{name} has {found:,} parameters of {kinds}; published are {count:,} of float32.")
    return wrong


if __name__ == "__main__":
    sys.exit("\n".join(wrong_counts(sys.argv[1])) or 0)
