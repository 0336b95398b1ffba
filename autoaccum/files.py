"""Writing a report so that a reader never sees half of one."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from autoaccum.errors import InvalidRequestError
from autoaccum.units import format_bytes, shown

MOST_BYTES = 32 * 2**20  # a plan with hundreds of trials takes one MiB


def read_bounded(path: Path) -> bytes:
    """What the file holds, as far as a run can be that large: /dev/zero and disk images are not taken into memory.

    Raises:
        InvalidRequestError: When it is larger than any run.
        OSError: When it cannot be read.
    """
    with path.open("rb") as file:
        found = file.read(MOST_BYTES + 1)
    if len(found) > MOST_BYTES:
        raise InvalidRequestError(
            f"{shown(str(path), 200)} is larger than {format_bytes(MOST_BYTES)}, which no run is; "
            "expected a file that autoaccum wrote."
        )
    return found


def write_whole(path: Path, content: str | bytes) -> None:
    """Write text or bytes to the file; a file that is there is replaced as a whole, or stays as it is on an error.

    Raises:
        OSError: When the folder is missing, not writable or full; no temporary file is left.
    """
    encoded = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():  # /dev/stdout and the like cannot be replaced
        path.write_bytes(encoded)
        return
    path = path.resolve()  # a link stays a link: /dev/stdout is one, and may lead to a file
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(encoded)
        Path(name).chmod(0o666 & ~_umask())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
