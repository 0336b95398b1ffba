"""The errors of autoaccum: what they can be caught as, and what survives on the way between processes."""

from __future__ import annotations

import pickle

import pytest

from autoaccum import errors
from autoaccum.errors import (
    AutoaccumError,
    InvalidRequestError,
    MissingExtraError,
    NothingFitsError,
    RankMismatchError,
)

KINDS = [
    (InvalidRequestError, ValueError),
    (NothingFitsError, RuntimeError),
    (MissingExtraError, ImportError),
    (RankMismatchError, RuntimeError),
]


@pytest.mark.parametrize(("error", "builtin"), KINDS)
def test_caught_as_its_builtin(error: type[AutoaccumError], builtin: type[Exception]) -> None:
    """An `except` clause for the fitting built-in exception catches the error."""
    with pytest.raises(builtin, match="what to change"):
        raise error("what to change")


def test_one_base_for_all() -> None:
    """Every public error of the module derives from AutoaccumError."""
    public = [value for name, value in vars(errors).items() if name.endswith("Error") and isinstance(value, type)]
    assert len(public) == 5
    assert all(issubclass(error, AutoaccumError) for error in public)


def test_base_catches_no_foreign_error() -> None:
    """AutoaccumError itself is no ValueError and no RuntimeError, so a foreign handler does not swallow it."""
    assert not issubclass(AutoaccumError, (ValueError, RuntimeError, ImportError, OSError))


def test_trials_are_kept_in_order() -> None:
    """NothingFitsError keeps the trials as a tuple, in the order given."""
    assert NothingFitsError("too large", ["first", "second"]).trials == ("first", "second")


def test_trials_are_empty_by_default() -> None:
    """NothingFitsError without trials has an empty tuple of them."""
    assert NothingFitsError("too large").trials == ()


def test_later_changes_of_the_log_do_not_reach_the_error() -> None:
    """NothingFitsError does not share the list it was given."""
    log = ["first"]
    error = NothingFitsError("too large", log)
    log.append("second")
    assert error.trials == ("first",)


@pytest.mark.parametrize("error", [error for error, _ in KINDS])
def test_survives_a_process_boundary(error: type[AutoaccumError]) -> None:
    """An error that a worker process sends back has its type and its message."""
    received = pickle.loads(pickle.dumps(error("too large for 8 GiB")))
    assert type(received) is error
    assert str(received) == "too large for 8 GiB"


def test_trials_survive_a_process_boundary() -> None:
    """NothingFitsError still has its trials after pickling."""
    received = pickle.loads(pickle.dumps(NothingFitsError("too large", ["only"])))
    assert received.trials == ("only",)
