"""Workloads from the model definitions of transformers and torchvision, with random weights. Nothing is downloaded."""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name that everyone in the field uses

from autoaccum.batches.weights import tokens
from autoaccum.errors import InvalidRequestError, MissingExtraError
from autoaccum.workload import Workload


def hf_workload(model_type: str, options: dict[str, Any]) -> Workload:
    """A transformers model from its config: causal language model, else masked, else sequence to sequence.

    Args:
        model_type: As transformers names it: "llama", "gpt2", "bert", "t5".
        options: `seq_len` (positions of the sample, 128 when not given); everything else goes to the config.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    transformers = _imported("transformers", "hf")
    seq_len = int(options.pop("seq_len", 128))
    try:
        config = transformers.AutoConfig.for_model(model_type, **options)
    except ValueError as error:
        raise InvalidRequestError(f"transformers has no model type {model_type!r}: {str(error)[:200]}") from None
    auto = next(
        (
            auto
            for auto in (
                transformers.AutoModelForCausalLM,
                transformers.AutoModelForMaskedLM,
                transformers.AutoModelForSeq2SeqLM,
            )
            if type(config) in auto._model_mapping
        ),
        None,
    )
    if auto is None:
        raise InvalidRequestError(
            f"hf:{model_type} is not a language model; write a function that returns (model, sample) and name it "
            "as file.py:function."
        )
    model = auto.from_config(config)
    model.train()
    ids = torch.randint(config.get_text_config().vocab_size, (4, seq_len))
    sample = {"input_ids": ids, "labels": ids.clone()}
    shifted = auto is transformers.AutoModelForCausalLM
    return Workload(model, sample, weight=tokens("labels", shift=shifted))


def torchvision_workload(name: str, options: dict[str, Any]) -> Workload:
    """A torchvision classification model by name.

    Args:
        name: As torchvision names it: "resnet50".
        options: `image` (side of the sample in pixels, 224 when not given); everything else goes to the builder.
    """
    torchvision = _imported("torchvision", "vision")
    image = int(options.pop("image", 224))
    try:
        model = torchvision.models.get_model(name, weights=None, **options)
    except (ValueError, TypeError) as error:
        raise InvalidRequestError(f"torchvision cannot build {name!r}: {str(error)[:200]}") from None
    model.train()
    with torch.no_grad():
        model.eval()
        classes = int(model(torch.zeros(1, 3, image, image)).shape[-1])
        model.train()
    sample = (torch.randn(4, 3, image, image), torch.randint(classes, (4,)))
    return Workload(model, sample, training_step=_classification_step)


def _classification_step(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    output = model(batch[0])
    logits = output if isinstance(output, torch.Tensor) else output[0]  # GoogLeNet and Inception return a named tuple
    return F.cross_entropy(logits, batch[1])


def _imported(name: str, extra: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError, AttributeError) as error:  # torchvision built for another torch raises all three
        raise MissingExtraError(
            f'{name} cannot be imported ({str(error)[:200]}). Install it: python -m pip install "autoaccum[{extra}]"'
        ) from None
