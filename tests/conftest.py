"""One hypothesis profile for all tests: the same examples in every run, and no deadline, because CI machines stall."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

import autoaccum

settings.register_profile("autoaccum", deadline=None, derandomize=True, max_examples=100)
settings.load_profile("autoaccum")

RunChild = Callable[..., Any]


@pytest.fixture(scope="session")
def run_child() -> RunChild:
    """Run Python source in a process of its own, where limits, allocator settings and peaks are its own.

    The source gives its answer with `answer(value)`; what comes back is that value after JSON.
    """

    def run(source: str, **environment: str) -> Any:
        head = "import json, sys\ndef answer(value):\n    print('ANSWER ' + json.dumps(value), flush=True)\n"
        library = str(Path(autoaccum.__file__).parents[1])
        done = subprocess.run(
            [sys.executable, "-c", head + textwrap.dedent(source)],
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
            env={**os.environ, "PYTHONPATH": library, **environment},
        )
        answers = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
        assert done.returncode == 0, f"the child ended with {done.returncode}:\n{done.stderr[-4000:]}"
        assert answers, f"the child answered nothing:\n{done.stdout[-4000:]}"
        return json.loads(answers[-1].removeprefix("ANSWER "))

    return run
