"""The picture of one optimizer step: what is refused before the work, and what is drawn."""

from __future__ import annotations

import builtins
import errno
import os
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest

from autoaccum.errors import AutoaccumError, InvalidRequestError, MissingExtraError
from autoaccum.report.picture import Timeline, drawing_to

PNG = b"\x89PNG\r\n\x1a\n"
GIB = 2**30


def timeline(limit_bytes: int | None = 4 * GIB, **held: tuple[int, ...]) -> Timeline:
    """A step of six events with the peak at the fourth."""
    known = held or {"weights": (GIB,) * 6, "activations": (0, GIB // 2, GIB, 2 * GIB, GIB, 0), "batch": (0,) * 6}
    return Timeline(
        title="One optimizer step <on> a GPU & more",
        held_bytes=known,
        phases=((0, "data"), (1, "forward"), (3, "backward"), (5, "optimizer")),
        limit_bytes=limit_bytes,
    )


@pytest.mark.parametrize("name", ["step.pdf", "step", "step.svg.txt", ".svg"])
def test_other_endings_are_refused(name: str, tmp_path: Path) -> None:
    """A file that is neither .svg nor .png is refused before anything is drawn, with what is expected."""
    with pytest.raises(InvalidRequestError, match=r"\.svg or \.png"):
        drawing_to(tmp_path / name)


def test_missing_folder_is_refused(tmp_path: Path) -> None:
    """A folder that is not there is refused before the work, by its name."""
    with pytest.raises(InvalidRequestError, match="nowhere"):
        drawing_to(tmp_path / "nowhere" / "step.svg")


@pytest.mark.parametrize("path", [5, None, b"step.svg"])
def test_what_is_no_file_name_is_refused(path: Any) -> None:
    """A number, for example, is refused with what is expected."""
    with pytest.raises(InvalidRequestError, match=r"picture=.* is a \w+; expected a file name"):
        drawing_to(path)


def test_folder_that_cannot_be_written_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder without permission to write is refused before the work."""
    monkeypatch.setattr(os, "access", lambda place, mode: False)  # a mode stops no superuser
    with pytest.raises(InvalidRequestError, match="cannot be written there"):
        drawing_to(tmp_path / "step.svg")


def test_folder_in_place_of_the_picture_is_refused(tmp_path: Path) -> None:
    """A folder that bears the picture's name is refused before the work."""
    (tmp_path / "step.svg").mkdir()
    with pytest.raises(InvalidRequestError, match="cannot be written there"):
        drawing_to(tmp_path / "step.svg")


def test_full_disk_leaves_the_picture_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture that cannot be written whole is told, and the one before stays."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    path = tmp_path / "step.svg"
    path.write_text("the one before")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(AutoaccumError, match="could not be written: No space left on device"):
        drawing_to(path)(timeline())
    assert path.read_text() == "the one before" and list(tmp_path.iterdir()) == [path]


def test_matplotlib_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without matplotlib the pip command is shown."""
    real = builtins.__import__

    def without(name: str, *args: Any, **more: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError, match=r'pip install "autoaccum\[plot\]"'):
        drawing_to(tmp_path / "step.svg")


def test_asking_writes_nothing(tmp_path: Path) -> None:
    """Nothing is written before there is something to draw."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    drawing_to(tmp_path / "step.svg")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["step.png", "STEP.PNG"])
def test_png_is_one(name: str, tmp_path: Path) -> None:
    """A .png file is a PNG, however its ending is written."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    drawing_to(str(tmp_path / name))(timeline())
    assert (tmp_path / name).read_bytes().startswith(PNG)


def svg_of(drawn: Timeline, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The picture as SVG whose letters stay letters."""
    matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    drawing_to(folder / "step.svg")(drawn)
    return (folder / "step.svg").read_text(encoding="utf-8")


def words(svg: str) -> list[str]:
    """All texts of an SVG."""
    found = xml.etree.ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    return ["".join(element.itertext()).strip() for element in found]


def test_svg_says_what_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An .svg file is sound XML with the title, every kind that is held, the peak in words and the limit."""
    found = words(svg_of(timeline(), tmp_path, monkeypatch))
    assert {"One optimizer step <on> a GPU & more", "weights", "activations", "limit", "peak 3.00 GiB"} <= set(found)


def test_kinds_that_hold_nothing_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind that is never held has no place in the legend."""
    assert "batch" not in words(svg_of(timeline(), tmp_path, monkeypatch))


def test_phases_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Phases that are wide enough bear their names."""
    assert {"forward", "backward"} <= set(words(svg_of(timeline(), tmp_path, monkeypatch)))


def test_without_a_limit_there_is_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no limit, none is drawn."""
    assert "limit" not in words(svg_of(timeline(limit_bytes=None), tmp_path, monkeypatch))


def test_picture_replaces_the_one_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second picture takes the place of the first."""
    svg_of(timeline(), tmp_path, monkeypatch)
    found = words(svg_of(timeline(held=(GIB, GIB, GIB, GIB, 2 * GIB, GIB)), tmp_path, monkeypatch))
    assert "peak 2.00 GiB" in found and "peak 3.00 GiB" not in found


def test_callers_figures_are_left_alone(tmp_path: Path) -> None:
    """Drawing opens no figure of pyplot and chooses no backend."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    import matplotlib.pyplot as plt

    before = plt.get_fignums()
    drawing_to(tmp_path / "step.png")(timeline())
    assert plt.get_fignums() == before
