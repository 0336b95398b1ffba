"""Everything that has to be as before: model, optimizer, generators, modes, files, threads, signals."""

from __future__ import annotations

import copy
import gc
import random
import resource
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")


def training_state(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    """What training goes on from."""
    return copy.deepcopy(
        {
            "weights and buffers": dict(model.state_dict()),
            "optimizer": None if optimizer is None else optimizer.state_dict(),
            "torch generator": torch.get_rng_state(),
            "numpy generator": np.random.get_state(),
            "python generator": random.getstate(),
        }
    )


def surroundings(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    """What is around it: gradients, modes, hooks, and what the process holds."""
    parameters = list(model.parameters())
    groups = [] if optimizer is None else optimizer.param_groups
    return {
        "gradients": [None if p.grad is None else p.grad.clone() for p in parameters],
        "gradient objects": [id(p.grad) for p in parameters],
        "requires_grad": [p.requires_grad for p in parameters],
        "training modes": [part.training for part in model.modules()],
        "attributes": [sorted(vars(part)) for part in model.modules()],
        "hooks": [[len(getattr(part, name)) for name in _HOOKS] for part in model.modules()],
        "hooks of tensors": [len(p._backward_hooks or ()) + len(p._post_accumulate_grad_hooks or ()) for p in parameters],
        "optimizer groups": [{name: value for name, value in group.items() if name != "params"} for group in groups],
        "grad mode": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "default dtype": torch.get_default_dtype(),
        "threads of torch": torch.get_num_threads(),
        "frozen objects": gc.get_freeze_count() > 0,
        "garbage collection": gc.isenabled(),
        "signal handlers": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "limit of memory": resource.getrlimit(resource.RLIMIT_DATA),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "open files": len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").is_dir() else 0,
        "temporary files": sorted(Path(tempfile.gettempdir()).iterdir()),
        "folder": sorted(Path().iterdir()),
    }


def differences(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """The names of all that differs."""
    if isinstance(before, dict) and isinstance(after, dict) and before.keys() == after.keys():
        for key in before:
            yield from differences(before[key], after[key], f"{path} {key}".strip())
    elif isinstance(before, (list, tuple)) and type(before) is type(after) and len(before) == len(after):
        for index, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from differences(one, other, f"{path}[{index}]")
    elif isinstance(before, (Tensor, np.ndarray)) and isinstance(after, type(before)):
        if not (before.shape == after.shape and bool((before == after).all())):
            yield f"{path} differs"
    elif before != after:
        yield f"{path} differs"
