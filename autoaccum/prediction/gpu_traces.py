"""Traces of one workload on GPUs that are not here: on fake tensors, or else on real ones at small sizes.

Knows nothing of what was asked for, nor of what fits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar, final

import psutil
import torch
from torch import nn

from autoaccum.errors import InvalidRequestError
from autoaccum.prediction.allocator import Replay, replay
from autoaccum.prediction.apart import ProcessDiedError, apart, can_run_apart
from autoaccum.prediction.corrections import as_on, kernel_choices
from autoaccum.prediction.fake_tensors import fake_trace, is_refusal, load_fake_tensors
from autoaccum.prediction.forecast import reason_of
from autoaccum.prediction.gpus import Gpu
from autoaccum.prediction.growth import Growth, NotAffineError, growth_of
from autoaccum.prediction.recording import record_windows
from autoaccum.prediction.trace import Trace
from autoaccum.preserve import Snapshot, preserved
from autoaccum.records import AS_IT_IS, Levers
from autoaccum.units import format_bytes
from autoaccum.workload import Workload, num_bytes

T = TypeVar("T")

CUDA = torch.device("cuda")
_ROOM_TO_RUN = 6  # weights, gradients, two optimizer states and a copy of the weights to put back, and some activations


class Played(NamedTuple):
    """The allocations of a size, and what the caching allocator makes of them."""

    growth: Growth
    replay: Replay

    @property
    def reserved_bytes(self) -> int:
        """The most that is reserved at once."""
        return self.replay.peak_reserved_bytes


class Basis(NamedTuple):
    """The growth that a GPU's predictions rest on, and what it does not contain."""

    growth: Growth
    not_modelled: tuple[str, ...]

    def replay(self, rows: int) -> Played:
        """What the allocator makes of it: with the workspaces that a library may take and without, what reserves more.

        Workspaces come and go between other blocks, so that with them less may be reserved in the end.
        """
        variants = [self.growth, self.growth.without_passing_workspaces()]
        played = [Played(one, replay(one.events, one.sizes(rows).tolist())) for one in variants if one is not None]
        return max(played, key=lambda found: found.replay.peak_reserved_bytes)


class _Refused(NamedTuple):
    """Why fake tensors tell nothing; where it is neither of the two, real tensors may tell."""

    reason: str
    is_users: bool = False
    is_not_affine: bool = False


def _not_affine(reason: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"this training step cannot be predicted: {reason}. autotune, on the device itself, searches without."
    )


def _isolated(run: Callable[[], T]) -> T:
    """In a process of its own where that can be, so that nothing the step keeps elsewhere comes to hold fake tensors."""
    if not can_run_apart():
        return run()
    load_fake_tensors()
    return apart(run)


@final
class GpuTraces:
    """Traces of one workload for any GPU; GPUs that would take the same kernels share them."""

    def __init__(self, workload: Workload, multiple_of: int = 1, levers: Levers = AS_IT_IS) -> None:
        self._workload, self._multiple_of, self._levers = workload, multiple_of, levers
        self._known: list[tuple[Gpu, set[frozenset[str]], Growth]] = []
        self._refusal: str | None = None

    def on(self, gpu: Gpu) -> Basis:
        """What this GPU would allocate.

        Raises:
            InvalidRequestError: When the training step cannot be traced.
            Exception: Whatever the user's code raises.
        """
        for other, seen, growth in self._known:
            if kernel_choices(seen, gpu) == kernel_choices(seen, other):
                return Basis(growth.with_workspace(other.workspace_bytes, gpu.workspace_bytes), self._not_modelled())
        seen = set()
        growth = self._traced(gpu, seen)
        self._known.append((gpu, seen, growth))
        return Basis(growth, self._not_modelled())

    def _traced(self, gpu: Gpu, seen: set[frozenset[str]]) -> Growth:
        try:
            found = _isolated(partial(self._attempted, gpu))
        except ProcessDiedError as error:
            found = _Refused(str(error))
        if not isinstance(found, _Refused):
            growth, notes = found
            seen |= notes
            return growth
        if found.is_users:  # raised again here, with its own traceback
            fake_trace(
                self._workload,
                2 * self._multiple_of,
                host_batch=False,
                adjusted=as_on(gpu),
                levers=self._levers,
                device=CUDA,
            )
        if found.is_not_affine:
            raise _not_affine(found.reason)
        self._refusal = found.reason
        self._check_room()
        with preserved(
            self._workload.module, self._workload.own_optimizer, device=self._workload.device, on_disk=True
        ) as snapshot:
            try:
                return growth_of(partial(self._really_traced, gpu, snapshot), self._multiple_of)
            except NotAffineError as error:
                raise _not_affine(str(error)) from None

    def _attempted(self, gpu: Gpu) -> tuple[Growth, set[frozenset[str]]] | _Refused:
        seen: set[frozenset[str]] = set()
        adjusted = as_on(gpu, seen=seen)
        try:
            growth = growth_of(
                lambda rows: fake_trace(
                    self._workload,
                    rows,
                    host_batch=False,
                    sums_in_place=True,
                    adjusted=adjusted,
                    levers=self._levers,
                    device=CUDA,
                ),
                self._multiple_of,
                checked=True,
            )
        except NotAffineError as error:
            return _Refused(str(error), is_not_affine=True)
        except Exception as error:  # noqa: BLE001 - the user's own comes out below
            is_users = self._workload.device.type != "cpu" and not is_refusal(error)
            return _Refused(reason_of(error), is_users=is_users)
        return growth, seen

    def _really_traced(self, gpu: Gpu, snapshot: Snapshot, rows: int) -> Trace:
        batch = self._workload.source.take(rows)
        try:
            return record_windows(
                self._workload,
                batch,
                rows,
                host_batch=False,
                sums_in_place=True,
                adjusted=as_on(gpu, real=True),
                levers=self._levers,
                device=CUDA,
            )
        finally:
            snapshot.restore()

    def _check_room(self) -> None:
        """Real passes need a model with values, on the host, and room for its training."""
        remedy = (
            "It can be traced on real tensors at two small sizes instead, for which the model has to be on the cpu and hold "
            "values; or let autotune search on the device itself."
        )
        if self._workload.device.type != "cpu":
            raise InvalidRequestError(f"fake tensors cannot run this training step ({self._refusal}). {remedy}")
        needed = _ROOM_TO_RUN * num_bytes(self._workload.module.parameters())
        free = psutil.virtual_memory().available
        if needed > free:
            raise InvalidRequestError(
                f"fake tensors cannot run this training step ({self._refusal}), and to trace it on real tensors would take "
                f"some {format_bytes(needed)} of host memory, of which {format_bytes(free)} are free."
            )

    def notes(self) -> tuple[str, ...]:
        """What was done instead of fake tensors, where they were refused."""
        if self._refusal is None:
            return ()
        return (
            f"The training step does not run on fake tensors ({self._refusal}); it was traced on real ones, small sizes.",
        )

    def _not_modelled(self) -> tuple[str, ...]:
        found = [
            "batches of other shapes than the sample's, such as texts of other lengths",
            "temporaries inside kernels (attention's backward, reductions)",
            "other processes and the desktop on the GPU",
        ]
        modules = list(self._workload.module.modules())
        if any(isinstance(module, (nn.modules.conv._ConvNd)) for module in modules):
            found.append(
                "which workspaces cuDNN takes for convolutions: its versions differ, and all that it may take are counted"
            )
        if any(isinstance(module, nn.RNNBase) for module in modules):
            found.append("cuDNN's reserve for recurrent layers, which are traced in their parts")
        if self._refusal is not None:
            found.append(
                "the GPU's attention kernels, since the training step was traced on real tensors in host memory, and what "
                "depends on values: the small sizes that were traced may keep more or less of their rows than others"
            )
        return tuple(found)
