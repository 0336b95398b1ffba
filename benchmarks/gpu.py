"""What a real CUDA GPU says to everything that is claimed about one: one command, under eight minutes, two files.

    python benchmarks/gpu.py                          # writes results/gpu.json and results/gpu.md
    python benchmarks/gpu.py --sections cards,sweep   # some of them, named as in the results
    python benchmarks/gpu.py --rehearse FOLDER        # without a GPU: runs the code on a virtual device; measures nothing

Every section (on_gpu/) runs in a process of its own, inside its own time limit and what is left of all; what it has found is
written when it ends, however it ends, and the next one begins. One card is used, the first that is visible
(CUDA_VISIBLE_DEVICES chooses); nothing else should run on it. Needs `pip install ".[test]"`; with torchvision two more
models are predicted.

Exit codes: 0 all sections ran and held what they claim; 1 not all; 2 the call is wrong; 3 torch finds no CUDA GPU, nothing
was written.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpu_report import markdown
from on_gpu.common import is_cuda, on_device
from search import environment

from autoaccum.devices import CudaDevice, VirtualDevice
from autoaccum.devices.base import AbstractDevice
from autoaccum.devices.cuda import allocator_in_words, toolkit

RESULTS = Path(__file__).parent / "results" / "gpu.json"
TOTAL_S = 450.0  # of all sections; what is around them takes some ten seconds more
LEAST_S = 5.0  # a section is not begun with less than this left
NO_GPU = 3


class Section(NamedTuple):
    """A function of on_gpu that yields rows, how long it may take, and how it runs.

    Attributes:
        rehearsed: Arguments with which it takes a moment in host memory.
        environment: Of its process.
    """

    function: str
    limit_s: float
    rehearsed: dict[str, Any]
    environment: dict[str, str] = {}  # noqa: RUF012 - a NamedTuple's default, never changed


def _allocator(text: str) -> dict[str, str]:
    return {"PYTORCH_CUDA_ALLOC_CONF": text}


# In this order, the most telling ones first: what is left of the time decides about the last ones.
_TINY = "demo:gpt?layers=2&width=32&heads=2&seq_len=16&vocabulary=64"
_ROOM = {"target": _TINY, "room_bytes": 2**20}
SECTIONS = {
    "contract": Section("contract.run", 90, {"tests": ("tests/devices/test_contract.py",)}),
    "predicted": Section("predicted.run", 100, {"models": {"gpt": partial(on_device, _TINY)}, "sizes": (2, 8)}),
    "history": Section("history.run", 40, {}),
    "history, expandable segments": Section("history.run", 40, {}, _allocator("expandable_segments:True")),
    "history, rounded to quarters of powers of two": Section(
        "history.run", 40, {}, _allocator("roundup_power2_divisions:4")
    ),
    "cards": Section("cards.run", 110, {"models": {"gpt": _TINY}, "cards_bytes": (2**21, 2**22, 2**40)}),
    "failures": Section("failures.run", 50, {}),
    "restored": Section("restored.run", 80, _ROOM),
    "sweep": Section("speed.sweep", 100, {**_ROOM, "target_batch": 4, "tuning_s": 5.0, "sweeping_s": 5.0}),
    "overhead": Section("speed.windows", 40, {"settings": ((8, 1, 16, 4),)}),
}


# -- in a process of its own


def answer(name: str, device: AbstractDevice, answers: Path) -> None:
    """Run a section; each row goes into the file when it is there."""
    module, function = SECTIONS[name].function.split(".")
    arguments = {} if is_cuda(device) else SECTIONS[name].rehearsed
    rows = getattr(importlib.import_module(f"on_gpu.{module}"), function)(device, **arguments)
    with answers.open("a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
            file.flush()


def device_of(name: str) -> AbstractDevice:
    """The first visible card, or a virtual device for a rehearsal."""
    return CudaDevice(0) if name == "cuda" else VirtualDevice(name.removeprefix("virtual:"))


# -- in the process that starts them


def run_section(name: str, command: Sequence[str], limit_s: float, variables: dict[str, str]) -> dict[str, Any]:
    """What came of a section inside this time: its rows, and how it ended.

    Args:
        name: Of the section.
        command: Writes the rows into the file that is named as its last argument, one in a line.
        limit_s: Seconds after which it is killed, with all that it has started.
        variables: Of its environment, besides this one's.
    """
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        answers, errors = Path(folder) / "answers", Path(folder) / "errors"
        answers.touch()
        with errors.open("wb") as file:
            process = subprocess.Popen(
                [*command, str(answers)],
                stdout=file,
                stderr=file,
                env={**os.environ, "HF_HUB_OFFLINE": "1", **variables},
                start_new_session=True,
            )
            ended = _ended(process, limit_s)
        rows = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
        said = errors.read_text(encoding="utf-8", errors="replace")[-3000:] if ended != "done" else ""
    held = all(row.get("ok", True) for row in rows)
    return {
        "section": name,
        "ended": ended,
        "ok": ended == "done" and bool(rows) and held,
        "seconds": round(time.monotonic() - begun, 1),
        "rows": rows,
        "said": said,
    }


def _ended(process: subprocess.Popen[bytes], limit_s: float) -> str:
    """How a process ended: "done", "failed (-11)", or "out of time" and killed with all that it started."""
    try:
        code = process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return "out of time"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return "done" if code == 0 else f"failed ({code})"


def run_all(names: Sequence[str], device: str, path: Path, about: dict[str, Any]) -> dict[str, Any]:
    """Run sections one after the other; what is known is written after each."""
    begun = time.monotonic()
    report: dict[str, Any] = {"environment": about, "sections": []}
    for name in names:
        left_s = TOTAL_S - (time.monotonic() - begun)
        if left_s < LEAST_S:
            found = {
                "section": name,
                "ended": "not begun: no time was left",
                "ok": False,
                "seconds": 0,
                "rows": [],
                "said": "",
            }
        else:
            command = [sys.executable, __file__, "--device", device, "--answer", name]
            found = run_section(name, command, min(left_s, SECTIONS[name].limit_s), SECTIONS[name].environment)
        report["sections"].append(found)
        report["seconds"] = round(time.monotonic() - begun, 1)
        write(report, path)
        print(f"{name}: {found['ended']}, {len(found['rows'])} rows, {found['seconds']} s", flush=True)
    return report


def write(report: dict[str, Any], path: Path) -> None:
    """Write JSON, and the same as tables."""
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(markdown(report), encoding="utf-8")


def of_card() -> dict[str, Any]:
    """What the figures depend on. Asked in a process that ends, so that this one holds nothing on the card."""
    code = "import gpu, json; print(json.dumps(gpu.described(gpu.device_of('cuda'))))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def described(device: AbstractDevice) -> dict[str, Any]:
    """A device in words and figures."""
    return {
        **environment(),
        "gpu": device.description(),
        "total_bytes": device.total_bytes(),
        "toolkit": toolkit(),
        "allocator": allocator_in_words(os.environ),
        "others": [f"{holder.name} {holder.held_bytes}" for holder in device.holders()],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run everything, some of it, or one section for another process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", help="names, with commas between them")
    parser.add_argument("--rehearse", type=Path, metavar="FOLDER", help="run the code on a virtual device, write there")
    parser.add_argument("--answer", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--device", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.answer:
        answer(asked.answer[0], device_of(asked.device), Path(asked.answer[1]))
        return 0
    names = chosen(asked.sections, parser)
    if asked.rehearse:
        asked.rehearse.mkdir(parents=True, exist_ok=True)
        about = {"gpu": "none: a rehearsal on a virtual device, no figure here says anything about a GPU", "rehearsal": True}
        report = run_all(names, "virtual:64GiB", asked.rehearse / "rehearsal.json", about)
    elif not torch.cuda.is_available():
        print("torch finds no CUDA GPU in this process: nothing was measured and nothing was written.")
        return NO_GPU
    else:
        report = run_all(names, "cuda", RESULTS, of_card())
    return 0 if all(section["ok"] for section in report["sections"]) else 1


def chosen(text: str | None, parser: argparse.ArgumentParser) -> list[str]:
    """The sections that were asked for by the beginnings of their names, in the order in which they run."""
    if text is None:
        return list(SECTIONS)
    beginnings = tuple(filter(None, (part.strip() for part in text.split(","))))
    unknown = [part for part in beginnings if not any(name.startswith(part) for name in SECTIONS)]
    if unknown or not beginnings:
        parser.error(f"no section begins with {', '.join(unknown) or 'nothing'}; there are: {'; '.join(SECTIONS)}")
    return [name for name in SECTIONS if name.startswith(beginnings)]


if __name__ == "__main__":
    sys.exit(main())
