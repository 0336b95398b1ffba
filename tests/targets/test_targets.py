"""A TARGET text: which kind it is, how its options are read, and what is said when there is no such thing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from autoaccum import targets
from autoaccum.errors import InvalidRequestError
from autoaccum.targets import load_target


@pytest.mark.parametrize(
    ("query", "options"),
    [
        ("", {}),
        ("layers=3", {"layers": 3}),
        ("dropout=0.5&scale=1e-3", {"dropout": 0.5, "scale": 0.001}),
        ("bias=true&tied=false&head=null", {"bias": True, "tied": False, "head": None}),
        ("act=gelu&name=a%26b", {"act": "gelu", "name": "a&b"}),
        ("sizes=[1,2]", {"sizes": [1, 2]}),
        ("empty=", {"empty": ""}),
        ("n=1&n=2", {"n": 2}),
        ("n=-4&version=1.2.3", {"n": -4, "version": "1.2.3"}),
    ],
)
def test_options_are_read(query: str, options: dict[str, object]) -> None:
    """Options are numbers, truth values and lists where they look like it, and text otherwise."""
    assert targets._options(query) == options


@pytest.mark.parametrize("text", ["", ":", "target", "file.py", "file.py:", ":function", "C:"])
def test_a_text_that_names_nothing_is_explained(text: str) -> None:
    """A text without a place and a function is refused with all the forms that exist."""
    with pytest.raises(InvalidRequestError, match=re.escape("expected file.py:function, package.module:function, demo:gpt")):
        load_target(text)


@pytest.mark.parametrize("text", ["demo", "demo:", "demo:bert", "demo:?layers=1", "demo:GPT"])
def test_an_unknown_demo_names_the_known_ones(text: str) -> None:
    """A demo that does not exist is refused with those that do."""
    with pytest.raises(InvalidRequestError, match=r"is not built in; expected demo:gpt or demo:resnet\."):
        load_target(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("demo:gpt?depth=3", "depth"),
        ("demo:resnet?layers=3", "layers"),
        ("demo:gpt?layers=many", "layers='many' is not possible"),
        ("demo:gpt?layers=1.5", "layers=1.5 is not possible"),
        ("demo:gpt?width=30", "width=30 cannot be divided over heads=4"),
        ("demo:gpt?heads=0", "heads=0 is not possible"),
        ("demo:gpt?layers=0", "layers=0 is not possible"),
        ("demo:gpt?layerz=2", "expected of vocabulary, seq_len, layers, width, heads"),
        ("demo:resnet?classes=-1", "-1"),
        ("demo:gpt?vocabulary=-1", "-1"),
    ],
)
def test_a_demo_that_cannot_be_built_so_is_refused(text: str, said: str) -> None:
    """An option that a demo does not have, or a value that it cannot use, is refused as autoaccum's own error."""
    expected = re.escape(f"target {text!r} cannot be built with these options: ") + f".*{re.escape(said)}"
    with pytest.raises(InvalidRequestError, match=expected):
        load_target(text)


def test_the_last_colon_separates_the_function(tmp_path: Path) -> None:
    """A path may contain colons, as a drive letter does: the function is what follows the last one."""
    file = tmp_path / "with:colon.py"
    file.write_text("import torch\ndef build():\n    return torch.nn.Linear(3, 2), torch.randn(2, 3)\n")
    assert load_target(f"{file}:build").num_trainable == 8


@pytest.mark.parametrize(
    "text",
    ["9" * 5000, "[" * 100_000, "nan", "1e999999", "-" + "9" * 10_000],
    ids=["digits", "nesting", "nan", "infinity", "negative"],
)
def test_option_that_no_number_can_hold_is_refused(text: str) -> None:
    """A value that JSON readers choke on is an option like any other that a demo cannot use."""
    with pytest.raises(InvalidRequestError, match="cannot be built with these options"):
        load_target(f"demo:gpt?layers={text}")


@pytest.mark.parametrize("text", ["demo:gpt?layers=1000000000", "demo:resnet?blocks=10001"])
def test_endless_model_is_refused(text: str) -> None:
    """So many layers that building them would not end are refused before the first one."""
    with pytest.raises(InvalidRequestError, match="expected at most 10000"):
        load_target(text)


@pytest.mark.parametrize("filler", ["x" * 10**6, "\x1b[31m\n", "%1b%0a", "\x00"], ids=["long", "escape", "quoted", "zero"])
@pytest.mark.parametrize("form", ["{}", "{}:f", "demo:{}", "demo:gpt?{}=1", "{}.py:f", "os:{}", "hf:{}"])
def test_error_about_a_target_is_one_short_line(form: str, filler: str) -> None:
    """The text is shown shortened and without control characters, whatever is wrong with it."""
    with pytest.raises(InvalidRequestError) as caught:
        load_target(form.format(filler))
    assert len(str(caught.value)) < 1000 and str(caught.value).isprintable()
