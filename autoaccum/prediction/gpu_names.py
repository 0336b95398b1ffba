"""Which GPU a name or a size stands for, when the card itself is not there.

Must never ask a driver or import torch.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import NamedTuple

from autoaccum.errors import InvalidRequestError
from autoaccum.prediction.gpus import GPUS, Gpu
from autoaccum.units import Share, format_bytes, parse_size, shown

# Words of a device name that say nothing about which memory it has: "NVIDIA A100-SXM4-40GB", "NVIDIA B300 SXM6 AC".
_BRANDS = re.compile(r"^(?:nvidia|geforce|tesla|rtx|gtx|amd|radeon|rx|instinct)+")
_EDITION = re.compile(r"sxm\d*|pcie|hbm\d?e?|oam|ac|gcd|gpu|generation|tensor|core|server|workstation|max|q|edition")
_MEMORY = re.compile(r"(\d+)g(?:b|ib)?")
_SIZE = re.compile(r"\s*[-+]?[\d.]+\s*(?:%|[kmgtp]?i?b?)\s*", re.ASCII | re.IGNORECASE)

# What torch calls a device whose name would mislead: the 480 GB of a GH200 are its CPU's.
_DEVICE_NAMES = {
    "gh200 480": "gh200 96",
    "mi250xmi250": "mi250x",
    "v100s": "v100",
    "v100s 32": "v100 32",
}


class _Wanted(NamedTuple):
    """A name without what does not tell cards apart: "3060ti" and the gigabytes, "" where not written."""

    model: str
    memory: str


def _wanted(name: str) -> _Wanted:
    text = re.sub(r"(\d)[\s_-]+(gi?b)\b", r"\1\2", name.lower())
    words = [_BRANDS.sub("", word) for word in re.findall(r"[a-z0-9]+", text)]
    words = [word for word in words if not _EDITION.fullmatch(word)]
    memory = sorted({match[1] for word in words if (match := _MEMORY.fullmatch(word))})
    model = "".join(word for word in words if not _MEMORY.fullmatch(word))
    key = " ".join([model, *memory])
    model, _, sizes = _DEVICE_NAMES.get(key, key).partition(" ")
    return _Wanted(model, sizes)


_WANTED = {gpu.name: _wanted(gpu.name) for gpu in GPUS}


def gpu_for(asked: str | int | Gpu) -> Gpu:
    """The GPU that a name or a size stands for.

    Args:
        asked: A name as people or torch write it ("RTX 3060", "a100 80gb", "NVIDIA A100-SXM4-80GB"), a size ("24GiB",
            bytes as an int) for a card that is not in the table, or a `Gpu`, which is returned as it is.

    Returns:
        A row of `GPUS`, or, for a size, a GPU of that total with the kernels and workspaces of compute capability 8.6 and
        the context of its largest card.

    Raises:
        InvalidRequestError: When the name is unknown or leaves open which memory size, or the size cannot be used.

    Example:
        >>> gpu_for("nvidia geforce rtx 3060").name, gpu_for("24GiB").name
        ('RTX 3060 12GB', '24.00 GiB GPU')
    """
    if isinstance(asked, Gpu):
        return asked
    if not isinstance(asked, str):
        return _unnamed(asked)
    found = _named(asked)
    if len(found) == 1:
        return found[0]
    if found:
        raise InvalidRequestError(f"gpu={shown(asked)} is sold with several memory sizes; expected one of {_listed(found)}.")
    if _SIZE.fullmatch(asked):
        return _unnamed(asked)
    raise _unknown(asked)


def gpus_for(asked: str | int | Gpu | Sequence[str | int | Gpu]) -> tuple[Gpu, ...]:
    """The GPUs that are asked for, the smallest first.

    Raises:
        InvalidRequestError: When one is not known.
    """
    several = [asked] if isinstance(asked, (str, int, Gpu)) else asked
    if not isinstance(several, (list, tuple)) or not several:
        raise InvalidRequestError(
            f"gpu={shown(asked)} is no GPU; expected a name, a size such as '24GiB', a list of these, or 'all'."
        )
    if any(isinstance(one, str) and one.strip().lower() == "all" for one in several):
        return GPUS
    return tuple(sorted((gpu_for(one) for one in several), key=lambda gpu: gpu.total_bytes))


def _named(asked: str) -> list[Gpu]:
    wanted = _wanted(asked)
    alike = [gpu for gpu in GPUS if _WANTED[gpu.name].model == wanted.model]
    return [gpu for gpu in alike if wanted.memory in ("", _WANTED[gpu.name].memory)]


def _unnamed(size: object) -> Gpu:
    total_bytes = parse_size(size, "gpu")
    if isinstance(total_bytes, Share):
        raise InvalidRequestError(f'gpu={shown(size)} is a share of nothing; expected a name, or a size such as "24GiB".')
    alike = max((gpu for gpu in GPUS if gpu.compute_capability == (8, 6)), key=lambda gpu: gpu.context_bytes)
    if total_bytes <= alike.context_bytes:
        raise InvalidRequestError(
            f"gpu={shown(size)} is {format_bytes(total_bytes)}, no more than the {format_bytes(alike.context_bytes)} of a "
            'CUDA context; expected the memory of the whole card, such as "24GiB".'
        )
    return Gpu(
        name=f"{format_bytes(total_bytes)} GPU",
        total_bytes=total_bytes,
        compute_capability=alike.compute_capability,
        architecture=alike.architecture,
        context_bytes=alike.context_bytes,
        source="given by the caller",
    )


def _unknown(asked: str) -> InvalidRequestError:
    wanted = "".join(_wanted(asked[:64]))
    keys = {"".join(_WANTED[gpu.name]): gpu for gpu in GPUS}
    near = [keys[key] for key in difflib.get_close_matches(wanted, keys, n=3, cutoff=0.0)]
    return InvalidRequestError(
        f"gpu={shown(asked)} is not a GPU that autoaccum knows; the nearest are {_listed(near)}. "
        'Bytes such as "24GiB" are accepted too.'
    )


def _listed(gpus: list[Gpu]) -> str:
    return ", ".join(repr(gpu.name) for gpu in gpus)
