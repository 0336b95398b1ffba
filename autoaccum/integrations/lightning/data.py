"""Where a Trainer gets its training data from, with windows in place of the user's batches."""

from __future__ import annotations

from typing import Any, final

from autoaccum.integrations.window_loader import WindowLoader, WindowSchedule


@final
class WindowData:
    """Stands in for the trainer's source of training data: the user's loader, made anew with micro-batches.

    The user's own is asked for once for tuning and the first epoch, and then as often as the trainer wants it anew.
    """

    def __init__(self, inner: Any, schedule: WindowSchedule, rank: int) -> None:
        self.schedule = schedule
        self._inner, self._rank = inner, rank
        self._kept: Any = None
        self._has_begun = False
        self._loader: WindowLoader | None = None

    @property
    def instance(self) -> Any:
        """Where the data comes from, as Lightning calls it."""
        return self._inner.instance

    @instance.setter
    def instance(self, instance: Any) -> None:
        self._inner.instance = instance

    @property
    def name(self) -> str:
        """The hook that gives it, as Lightning calls it."""
        return str(self._inner.name)

    def is_defined(self) -> bool:
        """Whether there is any."""
        return bool(self._inner.is_defined())

    def is_module(self) -> bool:
        """Whether a hook gives it."""
        return bool(self._inner.is_module())

    def users_loader(self) -> Any:
        """The user's own."""
        loader = self._inner.dataloader() if self._kept is None else self._kept
        self._kept = None if self._has_begun else loader
        return loader

    def begin(self) -> None:
        """Ask the user anew from now on, whenever the trainer does."""
        self._has_begun, self._kept = True, None

    def dataloader(self) -> WindowLoader:
        """What the trainer is to use."""
        self._loader = WindowLoader(self.users_loader(), self.schedule, self._rank)
        return self._loader

    def num_windows(self) -> int | None:
        """Of an epoch, None where that is not known; while a window is one micro-batch."""
        try:
            return len(WindowLoader(self.users_loader(), self.schedule, self._rank))
        except TypeError:  # a stream, or a sampler without a length
            return None

    def take_rows(self) -> int | None:
        """The rows of the micro-batch that begins; None where only the batch itself tells."""
        return None if self._loader is None else self._loader.take_rows()
