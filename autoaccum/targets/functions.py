"""A workload from a function of the user's own, by file or by module."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from autoaccum.errors import InvalidRequestError
from autoaccum.units import one_line, shown
from autoaccum.workload import Workload


def workload_from_function(location: str, function: str) -> Workload:
    """Call `function` of a file or module; it returns a `Workload`, or `(model, sample)`.

    Raises:
        InvalidRequestError: When it is not there, or returns something else.
        Exception: Whatever the user's code raises, at import or when called.
    """
    is_file = location.endswith(".py") or "/" in location or "\\" in location
    module = _module_from_file(Path(location)) if is_file else _module_by_name(location)
    build = getattr(module, function, None)
    if not callable(build):
        known = sorted(n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__)
        listed = one_line(", ".join(known), 300) or "none"
        raise InvalidRequestError(
            f"{one_line(location, 200)} has no function {shown(function)}; it has: {listed}. "
            "The function takes no arguments and returns an autoaccum.Workload or (model, sample)."
        )
    name = one_line(f"{location}:{function}", 200)
    _refuse_arguments(build, name)
    return _as_workload(build(), name)


def _refuse_arguments(build: Callable[..., Any], name: str) -> None:
    try:
        signature = inspect.signature(build)
    except ValueError:  # written in C, some of which have none
        return
    try:
        signature.bind()
    except TypeError as error:
        raise InvalidRequestError(
            f"{name} is called without arguments, and takes {one_line(str(signature), 200)} ({error}); give them defaults, "
            "or name a function that calls it."
        ) from None


def _as_workload(built: Any, name: str) -> Workload:
    if isinstance(built, Workload):
        return built
    if isinstance(built, tuple) and len(built) == 2:
        return Workload(*built)
    raise InvalidRequestError(
        f"{name} returned a {type(built).__name__}; expected an autoaccum.Workload or a tuple (model, sample)."
    )


def _module_from_file(path: Path) -> ModuleType:
    if not _is_file(path):
        raise InvalidRequestError(f"there is no file {shown(str(path), 200)}; expected file.py:function.")
    name = path.stem if path.stem not in sys.modules else f"{path.stem} (target)"  # the user's types.py is not Python's
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InvalidRequestError(f"{shown(str(path), 200)} is not a Python file; expected file.py:function.")
    sys.path.insert(0, str(path.parent.resolve()))  # as for a script: the modules beside the file can be imported
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that no file system takes, or a folder that may not be looked into
        return False


def _module_by_name(name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise InvalidRequestError(f"{shown(name)} is not the name of a module; expected package.module:function.")
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name == missing or name.startswith(missing + "."):
            raise InvalidRequestError(f"there is no module {shown(name)}; expected package.module:function.") from None
        raise
