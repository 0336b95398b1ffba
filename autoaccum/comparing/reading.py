"""What a comparison is given: the files of two runs, and how much worse the new one may be."""

from __future__ import annotations

import re
from contextlib import suppress

import msgspec

from autoaccum.comparing.records import Run
from autoaccum.errors import InvalidRequestError
from autoaccum.records import LARGEST, PlanRecord, ProbeResult, from_json, numbers_in, plain
from autoaccum.units import one_line, shown

_NOT_COMPARED = ("memory", "prediction", "timeline")  # parts of a file whose numbers are not looked at
_SHARE = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)( ?%)?", re.ASCII)


def parse_max_regression(value: str) -> float:
    """The fraction that a text such as "5%" or "0.05" stands for, from 0 to below 1.

    Raises:
        InvalidRequestError: When it cannot be read, could mean two things, or is 100 % or more.

    Example:
        >>> parse_max_regression("5%"), parse_max_regression("5 %"), parse_max_regression("0.05")
        (0.05, 0.05, 0.05)
    """
    expected = 'expected a share from 0 % to below 100 %, such as "5%" or "0.05"'
    match = _SHARE.fullmatch(value.strip()) if len(value) <= 32 else None
    if match is None:
        raise InvalidRequestError(f"max_regression={shown(value)} cannot be read; {expected}.")
    number, is_percent = float(match[1]), match[2] is not None
    if not is_percent and number >= 1:
        raise InvalidRequestError(
            f"max_regression={shown(value)} could mean {match[1]} % or {match[1]} times as much; write a % sign: {expected}."
        )
    if number >= 100:
        raise InvalidRequestError(f"max_regression={shown(value)} would allow everything; {expected}.")
    return number / 100 if is_percent else number


class _Tag(msgspec.Struct):
    record: str = ""


def read_run(text: bytes | str, name: str) -> Run:
    """The Plan or ProbeResult that a file holds; nothing in it is ever evaluated.

    Args:
        name: What the file is called in the error.

    Raises:
        InvalidRequestError: When it is damaged, of a newer schema, something else, or holds numbers that cannot be.
    """
    tag = ""
    with suppress(msgspec.MsgspecError, UnicodeError, RecursionError):  # `from_json` says what is wrong
        tag = msgspec.json.decode(text, type=_Tag).record
    kind: type[PlanRecord] | type[ProbeResult] = ProbeResult if tag == "autoaccum.ProbeResult" else PlanRecord
    try:
        run = from_json(text, kind)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{one_line(name)}: {one_line(str(error), 400)}") from None
    used = {name: value for name, value in plain(run).items() if name not in _NOT_COMPARED}
    if not all(0 <= number <= LARGEST for number in numbers_in(used)):
        raise InvalidRequestError(f"{one_line(name)}: a size, time or count is negative or beyond reason. Was it edited?")
    return run
