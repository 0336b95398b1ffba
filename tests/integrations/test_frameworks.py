"""Which framework is missing or too old, and what to do about it."""

from __future__ import annotations

import sys

import pytest

from autoaccum import MissingExtraError
from autoaccum.integrations import frameworks
from autoaccum.integrations.frameworks import FRAMEWORKS, Framework, framework


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_missing_framework_is_said_with_the_pip_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is not installed, the error is an ImportError that names the extra."""
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=rf'{name} is not installed.*"autoaccum\[{FRAMEWORKS[name].extra}\]"'):
        framework(name)


def test_old_framework_is_said_with_what_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is too old, the error says which version there is, which one is needed, and why."""
    old = Framework("msgspec", "999.0", "dates are strings", "dates")
    monkeypatch.setitem(frameworks.FRAMEWORKS, "msgspec", old)
    with pytest.raises(MissingExtraError, match=r"is too old; expected 999\.0 or newer \(before, dates are strings\)"):
        framework("msgspec")


def test_framework_that_is_there_is_given() -> None:
    """What is installed and new enough is imported."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    assert framework("accelerate") is accelerate


def test_what_a_framework_lacks_is_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A framework whose own dependency is missing raises the error that names that dependency."""

    def broken(name: str) -> None:
        raise ModuleNotFoundError("No module named 'yaml'", name="yaml")

    monkeypatch.setattr(frameworks.importlib, "import_module", broken)
    with pytest.raises(ModuleNotFoundError, match="No module named 'yaml'") as caught:
        framework("accelerate")
    assert not isinstance(caught.value, MissingExtraError)
