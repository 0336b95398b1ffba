"""Workloads from the model definitions of transformers and torchvision, with random weights. Nothing is downloaded."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable
from difflib import get_close_matches
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from autoaccum.batches.weights import tokens
from autoaccum.errors import InvalidRequestError, MissingExtraError
from autoaccum.targets.demos import MOST_LAYERS
from autoaccum.units import one_line, shown
from autoaccum.workload import Workload

# What code raises that was called with a value that it cannot use.
BAD_OPTION_ERRORS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError, AssertionError)


def hf_workload(model_type: str, options: dict[str, Any]) -> Workload:
    """A transformers language model from its config: what its type is trained as, causal, masked or sequence to sequence.

    Args:
        model_type: As transformers names it: "llama", "gpt2", "bert", "t5".
        options: `seq_len` (positions of the sample, 128 when not given); everything else goes to the config.

    Raises:
        InvalidRequestError: When there is no such type or option, or the values do not go together.
        MissingExtraError: When transformers is not installed.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    transformers = _imported("transformers", "hf")
    seq_len = options.pop("seq_len", 128)
    if not isinstance(seq_len, int) or seq_len < 1:
        raise InvalidRequestError(f"seq_len={shown(seq_len)} is not possible; expected a whole number >= 1.")
    try:
        _check_hf_names(transformers, model_type, options)
        config = transformers.AutoConfig.for_model(model_type, **options)
        if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = config.pad_token_id or 0  # T5's checkpoints set it, its bare config does not
        layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
        if isinstance(layers, int) and layers > MOST_LAYERS:
            raise InvalidRequestError(
                f"hf:{model_type} with {shown(layers)} layers would take hours to build; expected at most {MOST_LAYERS}."
            )
        auto = _language_model_class(transformers, config)
        model = None if auto is None else auto.from_config(config)
    except InvalidRequestError:
        raise
    except Exception as error:  # noqa: BLE001 - only the library has run, and its validators raise classes of their own
        raise InvalidRequestError(f"transformers cannot build hf:{model_type} so: {one_line(str(error), 400)}") from None
    if model is None:
        raise InvalidRequestError(
            f"hf:{model_type} is not a language model; write a function that returns (model, sample) and name it "
            "as file.py:function."
        )
    model.train()
    ids = torch.randint(config.get_text_config().vocab_size, (4, seq_len))
    sample = {"input_ids": ids, "labels": ids.clone()}
    shifted = auto is transformers.AutoModelForCausalLM
    return Workload(model, sample, weight=tokens("labels", shift=shifted))


def _check_hf_names(transformers: ModuleType, model_type: str, options: dict[str, Any]) -> None:
    """Refuse what a config would take without a word: a misspelt option leaves the default, perhaps of 7 billion weights."""
    if model_type not in transformers.CONFIG_MAPPING:
        raise InvalidRequestError(
            f"transformers has no model type {shown(model_type)}{_similar(model_type, transformers.CONFIG_MAPPING)}."
        )
    default = transformers.CONFIG_MAPPING[model_type]()
    for name in options:
        if not hasattr(default, name) and not hasattr(default, f"_{name}"):  # attn_implementation is kept as a private one
            raise InvalidRequestError(
                f"the config of hf:{model_type} has no option {shown(name)}{_similar(name, default.to_dict())}."
            )


def _similar(name: str, known: Iterable[str]) -> str:
    found = get_close_matches(name, list(known), 3)
    return f"; is it {' or '.join(found)}?" if found else ""


def _language_model_class(transformers: ModuleType, config: Any) -> Any:
    """The class that makes the config a language model, None where there is none.

    An encoder such as BERT can be built as a causal model as well, but is not trained as one.
    """
    causal, masked, to_sequence = (
        transformers.AutoModelForCausalLM,
        transformers.AutoModelForMaskedLM,
        transformers.AutoModelForSeq2SeqLM,
    )
    order = [masked, causal, to_sequence]
    if getattr(config, "is_encoder_decoder", False):
        order = [to_sequence]
    elif getattr(config, "is_decoder", False):
        order = [causal, masked, to_sequence]
    return next((auto for auto in order if type(config) in auto._model_mapping), None)


def torchvision_workload(name: str, options: dict[str, Any]) -> Workload:
    """A torchvision classification model by name.

    Args:
        name: As torchvision names it: "resnet50".
        options: `image` (side of the sample in pixels, 224 when not given); everything else goes to the builder.

    Raises:
        InvalidRequestError: When there is no such classification model, or it cannot be built so.
        MissingExtraError: When torchvision is not installed.
    """
    torchvision = _imported("torchvision", "vision")
    known = torchvision.models.list_models(module=torchvision.models)  # the others download a pretrained backbone
    if name not in known:
        raise InvalidRequestError(f"torchvision has no classification model {shown(name)}{_similar(name, known)}.")
    try:
        image = int(options.pop("image", 224))
        model = torchvision.models.get_model(name, weights=None, **options)
        model.eval()
        with torch.no_grad():
            classes = int(model(torch.zeros(1, 3, image, image)).shape[-1])
    except BAD_OPTION_ERRORS as error:  # only the library has run, so whatever it says is about the options
        raise InvalidRequestError(f"torchvision cannot build {shown(name)} so: {one_line(str(error), 400)}") from None
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
            f"{name} cannot be imported ({one_line(str(error), 200)}). "
            f'Install it: python -m pip install "autoaccum[{extra}]"'
        ) from None
