"""TARGET texts -> workloads: the user's own functions, small built-in models, and the definitions of installed libraries.

    file.py:function  package.module:function     returns a Workload or (model, sample)
    demo:gpt  demo:resnet                         built in
    hf:llama?hidden_size=256&seq_len=128          a transformers config, random weights
    torchvision:resnet50?image=224                a torchvision definition, random weights

Nothing is ever downloaded.
"""

from __future__ import annotations

import inspect
import json
from contextlib import nullcontext
from typing import Any
from urllib.parse import parse_qsl

import torch

from autoaccum.errors import InvalidRequestError
from autoaccum.targets.demos import DEMOS
from autoaccum.targets.functions import workload_from_function
from autoaccum.targets.libraries import BAD_OPTION_ERRORS, hf_workload, torchvision_workload
from autoaccum.units import one_line, shown
from autoaccum.workload import Workload

_EXPECTED = (
    "expected file.py:function, package.module:function, demo:gpt, demo:resnet, hf:llama?hidden_size=256, or "
    "torchvision:resnet50?image=224"
)


def load_target(text: str, *, without_values: bool = False) -> Workload:
    """The workload that a TARGET text names.

    Args:
        without_values: Build what is built in on the meta device, where it takes no memory and can only be predicted.

    Raises:
        InvalidRequestError: When there is no such thing, or it does not return a workload.
        MissingExtraError: When the library it needs is not installed, with the pip command.
        Exception: Whatever the user's file or function raises.

    Example:
        >>> load_target("demo:gpt?layers=1&width=32").num_trainable > 1000
        True
    """
    scheme, _, rest = text.partition(":")
    if scheme in ("demo", "hf", "torchvision"):
        with torch.device("meta") if without_values else nullcontext():
            return _built_in(text, scheme, rest)
    location, colon, function = text.rpartition(":")
    if not colon or not location or not function:
        raise InvalidRequestError(f"target {shown(text, 200)} cannot be read; {_EXPECTED}.")
    return workload_from_function(location, function)


def _built_in(text: str, scheme: str, rest: str) -> Workload:
    name, _, query = rest.partition("?")
    match scheme:
        case "hf":
            return hf_workload(name, _options(query))
        case "torchvision":
            return torchvision_workload(name, _options(query))
    if name not in DEMOS:
        raise InvalidRequestError(f"target {shown(text, 200)} is not built in; expected demo:{' or demo:'.join(DEMOS)}.")
    return _built(text, DEMOS[name], _options(query))


def _built(text: str, build: Any, options: dict[str, Any]) -> Workload:
    known = list(inspect.signature(build).parameters)
    unknown = [name for name in options if name not in known]
    if unknown:
        raise InvalidRequestError(
            f"target {shown(text, 200)} cannot be built with these options: it has no {shown(unknown[0])}; "
            f"expected of {', '.join(known)}."
        )
    try:
        workload = build(**options)
    except BAD_OPTION_ERRORS as error:  # only this package has run, so whatever is said is about the options
        raise InvalidRequestError(
            f"target {shown(text, 200)} cannot be built with these options: {one_line(str(error), 400)}"
        ) from None
    assert isinstance(workload, Workload)
    return workload


def _options(query: str) -> dict[str, Any]:
    """`a=1&b=true&c=gelu` as numbers, truth values and texts."""
    return {key: _value(text) for key, text in parse_qsl(query, keep_blank_values=True)}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # no JSON, a whole number of more than 4300 digits, or nested without end
        return text
