"""A picture of memory over one optimizer step: stacked by what holds it, with the peak and the limit. Needs matplotlib."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from autoaccum.errors import AutoaccumError, InvalidRequestError, MissingExtraError
from autoaccum.files import write_whole
from autoaccum.records import Phase, Timeline
from autoaccum.units import format_bytes, shown

_FORMATS = (".svg", ".png")
_SHADES: dict[Phase, str] = {"data": "#ffffff", "forward": "#f2f2f2", "backward": "#e2e2e2", "optimizer": "#d0d0d0"}
_GIB = 2**30


def drawing_to(path: str | Path) -> Callable[[Timeline], None]:
    """What draws to this file. Asked for before the work, so that a mistake shows before it and not after.

    Raises:
        InvalidRequestError: When it is no file name, has another ending, or its folder is not there or cannot be written to.
        MissingExtraError: When matplotlib is not installed, with the pip command.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise InvalidRequestError(f"picture={shown(path)} is a {type(path).__name__}; expected a file name.")
    target = Path(path)
    if target.suffix.lower() not in _FORMATS:
        raise InvalidRequestError(
            f"picture={shown(str(path), 300)} cannot be drawn; expected a file name that ends in .svg or .png."
        )
    if not target.absolute().parent.is_dir():
        raise InvalidRequestError(f"the folder of picture={shown(str(path), 300)} does not exist.")
    if target.is_dir() or not os.access(target.absolute().parent, os.W_OK):
        raise InvalidRequestError(
            f"picture={shown(str(path), 300)} cannot be written there; expected a file in a folder of your own."
        )
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError('matplotlib is not installed. Install it: python -m pip install "autoaccum[plot]"') from None

    def draw(timeline: Timeline) -> None:
        figure = Figure(figsize=(11, 5), layout="constrained")
        _fill(figure.subplots(), timeline)
        drawn = io.BytesIO()
        figure.savefig(drawn, format=target.suffix.lower()[1:])
        try:
            write_whole(target, drawn.getvalue())
        except OSError as error:
            raise AutoaccumError(
                f"picture={shown(str(path), 300)} could not be written: {error.strerror or error}."
            ) from None

    return draw


def _fill(axes: Any, timeline: Timeline) -> None:
    shown = {kind: [held / _GIB for held in row] for kind, row in timeline.held_bytes.items() if any(row)}
    total = [sum(column) for column in zip(*shown.values(), strict=True)]
    events = range(len(total))
    ends = [event for event, _ in timeline.phases[1:]] + [len(total)]
    for (begin, phase), end in zip(timeline.phases, ends, strict=True):
        axes.axvspan(begin, end, color=_SHADES[phase], zorder=0)
    axes.stackplot(events, list(shown.values()), labels=list(shown), step="post")
    peak = max(events, key=lambda event: total[event])
    axes.plot([peak], [total[peak]], "v", color="black")
    axes.annotate(f"peak {format_bytes(int(total[peak] * _GIB))}", (peak, total[peak]), xytext=(0, 8), **_CENTRED)
    if timeline.limit_bytes is not None:
        axes.axhline(timeline.limit_bytes / _GIB, color="black", linestyle="--", label="limit")
    for (begin, phase), (end, _) in pairwise((*timeline.phases, (len(total), "data"))):
        if end - begin > len(total) / 12:
            axes.text((begin + end) / 2, 0, f" {phase}", va="bottom", ha="center", fontsize=8)
    axes.set(title=timeline.title, xlabel="allocations and frees, in order", ylabel="GiB allocated", xlim=(0, len(total)))
    axes.margins(y=0.15)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


_CENTRED = {"textcoords": "offset points", "ha": "center"}
