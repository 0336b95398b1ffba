"""One measurement: a tool's search, a training at one size, the true limit."""

from __future__ import annotations

import copy
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from side_by_side.caps import Cap, release
from side_by_side.cases import Case
from side_by_side.tools import STEPS, Setting, Tool, train
from side_by_side.watching import count, is_oom, state_of
from torch import nn

TRAINED_STEPS = 20


class _Tiny(nn.Module):
    """For the call before the one that counts, so that what a tool loads lies below the cap and outside the time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layer(inputs) - labels).pow(2).mean()}


_TINY = Case(
    name="tiny",
    build=_Tiny,
    row=lambda: {"inputs": torch.ones(4), "labels": torch.zeros(4)},
    optimizer=torch.optim.AdamW,
    room_bytes=64 * 2**20,
    target_batch=64,
    guess=64,
)


def search(case: Case, tool: Tool, cap: Cap) -> dict[str, Any]:
    """One search under the cap, with what it took and what it left."""
    setting = _setting(case, cap)
    try_on_tiny(tool, cap)  # here too: a copy of a process has its libraries' pages only when it uses them
    _warmed(case, setting.model, cap)
    counts = count(setting.model, case.optimizer)
    before = state_of(setting.model, setting.optimizer)
    found: dict[str, Any] = {}
    with cap.allows(case.room_bytes):
        began, used = time.perf_counter(), _processor_s()
        try:
            found["answer"] = tool.find(setting)
        except Exception as error:  # noqa: BLE001 - what it raises is what its user gets
            found["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        found["seconds"] = round(time.perf_counter() - began, 3)
        found["processor_s"] = round(_processor_s() - used, 3)
    changed = state_of(setting.model, setting.optimizer).changed_since(before)
    state = {"changed": changed, "rebuilds": tool.rebuilds}
    return {**found, **state, "passes": counts.passes, "ooms": counts.ooms}


def _processor_s() -> float:
    """Of this process and of those that it has started and ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def try_on_tiny(tool: Tool, cap: Cap) -> None:
    """Call the tool once on next to nothing, so that what it loads is loaded; what it says of that is of no interest."""
    if not tool.loads_late or tool.version() is None:
        return
    try:
        tool.find(_setting(_TINY, cap))
    except Exception as error:  # noqa: BLE001 - the call that counts will say the same
        print("on a tiny model:", repr(error), flush=True)


def _setting(case: Case, cap: Cap) -> Setting:
    model = case.model().to(cap.device)
    return Setting(
        case=case,
        model=model,
        optimizer=case.optimizer_of(model.parameters()),
        cap=cap,
        folder=tempfile.mkdtemp(),
    )


def _warmed(case: Case, model: nn.Module, cap: Cap) -> None:
    """One step of one row with a copy: what libraries take at their first use is held before the cap is set."""
    release(cap.device)
    other = copy.deepcopy(model)
    train(other, case.optimizer_of(other.parameters()), case.batch(2, cap.device), 1)


def steps_fit(case: Case, rows: int, micro_batches: int, cap: Cap) -> dict[str, Any]:
    """Whether a few optimizer steps of so many micro-batches run under the cap."""
    return _under_cap(case, cap, lambda setting: _accumulated(setting, rows, micro_batches))


def _accumulated(setting: Setting, rows: int, micro_batches: int) -> dict[str, Any]:
    batch = setting.batch(rows)
    for _ in range(STEPS):
        setting.optimizer.zero_grad()
        for _ in range(micro_batches):
            (setting.model(**batch)["loss"] / micro_batches).backward()
        setting.optimizer.step()
    return {}


def trains(case: Case, rows: int, accumulates: bool, cap: Cap) -> dict[str, Any]:
    """Whether the answer trains 20 optimizer steps under the cap, and how many samples each of them took.

    With a tool that accumulates: through its `Accumulator`, with windows of two micro-batches of this size, and a last
    window of the batch that is wanted. A window that runs out of memory is replayed in smaller micro-batches, which stay
    that small: how often that was is said too. Else: the plain loop, with this size as the batch.
    """

    def plainly(setting: Setting) -> dict[str, Any]:
        train(setting.model, setting.optimizer, setting.batch(rows), TRAINED_STEPS)
        return {"effective_batch": rows}

    return _under_cap(case, cap, (lambda setting: _exactly(setting, rows)) if accumulates else plainly)


def _exactly(setting: Setting, rows: int) -> dict[str, Any]:
    import autoaccum

    accumulator = autoaccum.Accumulator(setting.model, setting.optimizer, micro_batch=rows)
    steps = [accumulator.step(setting.batch(2 * rows)) for _ in range(TRAINED_STEPS)]
    assert all(sum(step.micro_batch_sizes) == 2 * rows for step in steps)
    whole = setting.case.mapped(setting.case.target_batch, setting.device)  # it may be larger than the room itself
    steps.append(accumulator.step(whole))
    return {"effective_batch": sum(steps[-1].micro_batch_sizes), "replays": sum(step.replays for step in steps)}


def _under_cap(case: Case, cap: Cap, job: Callable[[Setting], dict[str, Any]]) -> dict[str, Any]:
    setting = _setting(case, cap)
    _warmed(case, setting.model, cap)
    began = time.perf_counter()
    try:
        with cap.allows(case.room_bytes):
            said = job(setting)
    except (RuntimeError, MemoryError) as error:
        if not is_oom(error):
            raise
        return {"fits": False, "seconds": round(time.perf_counter() - began, 3)}
    return {"fits": True, **said, "seconds": round(time.perf_counter() - began, 3)}


def true_limit(guess: int, fits: Callable[[int], bool]) -> int:
    """The largest size that fits, by doubling steps away from the guess and bisection; both ends of the answer were run."""
    low, high, step = 0, None, max(1, guess // 16)
    size = guess
    while high is None or high - low > 1:
        if fits(size):
            low = size
        else:
            high = size
        if high is None:
            size, step = low + step, 2 * step
        elif not low:
            size, step = max(1, high - step), 2 * step
        else:
            size = (low + high) // 2
        if high == 1:
            return 0
    return low
