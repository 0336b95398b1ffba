"""What `import autoaccum` offers, and what it costs."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import autoaccum


@pytest.mark.parametrize("name", autoaccum.__all__)
def test_public_name_exists_and_is_described(name: str) -> None:
    """Every name in __all__ can be had and has a docstring, and so have its public methods."""
    value = getattr(autoaccum, name)
    assert inspect.getdoc(value)
    if inspect.isclass(value):
        for attribute, member in vars(value).items():
            if inspect.isfunction(member) and not attribute.startswith("_"):
                assert inspect.getdoc(member), f"{name}.{attribute}"


def test_all_is_what_dir_shows() -> None:
    """`dir(autoaccum)` lists exactly the public names."""
    assert sorted(autoaccum.__all__) == sorted(name for name in dir(autoaccum) if not name.startswith("_"))


def test_unknown_name_is_an_attribute_error() -> None:
    """A name that is not public is an AttributeError, as for any module."""
    with pytest.raises(AttributeError, match="nonsense"):
        autoaccum.nonsense  # noqa: B018


@pytest.mark.slow
def test_import_is_light(run_child: Any) -> None:
    """`import autoaccum` imports neither torch nor pandas, optuna or rich; autotune imports no pandas, optuna or rich."""
    loaded = run_child(
        """
        import autoaccum
        names = ("torch", "pandas", "optuna", "rich")
        first = [name for name in names if name in sys.modules]
        autoaccum.autotune
        answer([first, [name for name in names if name in sys.modules]])
        """
    )
    assert loaded == [[], ["torch"]]
