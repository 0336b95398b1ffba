"""A report is on the disk whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from autoaccum.errors import InvalidRequestError
from autoaccum.files import read_bounded, write_whole


def listed(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_text_is_written(tmp_path: Path) -> None:
    """The file holds exactly the text, as UTF-8, and is the only one in its folder."""
    write_whole(tmp_path / "plan.json", "größer\n")
    assert (tmp_path / "plan.json").read_bytes() == "größer\n".encode()
    assert listed(tmp_path) == ["plan.json"]


def test_bytes_are_written(tmp_path: Path) -> None:
    """Bytes, of a picture for example, are written as they are."""
    write_whole(tmp_path / "step.png", b"\x89PNG\r\n")
    assert (tmp_path / "step.png").read_bytes() == b"\x89PNG\r\n"


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    """A longer file that was there is gone, and a reader that has it open still reads all of the old one."""
    path = tmp_path / "plan.json"
    path.write_text("the old and longer text")
    with path.open() as reader:
        write_whole(path, "new")
        assert reader.read() == "the old and longer text"
    assert path.read_text() == "new"


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("step", ["chmod", "replace"])
def test_an_error_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, step: str
) -> None:
    """When writing fails or is interrupted, the file that was there is as before, and no temporary file is left."""
    path = tmp_path / "plan.json"
    path.write_text("old")

    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr(Path, step, fail)
    with pytest.raises(type(error)):
        write_whole(path, "new")
    assert path.read_text() == "old" and listed(tmp_path) == ["plan.json"]


def test_a_text_that_cannot_be_encoded_leaves_the_old_file(tmp_path: Path) -> None:
    """A text with a lone surrogate raises, and the file that was there is as before."""
    path = tmp_path / "plan.json"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "new \udce9")
    assert path.read_text() == "old" and listed(tmp_path) == ["plan.json"]


def test_missing_folder(tmp_path: Path) -> None:
    """A folder that does not exist is an error, and is not made."""
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "nowhere" / "plan.json", "new")
    assert listed(tmp_path) == []


@pytest.mark.skipif(os.name != "posix", reason="file modes are POSIX")
@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_mode_follows_the_umask(tmp_path: Path, mask: int, mode: int) -> None:
    """The file can be read by whom the user's umask allows, and the umask itself is as before."""
    before = os.umask(mask)
    try:
        write_whole(tmp_path / "plan.json", "new")
        now = os.umask(mask)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "plan.json").stat().st_mode) == mode
    assert now == mask


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes are POSIX")
def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    """What is there and is no file, such as a pipe, gets the text and is not replaced."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, "new")
    assert os.read(reader, 100) == b"new"
    os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_stays_a_link(tmp_path: Path, is_there: bool) -> None:
    """A symbolic link is followed: what it leads to gets the text, in its own folder, whether or not it is there yet."""
    (tmp_path / "runs").mkdir()
    if is_there:
        (tmp_path / "runs" / "1.json").write_text("old")
    link = tmp_path / "latest.json"
    link.symlink_to("runs/1.json")
    write_whole(link, "new")
    assert link.is_symlink() and (tmp_path / "runs" / "1.json").read_text() == "new"
    assert listed(tmp_path / "runs") == ["1.json"]


def test_a_name_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bare name is written into the current folder."""
    monkeypatch.chdir(tmp_path)
    write_whole(Path("plan.json"), "new")
    assert (tmp_path / "plan.json").read_text() == "new" and listed(tmp_path) == ["plan.json"]


def test_file_is_read_whole(tmp_path: Path) -> None:
    """What a file holds comes as bytes."""
    (tmp_path / "plan.json").write_bytes(b"\xff{}")
    assert read_bounded(tmp_path / "plan.json") == b"\xff{}"


def test_file_without_end_is_refused() -> None:
    """A file that is larger than any run is not taken into memory."""
    with pytest.raises(InvalidRequestError, match=r"'/dev/zero' is larger than 32\.00 MiB"):
        read_bounded(Path("/dev/zero"))
