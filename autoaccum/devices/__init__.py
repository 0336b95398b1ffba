"""Where memory is read, capped and released, and what running out of it looks like."""

from __future__ import annotations

import torch

from autoaccum.devices.accelerator import ACCELERATOR_ROWS, MpsDevice, XpuDevice
from autoaccum.devices.base import COMMON_ROWS, AbstractDevice
from autoaccum.devices.cpu import CPU_ROWS, CpuDevice
from autoaccum.devices.cuda import CUDA_ROWS, CudaDevice
from autoaccum.devices.virtual import VirtualDevice
from autoaccum.errors import InvalidRequestError
from autoaccum.units import one_line, shown

# One table for all devices: a CPU run can call a CUDA library, and an error is passed on from other machines.
ERROR_ROWS = (*CUDA_ROWS, *ACCELERATOR_ROWS, *CPU_ROWS, *COMMON_ROWS)


def device_for(request: object, model_device: torch.device) -> AbstractDevice:
    """The device that a request names.

    Args:
        request: None for the model's, text ("cpu", "cuda:1", "virtual:8GiB"), a `torch.device` or an autoaccum device.
        model_device: Where the model's parameters are.

    Raises:
        InvalidRequestError: When there is no such device, or the model is on another one.
    """
    if isinstance(request, AbstractDevice):
        device = request
    elif isinstance(request, str) and request.startswith("virtual:"):
        device = VirtualDevice(request.removeprefix("virtual:"))
    else:
        device = _physical(model_device if request is None else _parsed(request))
    wanted = device.torch_device
    if wanted.type != model_device.type or (wanted.index or 0) != (model_device.index or 0):
        raise InvalidRequestError(
            f"device={device.name} but the model is on {model_device}; expected both in one place. "
            f"Move the model first: model.to({shown(str(wanted))})."
        )
    return device


def _parsed(request: object) -> torch.device:
    try:
        device = torch.device(request)  # type: ignore[call-overload]
    except (RuntimeError, TypeError) as error:
        raise InvalidRequestError(
            f"device={shown(request)} is not a device ({one_line(str(error), 200)}); "
            'expected "cpu", "cuda:0", "xpu:0", "mps" or "virtual:8GiB".'
        ) from None
    needs_index = device.index is None and device.type in ("cuda", "xpu")
    return torch.device(device.type, 0) if needs_index else device


def _physical(device: torch.device) -> AbstractDevice:
    match device.type:
        case "cpu":
            return CpuDevice()
        case "cuda" if torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count():
            return CudaDevice(device.index or 0)
        case "xpu" if torch.xpu.is_available():
            return XpuDevice(device.index or 0)
        case "mps" if torch.backends.mps.is_available():
            return MpsDevice()
    raise InvalidRequestError(
        f"device {device} is not available in this process; "
        'expected a device that torch can use here, or "virtual:8GiB" to try a size.'
    )
