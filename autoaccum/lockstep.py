"""Trials of a model whose ranks must run together, so that one that fails leaves nobody waiting.

FSDP2 gathers weights and reduces gradients inside forward and backward passes. Here every such exchange is preceded by a
vote on the host: are all ranks well? A rank that has failed votes once more, the others hear it at their next exchange,
break off as well, and all are in step again. Knows nothing of sizes, budgets or memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autoaccum.engines import refuse_engines
from autoaccum.errors import InvalidRequestError, RankMismatchError
from autoaccum.ranks import Ranks
from autoaccum.sharding import Sharding
from autoaccum.shards import bring_to_rest, can_come_to_rest, make_ready, param_groups, sharded_parts

_WELL, _FAILED = 0, 1
_CLOSING, _STATISTICS, _GATHERING, _REDUCING = range(4)  # what a rank is about to do when it votes
_SILENT_S = 300.0  # two votes are at most one pass through the whole model apart
_ANYTHING = 2**62  # what a rank that failed would have done is not compared

_CALLED_OFF = "another rank has failed in this trial, and this one broke off with it"


class CalledOffError(torch.OutOfMemoryError):
    """Another rank has failed in this trial. It passes through the model as running out of memory does."""


@final
class Lockstep:
    """What the trials of one search need to stay in step over ranks.

    Args:
        module: The model without wrappers.
        ranks: Those that train together.
        process_group: Theirs, None for the default one.
        uncounted: What runs inside of it does not count as memory of the trial.

    Raises:
        InvalidRequestError: When a trial that fails on one rank would leave the others waiting, with the remedy.

    Leaves behind:
        What the first forward pass of a sharded model sets up in FSDP.

    Attributes:
        is_sharded: The model is sharded by FSDP2.
        is_needed: Ranks run together, with the same number of micro-batches.
        was_called_off: In the latest trial another rank failed, and this one did not.
    """

    def __init__(
        self,
        module: nn.Module,
        ranks: Ranks,
        process_group: Any = None,
        uncounted: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._module, self._ranks, self._group, self._uncounted = module, ranks, process_group, uncounted
        refuse_engines(module)
        self.sharding = Sharding(module, ranks)
        self.is_sharded, self.is_needed = self.sharding.is_sharded, self.sharding.lockstep
        self._control = process_group
        self._ballot = torch.zeros(3, dtype=torch.int64)  # made before memory runs out
        self._is_in_step = True
        self.was_called_off = False
        if self.is_sharded:
            _refuse_unprotected(module)
            make_ready(module)

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Votes can be held while inside; entered on all ranks."""
        if not self.is_needed:
            yield
            return
        if self._ranks.world_size < dist.get_world_size():
            # A group of a part of all ranks would get a name that was used before, and find what was stored under it.
            if "gloo" not in str(dist.get_backend_config(self._group)):
                self._ballot = self._ballot.to(torch.accelerator.current_accelerator())
            yield
            return
        # On the host: a vote on the device would wait for all that is queued there.
        self._control = dist.new_group(backend="gloo", timeout=timedelta(seconds=_SILENT_S))
        try:
            yield
        finally:
            dist.destroy_process_group(self._control)
            self._control = self._group

    @contextmanager
    def trial(self) -> Iterator[None]:
        """One trial on all ranks: whoever leaves with an error, all leave.

        Raises:
            CalledOffError: When another rank has failed.
            RankMismatchError: On all ranks, when they do different things.
        """
        self.was_called_off = False
        if not self.is_needed:
            yield
            return
        self._is_in_step = False
        try:
            with self._asked_first():
                yield
            self._vote(_CLOSING)
        except Exception:
            if not self._is_in_step:
                with suppress(RankMismatchError):  # a lost connection: this rank's own error matters more
                    self._hold(_FAILED, _CLOSING)
            raise
        finally:
            self._is_in_step = True

    def settle(self) -> None:
        """After a trial, with its error let go of: nothing of it is left in a sharded model."""
        if self.is_sharded:
            bring_to_rest(self._module)

    def _vote(self, about: int, size: int = 0) -> None:
        if self._is_in_step:  # the training step went on after it was called off
            raise CalledOffError(_CALLED_OFF)
        failed, lowest, highest = self._hold(_WELL, about + size * 4)
        if failed:
            self._is_in_step = True  # with the one that failed, which has voted for the last time in this trial
            self.was_called_off = True
            raise CalledOffError(_CALLED_OFF)
        if lowest != highest:
            self._is_in_step = True
            raise RankMismatchError(
                "the ranks do different things in the same step: one gathers or reduces parameters where another does not. "
                "FSDP needs the same modules to run in the same order on every rank."
            )

    def _hold(self, standing: int, about: int) -> list[int]:
        """Whether any rank has failed, and the least and the most of what those that are well are about to do."""
        with self._uncounted():
            said = [standing, -about, about] if standing == _WELL else [standing, -_ANYTHING, 0]
            self._ballot.copy_(torch.tensor(said))
            try:
                dist.all_reduce(self._ballot, dist.ReduceOp.MAX, group=self._control)
            except RuntimeError as error:
                self._is_in_step = True  # nobody is left to vote with
                raise RankMismatchError(
                    "another rank has ended, or has not answered for too long, in the middle of a trial; its own output "
                    "says why."
                ) from error
            failed, lowest, highest = self._ballot.tolist()
        return [failed, -lowest, highest]

    # -- where votes are held

    @contextmanager
    def _asked_first(self) -> Iterator[None]:
        """Every exchange inside is preceded by a vote; on the way out they are what they were."""
        with ExitStack() as stack:
            for group in [group for part in sharded_parts(self._module) for group in param_groups(part)]:
                for name, about in (("_all_gather_comm", _GATHERING), ("_reduce_scatter_comm", _REDUCING)):
                    own = getattr(group, name)
                    stack.callback(setattr, group, name, own)
                    setattr(group, name, _AskedFirst(own, partial(self._vote, about)))
            for part in self._module.modules():
                if isinstance(part, nn.SyncBatchNorm):
                    stack.callback(part.register_forward_pre_hook(self._before_statistics).remove)
                    stack.callback(part.register_forward_hook(self._after_statistics).remove)
            yield

    def _before_statistics(self, module: nn.Module, args: Any) -> None:
        if module.training:
            self._vote(_STATISTICS)

    def _after_statistics(self, module: nn.Module, args: Any, output: Any) -> None:
        """The backward pass starts with the gradient of the output."""
        if module.training and isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda gradient: self._vote(_STATISTICS))  # type: ignore[no-untyped-call]


@final
class _AskedFirst:
    """An exchange of FSDP that is preceded by a vote, when its own memory is there already."""

    def __init__(self, own: Any, vote: Callable[[int], None]) -> None:
        self._own, self._vote = own, vote

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The memory for the exchange."""
        made: Tensor = self._own.allocate(size, dtype=dtype, device=device)
        return made

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        self._vote(input_tensor.numel())
        return self._own(output_tensor, input_tensor, *args, **kwargs)


def _refuse_unprotected(module: nn.Module) -> None:
    """Refuse what cannot be probed: where votes cannot be held, a rank that runs out of memory would leave others waiting.

    Raises:
        InvalidRequestError: With the reason and the remedy.
    """
    reason = _reason_against(module)
    if reason is not None:
        raise InvalidRequestError(
            f"this sharded model cannot be probed: {reason}. Training it works all the same: "
            "Accumulator(model, optimizer, micro_batch=...)."
        )


def _reason_against(module: nn.Module) -> str | None:
    parts = sharded_parts(module)
    if not all(can_come_to_rest(part) for part in parts):
        return f"FSDP2 of torch {torch.__version__} cannot go on after a step that ran out of memory; torch 2.13 can"
    groups = [group for part in parts for group in param_groups(part)]
    parameters = [parameter for group in groups for parameter in group.fsdp_params]
    if any(parameter.is_dtensor for parameter in parameters):
        return "its layers are split over ranks as well (tensor parallelism), whose exchanges cannot be held back"
    if any(parameter.offload_to_cpu and parameter.device.type != "cpu" for parameter in parameters):
        return "CPUOffloadPolicy keeps its parameters in host memory, and the step runs on another device"
    if any(_only_replicates(parameter.sharded_param) for parameter in parameters):
        return "its mesh has replicas only, and what replicas exchange cannot be held back; use a mesh that shards"
    return None


def _only_replicates(parameter: Any) -> bool:
    """Whether gradients are summed over replicas without being scattered before."""
    mesh, placements = parameter.device_mesh, parameter.placements
    sharded = [mesh.size(dim) for dim, placement in enumerate(placements) if placement.is_shard()]
    return bool(mesh.size() > 1 and all(size == 1 for size in sharded))
