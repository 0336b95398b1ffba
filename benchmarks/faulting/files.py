"""Damaged files that a search goes on from: a remembered plan, and a study in a journal or in SQLite.

Whatever is in them, the search ends with the plan that it would have found without, or refuses the file by its name.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import autoaccum
from faulting.bench import Bench
from faulting.injection import Injector
from faulting.record import Case
from faulting.searching import quick_searches
from faulting.state import differences, surroundings, training_state

FILE_KINDS = ("corrupt cache", "corrupt study", "read-only cache")
_CUTS = 8  # places at which a file is cut off, and at which bytes are changed
_TARGET = 14

Damage = Callable[[bytes], bytes]


def damages(size: int) -> dict[str, Damage]:
    """Ways to damage a file of this size."""
    at = [size * index // _CUTS for index in range(_CUTS)]
    found: dict[str, Damage] = {f"cut off after {place} bytes": lambda text, place=place: text[:place] for place in at}  # type: ignore[misc]
    found |= {f"a byte changed at {place}": lambda text, place=place: _changed(text, place, b"\xff") for place in at}  # type: ignore[misc]
    found |= {f"a digit or letter changed at {place}": lambda text, place=place: _changed(text, place, b"7") for place in at}  # type: ignore[misc]
    return found | {
        "random bytes": lambda text: os.urandom(len(text)),
        "zeros": lambda text: bytes(len(text)),
        "twice": lambda text: text + text,
        "no JSON behind it": lambda text: text + b"{]\n",
        "null": lambda text: b"null",
        "nested": lambda text: b"[" * 100_000,
    }


def _changed(text: bytes, place: int, byte: bytes) -> bytes:
    return text[:place] + byte + text[place + 1 :]


def file_cases(kinds: Collection[str]) -> Iterator[Case]:
    """Every damage to every file."""
    if not set(kinds) & set(FILE_KINDS):
        return
    with tempfile.TemporaryDirectory() as place, quick_searches():
        folder = Path(place)
        if "corrupt cache" in kinds:
            yield from _damaged(folder / "plans", "corrupt cache", {"cache": str(folder / "plans")})
        if "corrupt study" in kinds:
            yield from _damaged(folder / "a", "corrupt study", {"storage": str(folder / "a" / "runs.log")})
            yield from _damaged(folder / "b", "corrupt study", {"storage": f"sqlite:///{folder / 'b' / 'runs.db'}"})
        if "read-only cache" in kinds:
            yield from _unwritable(folder)


def _search(bench: Bench, **more: Any) -> autoaccum.Plan:
    return autoaccum.autotune(
        bench.model,
        bench.sample,
        _TARGET,
        training_step=bench.step,
        optimizer=bench.optimizer,
        device="virtual:1GiB",
        levers="none",
        progress=False,
        **more,
    )


def _damaged(folder: Path, kind: str, given: dict[str, str]) -> Iterator[Case]:
    folder.mkdir(exist_ok=True)
    bench = Bench(Injector()).with_oddities()
    size = _search(bench, **given).micro_batch
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    for index, (name, damage) in enumerate(damages(len(whole)).items()):
        for other in folder.iterdir():
            other.unlink()
        path.write_bytes(damage(whole))
        before = [training_state(bench.model, bench.optimizer), surroundings(bench.model, bench.optimizer)]
        problems = []
        try:
            plan = _search(bench, **given)
            if plan.micro_batch != size:
                problems.append(f"found {plan.micro_batch} instead of {size}")
        except autoaccum.AutoaccumError as error:
            if path.name not in str(error) or kind == "corrupt cache":
                problems.append(f"it raised {error!r}")
        except Exception as error:  # noqa: BLE001 - that is what is to be found
            problems.append(f"it raised {type(error).__name__}: {error}")
        after = [training_state(bench.model, bench.optimizer), surroundings(bench.model, bench.optimizer)]
        problems += [f"{found} after it" for found in differences(before, after) if "open files" not in found]
        problems += [f"left {other.name}" for other in folder.iterdir() if not other.name.startswith(path.name)]
        yield Case("autotune", kind, f"{path.suffix[1:]}: {name.rstrip('0123456789 ')}", index, tuple(problems))


def _unwritable(folder: Path) -> Iterator[Case]:
    """Modes do not stop a superuser; what cannot hold a folder does."""
    (folder / "file").write_text("no folder")
    bench = Bench(Injector()).with_oddities()
    for index, cache in enumerate(("/proc/here", str(folder / "file"), str(folder / "file" / "below"), "/dev/null")):
        problems = []
        try:
            plan = _search(bench, cache=cache)
            if not any("could not be remembered" in warning for warning in plan.warnings):
                problems.append("the plan does not say so")
        except Exception as error:  # noqa: BLE001 - that is what is to be found
            problems.append(f"it raised {type(error).__name__}: {error}")
        yield Case("autotune", "read-only cache", "cache", index, tuple(problems))
    with suppress(FileNotFoundError):
        (folder / "file").unlink()
