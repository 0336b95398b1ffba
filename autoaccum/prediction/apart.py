"""Runs a function in a process of its own, a copy of this one, and gives back what it returns.

For tracing where host memory is what is measured: what fake tensors load, and what the user's code changes or breaks, stays
there. Knows nothing of traces.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeVar

import torch

from autoaccum.errors import AutoaccumError

T = TypeVar("T")

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PATIENCE_S = 180.0  # ten times what 7 billion parameters take; a copied process can wait for a lock that nobody will open


class ProcessDiedError(AutoaccumError):
    """The process ended, or went silent, without an answer."""


def can_run_apart() -> bool:
    """Whether this process can be copied: not with a GPU's context, nor as a daemon, which may have no children."""
    has_context = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return sys.platform == "linux" and not has_context and not multiprocessing.current_process().daemon


def apart(run: Callable[[], T]) -> T:
    """What `run` returns, which has to be picklable, from a process of its own.

    Raises:
        ProcessDiedError: When it ended without an answer.

    Example:
        >>> apart(lambda: 6 * 7)
        42
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(run, sender))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on forking with threads: the patience is for that
        process.start()
    sender.close()
    try:
        if receiver.poll(_PATIENCE_S):
            answer: tuple[T] | None = receiver.recv()
            if answer is None:
                raise KeyboardInterrupt
            return answer[0]
    except EOFError:
        pass
    finally:
        process.kill()
        process.join()
        receiver.close()
    raise ProcessDiedError(f"the process that did it ended without an answer (exit code {process.exitcode})")


def _work(run: Callable[[], object], sender: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which ends this process
    gc.freeze()  # what the parent made stays; looking through it takes as long as many a trace
    _end_with_parent()
    torch.set_num_threads(1)  # the pool of threads was not copied, and a parallel kernel would wait for it
    try:
        sender.send((run(),))
    except KeyboardInterrupt:  # raised by the code itself: it is the caller's
        sender.send(None)


def _end_with_parent() -> None:
    """Nobody waits for this process when the one that started it was killed.

    The kernel sees to it: a thread that waited would have a stack, for which there may be no memory.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    assert parent is not None
    if os.getppid() != parent.pid:  # it was killed before
        os._exit(1)
