"""Sizes, allowed regressions and GPUs, as text and as any object."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from hostile.judging import Broken
from hostile.texts import texts
from hypothesis import strategies as st

from autoaccum.comparing.reading import parse_max_regression
from autoaccum.prediction.gpus import GPUS
from autoaccum.tune import gpus_for
from autoaccum.units import Share, format_bytes, parse_size

UNITS = ("", "b", "kB", "KiB", "k", "M", "MiB", "gib", "GB", "T", "TiB", "P", "PiB", "EB", "%", " %", "bits", "\u212aB")
ODD_NUMBERS = (
    "0",
    "-1",
    "+1",
    "1e9",
    "1e999999",
    "9" * 30,
    "9" * 5000,
    "9" * 10**5,
    ".5",
    "5.",
    ".",
    "1.2.3",
    "0x1F",
    "1_000",
    "nan",
    "\u0665",
)
numbers = st.sampled_from(ODD_NUMBERS) | st.integers(0, 10**6).map(str) | st.decimals().map(str)
written = st.builds("{}{}{}".format, numbers, st.sampled_from(("", " ", "\t", "\n")), st.sampled_from(UNITS))
ODD_OBJECTS = (10**6000, -(10**6000), Fraction(1, 10**6000), [8], {}, range(3), object)
objects = st.one_of(
    st.sampled_from(ODD_OBJECTS), st.floats(), st.integers(), st.booleans(), st.none(), st.binary(max_size=8), st.fractions()
)
gpu_names = st.sampled_from([gpu.name for gpu in GPUS])
mangled = st.builds("{}{}".format, gpu_names, texts) | gpu_names.map(str.swapcase) | gpu_names.map(lambda name: name[1:])


def check_size(value: Any) -> None:
    """A size above zero that is shown and read again as itself within the digits shown."""
    parsed = parse_size(value)
    if isinstance(parsed, Share):
        if not 0 < parsed.frac <= 1:
            raise Broken(f"a share of {parsed.frac}")
        return
    if type(parsed) is not int or not 0 < parsed <= 2**62:
        raise Broken(f"a size of {parsed!r}")
    again = parse_size(format_bytes(parsed))
    if isinstance(again, Share) or not math.isclose(again, parsed, rel_tol=0.006):
        raise Broken("a size that is shown is another one when it is read")


def check_regression(text: str) -> None:
    """A fraction from 0 to below 1."""
    if not 0 <= parse_max_regression(text) < 1:
        raise Broken("more than everything is allowed")


def check_gpu(asked: Any) -> None:
    """GPUs that have memory."""
    found = gpus_for(asked)
    if not found or not all(gpu.total_bytes > 0 for gpu in found):
        raise Broken("a GPU without memory")


SIZES = written | texts | objects
REGRESSIONS = written | texts
GPU_NAMES = written | texts | mangled | objects | st.lists(written | objects, max_size=3)
