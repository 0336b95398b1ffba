"""What a file holds is data: nothing in it is ever unpickled, evaluated or imported."""

from __future__ import annotations

import ast
import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import autoaccum
from autoaccum import Plan
from autoaccum.comparing.reading import read_run
from autoaccum.errors import InvalidRequestError
from autoaccum.study import Study

ROOT = Path(autoaccum.__file__).parent
MODULES = {"pickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "yaml", "runpy", "multiprocessing"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
METHODS = {"exec_module", "import_module", "read_pickle", "loads"}
LOADERS = {"torch.load", "torch.jit.load", "np.load", "numpy.load"}

# Where one of these is used all the same, and why nothing from a file comes to it.
ALLOWED = {
    ("meeting.py", "pickle"): "what the ranks of one group tell one another over its store, as torch's own collectives do",
    ("meeting.py", "loads"): "the same",
    ("prediction/apart.py", "multiprocessing"): "a pipe from a process forked off this one, which sends what this code made",
    ("targets/__init__.py", "loads"): "json.loads",
    ("targets/functions.py", "exec_module"): "the Python file that the user names, to be run",
    ("targets/functions.py", "import_module"): "the module that the user names",
    ("targets/libraries.py", "import_module"): "transformers or torchvision, by literal names",
    ("entry.py", "eval"): "a constant: what it leaves in the interpreter is what is wanted",
    ("integrations/frameworks.py", "import_module"): "a framework, by a name from its table",
}


def uses_of(source: str) -> Iterator[str]:
    """Modules and calls in the source by which a file could be run."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from (first for name in names if (first := name.split(".")[0]) in MODULES)
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in BUILTINS | LOADERS:
                yield called
            elif isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
                yield node.func.attr


FILES = sorted(ROOT.rglob("*.py"))


def test_package_runs_nothing_from_a_file() -> None:
    """Every module and call by which contents could be run is in the table above, and the table has no others."""
    found = {(str(path.relative_to(ROOT)), use) for path in FILES for use in uses_of(path.read_text(encoding="utf-8"))}
    assert found == set(ALLOWED)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads as read",
        "import yaml",
        "def f(x):\n    return eval(x)",
        "torch.load(path)",
        "pandas.read_pickle(path)",
        "from multiprocessing.connection import Client",
    ],
)
def test_uses_are_seen(source: str) -> None:
    """The walk notices an import anywhere, under any name, and a call."""
    assert list(uses_of(source))


# -- a file whose unpickling or evaluation would leave a mark


class Mark:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.fixture(params=["pickle", "old pickle", "torch", "YAML", "Python", "text in JSON"])
def hostile(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[bytes, Path]:
    """Contents that leave a mark when they are run by what they are made for, and where."""
    mark = tmp_path / "mark"
    code = f"__import__('pathlib').Path({str(mark)!r}).touch()"
    match request.param:
        case "pickle":
            return pickle.dumps(Mark(mark)), mark
        case "old pickle":
            return pickle.dumps(Mark(mark), protocol=0), mark
        case "torch":
            torch.save(Mark(mark), tmp_path / "saved")
            return (tmp_path / "saved").read_bytes(), mark
        case "YAML":
            return f"!!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path [{mark}]]".encode(), mark
        case "Python":
            return code.encode(), mark
        case _:
            return json.dumps({"record": code, "plan": code, "py/reduce": [code]}).encode(), mark


def test_marks_would_be_left(tmp_path: Path) -> None:
    """The contents above do what they are for: unpickling leaves the mark."""
    pickle.loads(pickle.dumps(Mark(tmp_path / "mark")))
    assert (tmp_path / "mark").exists()


def tuned(folder: Path | None, storage: str | None = None) -> Plan:
    return autoaccum.autotune(
        torch.nn.Linear(2, 1), torch.ones(2, 2), 2, device="virtual:1MiB", levers="none", cache=folder, storage=storage
    )


def load_plan(path: Path) -> None:
    Plan.load(path)


def read_saved(path: Path) -> None:
    read_run(path.read_bytes(), str(path))


def open_study(path: Path) -> None:
    Study(str(shutil.copy(path, path.with_suffix(".log"))), {}, budget_bytes=1, objective="throughput", seed=0)


def open_database(path: Path) -> None:
    Study(f"sqlite:///{path}", {}, budget_bytes=1, objective="throughput", seed=0)


@pytest.mark.parametrize("read", [load_plan, read_saved, open_study, open_database])
def test_file_that_is_read_is_not_run(read: Callable[[Path], None], hostile: tuple[bytes, Path], tmp_path: Path) -> None:
    """A plan, a saved run or a study of such contents is refused, and leaves no mark."""
    contents, mark = hostile
    (tmp_path / "file").write_bytes(contents)
    with pytest.raises(InvalidRequestError):
        read(tmp_path / "file")
    assert not mark.exists()


def test_remembered_plan_is_not_run(hostile: tuple[bytes, Path], tmp_path: Path) -> None:
    """Such contents in place of a remembered plan are ignored with a warning, and leave no mark."""
    contents, mark = hostile
    tuned(tmp_path / "cache")
    (path,) = (tmp_path / "cache").iterdir()
    path.write_bytes(contents)
    plan = tuned(tmp_path / "cache")
    assert any("was ignored" in warning for warning in plan.warnings) and not mark.exists()
