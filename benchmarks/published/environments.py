"""Makes the Python environments in which published runs are rebuilt: the models' code differs between versions.

    python benchmarks/published/environments.py FOLDER

An environment that is there already, with the same pins, is used again. Knows nothing of models or peaks.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tomllib
import venv
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PINS = {
    # transformers as in the published runs: later ones copy other tensors in the loss, and mask attention otherwise.
    "transformer": ("torch==2.13.0", "transformers==4.51.3"),
    "cnn": ("torch==2.14.1", "torchvision==0.29.1"),
    "kitsune": ("torch==2.14.1", "torchvision==0.29.1", "transformers==4.51.3", "torch-kitsune==0.4.0"),
}
"""What each family of models is rebuilt with, and what a tool is asked in that predicts both.

The published runs had torch 2.6.0 and torchvision 0.21.0.
"""

REPORTED = ("torch", "torchvision", "transformers", "torch-kitsune")


def environment(name: str, folder: Path) -> Path:
    """The interpreter of an environment, which is made in `folder` unless it is there.

    Args:
        name: A key of `PINS`.
        folder: Where environments are kept; each takes 1 GB with a CPU build of torch, up to 6 GB with another.

    Raises:
        subprocess.CalledProcessError: When pip cannot install the pinned versions.
    """
    home = folder / name
    python = home / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    wanted = "\n".join((*PINS[name], *light_dependencies()))
    made = home / "pins.txt"
    if not made.exists() or made.read_text() != wanted:
        venv.create(home, with_pip=True, clear=True)
        for step in (PINS[name][:1], PINS[name][1:], light_dependencies()):  # torch first, so that nothing else picks it
            subprocess.run([python, "-m", "pip", "install", "--quiet", *step], check=True)
        made.write_text(wanted)
    return python


def light_dependencies() -> tuple[str, ...]:
    """What this package needs besides torch."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        needed = tomllib.load(file)["project"]["dependencies"]
    return tuple(requirement for requirement in needed if not requirement.startswith("torch"))


def versions() -> dict[str, str]:
    """What the running interpreter rebuilds with."""
    found = {"python": platform.python_version(), "platform": f"{platform.system()} {platform.machine()}"}
    for name in REPORTED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def variables() -> dict[str, str]:
    """The environment variables under which a made interpreter finds this checkout, and nothing asks the network."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}


if __name__ == "__main__":
    for each in PINS:
        print(environment(each, Path(sys.argv[1])))
