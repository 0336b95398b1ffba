"""What autoaccum itself can complain about, and nothing else.

    AutoaccumError
      InvalidRequestError (ValueError)    the call cannot be satisfied as written
      NothingFitsError    (RuntimeError)  the smallest micro-batch is still too large; has .trials
      MissingExtraError   (ImportError)   an optional dependency is not installed
      RankMismatchError   (RuntimeError)  the processes of one group did not do the same thing

An exception of the user's own code is never wrapped into one of these: it passes through with a note.
"""

from __future__ import annotations

from collections.abc import Sequence


class AutoaccumError(Exception):
    """Everything that autoaccum raises on its own account."""


class InvalidRequestError(AutoaccumError, ValueError):
    """The call cannot be satisfied as written; the message says what to change."""


class NothingFitsError(AutoaccumError, RuntimeError):
    """Even the smallest micro-batch does not fit the budget.

    Attributes:
        trials: Every `Trial` that was run, in order.
    """

    def __init__(self, message: str, trials: Sequence[object] = ()) -> None:
        super().__init__(message)
        self.trials = tuple(trials)


class MissingExtraError(AutoaccumError, ImportError):
    """An optional dependency is not installed; the message holds the pip command."""


class RankMismatchError(AutoaccumError, RuntimeError):
    """The processes of one group disagree, or one of them failed; the message names the rank."""
