"""A workload from the user's own function, by file and by module."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from autoaccum.errors import InvalidRequestError
from autoaccum.targets import load_target

BUILD = "import torch\n\n\ndef build():\n    return torch.nn.Linear(3, 2), torch.randn(2, 3)\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder; what a target adds to the import system is taken away again."""
    modules = dict(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in sys.modules.keys() - modules.keys():
        del sys.modules[name]


# -- found


@pytest.mark.parametrize("place", ["my_target.py", "./my_target.py", "sub/my_target.py"])
def test_function_of_a_file(folder: Path, place: str) -> None:
    """A function is found in a file by its path, in the current folder or below."""
    (folder / place).parent.mkdir(exist_ok=True)
    (folder / place).write_text(BUILD)
    assert load_target(f"{place}:build").num_trainable == 8


def test_function_of_a_file_by_its_whole_path(folder: Path) -> None:
    """A function is found in a file by its absolute path, whatever the current folder is."""
    (folder / "my target-1.py").write_text(BUILD)
    assert load_target(f"{folder / 'my target-1.py'}:build").num_trainable == 8


@pytest.mark.parametrize("name", ["my_module", "my_package.inner.deep"])
def test_function_of_a_module(folder: Path, name: str) -> None:
    """A function is found by the name of a module in the current folder, also inside packages."""
    file = folder / (name.replace(".", "/") + ".py")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(BUILD)
    assert load_target(f"{name}:build").num_trainable == 8


def test_a_workload_is_taken_as_it_is(folder: Path) -> None:
    """A function may return a Workload with its own loss and optimizer."""
    (folder / "target_a.py").write_text(
        "import torch, autoaccum\n"
        "def build():\n"
        "    model = torch.nn.Linear(3, 2)\n"
        "    sample = (torch.randn(4, 3), torch.randn(4, 2))\n"
        "    return autoaccum.Workload(model, sample, loss_fn=torch.nn.functional.mse_loss, optimizer=torch.optim.SGD)\n"
    )
    workload = load_target("target_a.py:build")
    assert workload.optimizer_name == "SGD"
    assert workload.loss(workload.source.take(2)).shape == ()


def test_any_callable_will_do(folder: Path) -> None:
    """A class or another callable without arguments serves as the function."""
    (folder / "target_b.py").write_text(BUILD + "\nimport functools\nmake = functools.partial(build)\n")
    assert load_target("target_b.py:make").num_trainable == 8


def test_modules_beside_the_file_can_be_imported(folder: Path) -> None:
    """A file imports the modules beside it, as a script does, wherever it lies."""
    (folder / "project").mkdir()
    (folder / "project" / "beside_it.py").write_text(BUILD)
    (folder / "project" / "target_c.py").write_text("from beside_it import build\n")
    assert load_target("project/target_c.py:build").num_trainable == 8


def test_the_file_is_a_module_while_it_runs(folder: Path) -> None:
    """Dataclasses with annotations as text work in a file, which needs it to be in `sys.modules`."""
    source = (
        "from __future__ import annotations\nimport dataclasses\n\n@dataclasses.dataclass\nclass Config:\n    n: int = 3\n"
    )
    (folder / "target_d.py").write_text(source + BUILD)
    assert load_target("target_d.py:build").num_trainable == 8


def test_a_file_named_like_a_library_does_not_replace_it(folder: Path) -> None:
    """A user's `types.py` is run without taking the place of Python's own module."""
    (folder / "types.py").write_text(BUILD)
    assert load_target("types.py:build").num_trainable == 8
    assert sys.modules["types"] is types


def test_the_function_runs_once(folder: Path) -> None:
    """The file is run once and its function is called once."""
    (folder / "target_e.py").write_text("calls = ['import']\n" + BUILD.replace("return", "calls.append('call'); return"))
    load_target("target_e.py:build")
    assert sys.modules["target_e"].calls == ["import", "call"]


# -- not found


@pytest.mark.parametrize("place", ["missing.py", "sub/missing.py", "folder.py", "noextension/x"])
def test_missing_file(folder: Path, place: str) -> None:
    """A file that is not there, or is a folder, is refused by its name."""
    (folder / "folder.py").mkdir()
    with pytest.raises(InvalidRequestError, match=f"there is no file '{place}'"):
        load_target(f"{place}:build")


def test_not_a_python_file(folder: Path) -> None:
    """A file that Python cannot import is refused."""
    (folder / "sub").mkdir()
    (folder / "sub" / "notes.txt").write_text("notes")
    with pytest.raises(InvalidRequestError, match=r"'sub/notes.txt' is not a Python file"):
        load_target("sub/notes.txt:build")


def test_missing_function_lists_the_files_own(folder: Path) -> None:
    """A missing function is refused with the functions that the file defines, and without those it imports."""
    (folder / "target_f.py").write_text("from math import sqrt\n" + BUILD + "\ndef other():\n    pass\n\nnumber = 3\n")
    with pytest.raises(InvalidRequestError, match=r"target_f.py has no function 'biuld'; it has: build, other\. "):
        load_target("target_f.py:biuld")
    with pytest.raises(InvalidRequestError, match="has no function 'number'"):
        load_target("target_f.py:number")


def test_missing_function_of_an_empty_file(folder: Path) -> None:
    """A file without any function is said to have none."""
    (folder / "target_g.py").write_text("")
    with pytest.raises(InvalidRequestError, match="it has: none"):
        load_target("target_g.py:build")


@pytest.mark.parametrize("name", ["no_such_module", "no_such_package.module", "json.no_such_module"])
def test_missing_module(name: str) -> None:
    """A module that is not there is refused by its name, also where its package is there."""
    with pytest.raises(InvalidRequestError, match=re.escape(f"there is no module {name!r}")):
        load_target(f"{name}:build")


@pytest.mark.parametrize("name", [".relative", "a..b", "a.", "1st", "my-module", "a b"])
def test_not_the_name_of_a_module(name: str) -> None:
    """A text that cannot be a module's name is refused as that."""
    with pytest.raises(InvalidRequestError, match=re.escape(f"{name!r} is not the name of a module")):
        load_target(f"{name}:build")


def test_function_that_needs_an_argument(folder: Path) -> None:
    """A function that cannot be called without arguments is refused with what it takes; defaults and C functions will do."""
    (folder / "target_k.py").write_text(
        BUILD + "def sized(size, seed=0):\n    return build()\ndef free(size=1):\n    return build()\n"
    )
    with pytest.raises(
        InvalidRequestError, match=r"target_k.py:sized .* takes \(size, seed=0\) .*'size'.*give them defaults"
    ):
        load_target("target_k.py:sized")
    assert load_target("target_k.py:free").num_trainable == 8
    (folder / "target_l.py").write_text("build = dict\n")
    with pytest.raises(InvalidRequestError, match="returned a dict"):
        load_target("target_l.py:build")


@pytest.mark.parametrize(
    ("returned", "kind"),
    [
        ("7", "int"),
        ("None", "NoneType"),
        ("torch.nn.Linear(3, 2)", "Linear"),
        ("(1, 2, 3)", "tuple"),
        ("[torch.nn.Linear(3, 2), torch.randn(2, 3)]", "list"),
    ],
)
def test_something_else_is_returned(folder: Path, returned: str, kind: str) -> None:
    """What is neither a Workload nor a pair is refused with its type and what is expected."""
    (folder / "target_h.py").write_text(f"import torch\ndef build():\n    return {returned}\n")
    expected = f"target_h.py:build returned a {kind}; expected an autoaccum.Workload or a tuple (model, sample)."
    with pytest.raises(InvalidRequestError, match=re.escape(expected)):
        load_target("target_h.py:build")


def test_a_pair_that_is_no_model_and_sample(folder: Path) -> None:
    """A pair whose first part is no model is refused by the workload."""
    (folder / "target_i.py").write_text("def build():\n    return 'model', 'sample'\n")
    with pytest.raises(InvalidRequestError, match=r"model is a str; expected a torch\.nn\.Module"):
        load_target("target_i.py:build")


# -- the user's own errors


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("def build(:\n", SyntaxError),
        ("raise OSError('no data')\n", OSError),
        ("import no_such_library\n", ModuleNotFoundError),
        ("def build():\n    raise KeyError('x')\n", KeyError),
        ("def build():\n    len(1)\n", TypeError),
    ],
)
def test_the_users_error_comes_out_unchanged(folder: Path, source: str, error: type[Exception]) -> None:
    """An error while the file is read, run or its function is called comes out as it is."""
    (folder / "target_j.py").write_text(source)
    with pytest.raises(error) as caught:
        load_target("target_j.py:build")
    assert type(caught.value) is error


def test_a_library_missing_inside_a_module_is_the_users_error(folder: Path) -> None:
    """A module that is there but imports one that is not is no missing target."""
    (folder / "needs_more.py").write_text("import no_such_library\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        load_target("needs_more:build")


@pytest.mark.parametrize("place", ["a" * 300 + ".py", "x/" * 3000 + "y.py", "a\x00.py"], ids=["name", "path", "zero"])
def test_path_that_no_system_takes_is_no_file(place: str) -> None:
    """A name that the file system refuses is a file that is not there."""
    with pytest.raises(InvalidRequestError, match="there is no file"):
        load_target(f"{place}:build")
