"""The tests that need a GPU, those of the device contract among them, as pytest runs them."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autoaccum.devices.base import AbstractDevice

from .common import is_cuda

ROOT = Path(__file__).resolve().parents[2]
TESTS = (
    "tests/devices/test_contract.py",
    "tests/devices/test_cuda.py",
    "tests/prediction/test_allocator.py",
    "tests/levers/test_checkpointing.py",
    "tests/test_real_memory.py",
)


def run(device: AbstractDevice, tests: tuple[str, ...] = TESTS) -> Iterator[dict[str, Any]]:
    """The number of tests that passed, and every one that did not. On another device: its own part of the contract."""
    chosen = ["-m", "gpu"] if is_cuda(device) else ["-k", "virtual"]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "--numprocesses=0", f"--junitxml={report}", *chosen, *tests]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if not report.exists():
            raise RuntimeError(f"pytest ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
        yield from rows_of(report.read_text(encoding="utf-8"))


def rows_of(xml: str) -> Iterator[dict[str, Any]]:
    """A report in JUnit's format as rows: one for all, one for each test that failed or was left out."""
    cases = list(ET.fromstring(xml).iter("testcase"))
    bad = [(case, child) for case in cases for child in case if child.tag in ("failure", "error", "skipped")]
    failed = [(case, child) for case, child in bad if child.tag != "skipped"]
    passed = len(cases) - len({id(case) for case, _ in bad})
    yield {"case": "all", "passed": passed, "failed": len(failed), "ok": bool(passed) and not failed}
    for case, child in bad:
        name = f"{case.get('classname')}::{case.get('name')}"
        yield {"case": name, "outcome": child.tag, "message": (child.get("message") or "")[:500]}
