"""What a budget is in bytes, checked against what the device has and what is held already."""

from __future__ import annotations

from autoaccum.devices.base import AbstractDevice
from autoaccum.errors import InvalidRequestError
from autoaccum.records import Budget
from autoaccum.units import Share, format_bytes, parse_size, shown
from autoaccum.workload import Workload, num_bytes


def counting_device(asked: object, device: AbstractDevice) -> AbstractDevice:
    """The device as this budget counts it: where no bytes are named, a limit of this process's own is its total."""
    names_bytes = asked is not None and not isinstance(parse_size(asked), Share)
    return device if names_bytes else device.as_limited()


def resolved_budget(asked: object, device: AbstractDevice, workload: Workload, warnings: list[str]) -> Budget:
    """The budget in bytes, checked against what the device has and what is held already."""
    total, free, held = device.total_bytes(), device.free_bytes(), device.held_bytes(workload.resident())
    if asked is None and held > total:
        raise InvalidRequestError(
            f"{device.name} has {format_bytes(total)}, less than this process already holds there: {format_bytes(held)}. "
            f"{weights_in_words(workload)} Use a larger device or a smaller model."
        )
    if asked is None:
        return Budget(
            budget_bytes=max(held, min(total, held + free) - device.reserve_bytes()), held_bytes=held, total_bytes=total
        )
    size = parse_size(asked)
    budget = int(total * size.frac) if isinstance(size, Share) else size
    if budget > total:
        raise InvalidRequestError(
            f"budget={shown(asked)} is larger than {device.name}, which has {format_bytes(total)} for this process; "
            'lower it, or use device="virtual:..." to try a size that is not here.'
        )
    if budget < held:
        raise InvalidRequestError(
            f"budget={shown(asked)} ({format_bytes(budget)}) is less than this process already holds on {device.name}: "
            f"{format_bytes(held)}. {weights_in_words(workload)}{_rest_in_words(workload, held, device)}"
        )
    if budget > held + free:
        reason = device.limit_in_words() and f"this process is {device.limit_in_words()}"
        if not reason:
            others = ", ".join(f"{h.name} (pid {h.pid}) {format_bytes(h.held_bytes)}" for h in device.holders()[:3])
            reason = others and f"other processes hold memory: {others}"
        warnings.append(
            f"The budget is {format_bytes(budget)}, but only {format_bytes(held + free)} can be had on {device.name} now"
            + (f"; {reason}." if reason else ".")
        )
    return Budget(budget_bytes=budget, held_bytes=held, total_bytes=total)


def weights_in_words(workload: Workload) -> str:
    """What the model itself takes, as a sentence."""
    account = workload.account()
    weights = account.trainable_bytes + account.frozen_bytes + account.buffer_bytes
    return f"The model's weights and buffers take {format_bytes(weights)}."


def _rest_in_words(workload: Workload, held_bytes: int, device: AbstractDevice) -> str:
    rest = held_bytes - num_bytes(workload.resident())
    if rest <= 0:
        return ""
    holder = (
        "the interpreter, its libraries and everything else that is loaded" if device.is_host else "the context and cache"
    )
    return f" The other {format_bytes(rest)} are {holder}."
