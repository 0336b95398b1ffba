"""How to put back what belongs to the process: random generators, and the modes that a training step may change."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch

from autoaccum.preserve.restoring import Restore


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Put the generators of python, numpy and torch back: looking at a data set may draw from them."""
    put_back = keep_random_states(torch.device("cpu"))
    try:
        yield
    finally:
        for restore in put_back:
            restore()


def keep_random_states(device: torch.device) -> list[Restore]:
    """How to put the generators of python, numpy, torch and the device back as they are now."""
    python_state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    restores: list[Restore] = [
        lambda: random.setstate(python_state),
        lambda: np.random.set_state(numpy_state),
        lambda: torch.set_rng_state(torch_state),
    ]
    if device.type != "cpu":
        generators = torch.get_device_module(device)
        device_state = generators.get_rng_state(device)
        restores.append(lambda: generators.set_rng_state(device_state, device))
    return restores


class _Setting(NamedTuple):
    get: Callable[[], Any]
    set: Callable[[Any], Any]


def keep_settings(device_type: str) -> list[Restore]:
    """How to put process-wide and thread-wide modes that a training step may change back as they are now."""
    return [_keep_setting(*setting) for setting in _settings(device_type)]


def _settings(device_type: str) -> list[_Setting]:
    found = [
        _Setting(torch.is_grad_enabled, torch.set_grad_enabled),
        _Setting(torch.get_default_dtype, torch.set_default_dtype),
        _Setting(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
        _Setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        _Setting(torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
        _Setting(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
        _Setting(torch.get_num_threads, torch.set_num_threads),
    ]
    for kind in {"cpu", device_type}:
        found.append(_Setting(partial(torch.is_autocast_enabled, kind), partial(torch.set_autocast_enabled, kind)))
        found.append(_Setting(partial(torch.get_autocast_dtype, kind), partial(torch.set_autocast_dtype, kind)))
    for name in ("enabled", "benchmark", "deterministic", "allow_tf32"):
        found.append(_attribute_setting(torch.backends.cudnn, name))
    if hasattr(torch.backends, "fp32_precision"):  # since torch 2.9; after the old names, which set some of these
        places = [attrgetter(place)(torch.backends) for place in _PRECISION_PLACES]
        found += [_attribute_setting(place, "fp32_precision") for place in (torch.backends, *places)]
    return found


# Outer ones first: the inner ones follow them. `mkldnn` itself is left out, its setter sets all of them (torch 2.13).
_PRECISION_PLACES = ("cudnn", "cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")


def _attribute_setting(owner: object, name: str) -> _Setting:
    return _Setting(partial(getattr, owner, name), partial(setattr, owner, name))


_UNREADABLE = object()


def _keep_setting(get: Callable[[], Any], set_: Callable[[Any], Any]) -> Restore:
    before = _read(get)

    def put_back() -> None:
        if before is not _UNREADABLE and _read(get) != before:
            set_(before)

    return put_back


def _read(get: Callable[[], Any]) -> Any:
    try:
        return get()
    except RuntimeError:  # torch does not tell a precision by its old name once it was set by its new one
        return _UNREADABLE
