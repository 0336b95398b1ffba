"""A block whose forward pass runs again in the backward pass, as if it had run once.

torch's checkpoint puts torch's generators back for the second run. What else a forward pass changes is noted and put back
by `module_state`; `saved_results` is what selective checkpointing keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, final

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autoaccum.levers.module_state import Before, Slot, slots_of
from autoaccum.levers.saved_results import Keeping, Results, Reusing


@final
class Recomputation:
    """Runs one block so that its activations are not kept.

    Args:
        block: Its modules' buffers and plain attributes are what a forward pass may change.
        selective: Keep the results of matrix products, convolutions and attention.
    """

    def __init__(self, block: nn.Module, *, selective: bool) -> None:
        self._selective = selective
        self._modules = list(block.modules())
        self._slots: list[Slot] = []
        self._num_places = -1
        self._large: list[Slot] | None = None  # those that change, learned in the first forward pass

    def run(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call the block's forward."""
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        if isinstance(function, partial):  # transformers binds the keywords so
            args, kwargs = (*function.args, *args), {**function.keywords, **kwargs}
            function = function.func
        results = Results() if self._selective else None
        # Keywords go as arguments: torch saves those, and looks only at them for the devices whose generators it puts back.
        call = _Call(function, len(args), tuple(kwargs))
        out = checkpoint(call, *args, *kwargs.values(), use_reentrant=False, context_fn=partial(self._contexts, results))
        call.raise_error()
        if results is not None:
            results.let_go_of(out)
        return out

    def _contexts(self, results: Results | None) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """For the first run and for the second; the second may be entered several times."""
        before = Before(self._modules)
        first = nullcontext() if results is None else Keeping(results)
        return self._first_run(before, first), _SecondRun(before, results)

    @contextmanager
    def _first_run(self, before: Before, mode: AbstractContextManager[Any]) -> Iterator[None]:
        before.note(self._all_slots(), self._large)
        with mode:
            yield
        if self._large is None:
            self._large = before.drop_unchanged()

    def _all_slots(self) -> list[Slot]:
        """Looked for again when modules have got more attributes."""
        num_places = sum(len(vars(module)) + len(module._buffers) for module in self._modules)
        if num_places != self._num_places:
            self._slots, self._num_places = slots_of(self._modules), num_places
        return self._slots


@final
class _Call:
    """A function of keywords, as one of arguments alone.

    An error of the first run comes out later: older checkpoints (torch 2.6) leave their hooks and modes on when one passes
    through them, for as long as anybody holds its traceback.
    """

    def __init__(self, function: Callable[..., Any], num_args: int, names: tuple[str, ...]) -> None:
        self._function, self._num_args, self._names = function, num_args, names
        self._error: BaseException | None = None
        self._is_first = True

    def __call__(self, *args: Any) -> Any:
        named = dict(zip(self._names, args[self._num_args :], strict=True))
        if not self._is_first:
            return self._function(*args[: self._num_args], **named)
        self._is_first = False
        try:
            return self._function(*args[: self._num_args], **named)
        except BaseException as error:  # noqa: BLE001 - raised again as soon as checkpoint has returned
            self._error = error
            return None

    def raise_error(self) -> None:
        """Raise the error of the first run, if there was one."""
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback leads here


@final
class _SecondRun:
    """Entered each time the block is computed again: twice where a graph is kept for two backward passes."""

    def __init__(self, before: Before, results: Results | None) -> None:
        self._before, self._results = before, results
        self._stack = ExitStack()

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self._before.put_back())
            if self._results is not None:
                stack.enter_context(Reusing(self._results))
            self._stack = stack.pop_all()

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)
