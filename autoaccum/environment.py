"""Where and on what a search ran."""

from __future__ import annotations

import platform
from importlib.metadata import version

import torch

from autoaccum.records import Environment
from autoaccum.workload import Workload


def environment_of(workload: Workload, *, device: str, device_name: str, world_size: int, driver: str = "") -> Environment:
    """The model, its optimizer and sample, the device as its caller names it, and the versions of what runs here.

    Args:
        device: What to ask for to get it, such as "cuda:0".
        device_name: What it is, in words.
        driver: Its version; empty where there is none.
    """
    return Environment(
        device=device,
        device_name=device_name,
        model=type(workload.module).__name__,
        optimizer=workload.optimizer_name,
        batch=workload.source.description,
        world_size=world_size,
        python_version=platform.python_version(),
        torch_version=str(torch.__version__),
        autoaccum_version=version("autoaccum"),
        platform=platform.platform(),
        driver=driver,
    )
