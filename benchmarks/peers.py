"""autoaccum beside the other finders of a batch size: the same models under the same real memory caps, one run each.

    python benchmarks/peers.py run                  # all, about 25 minutes on two idle cores; goes on where it was ended
    python benchmarks/peers.py run --only gpt-adamw # one pair of model and cap, anew
    python benchmarks/peers.py run --small          # two pairs and three tools, about a minute
    python benchmarks/peers.py render               # the tables again, from the figures, and the README's

Every search, every training and every try at the true limit is in a process of its own: a copy of one that has loaded all
tools, so that all start from the same memory and the cap counts the same for all. The cap is `RLIMIT_DATA` on the host and a
memory fraction on a GPU (`--device cuda`; no figures of a GPU are in this repository).
Written: `results/peers.json` and `results/peers.md`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from side_by_side.caps import ALLOCATOR, Cap, grow_arenas, release
from side_by_side.cases import CASES, SMALL
from side_by_side.forks import in_fork
from side_by_side.measuring import search, steps_fit, trains, true_limit, try_on_tiny
from side_by_side.report import in_readme, markdown
from side_by_side.tools import SMALL_TOOLS, TOOLS, quiet

from autoaccum.prediction.fake_tensors import load_fake_tensors

RESULTS = Path(__file__).parent / "results"
README = Path(__file__).parents[1] / "README.md"
SEARCH_LIMIT_S, TRAINING_LIMIT_S, TRY_LIMIT_S = 300.0, 600.0, 300.0  # many times what they take on an idle machine
# One thread: copies of a process have no other. No oneDNN: where it is refused memory it ends the process, whichever tool
# has called it.
ENVIRONMENT = {**ALLOCATOR, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
LOADED = (
    "transformers.trainer",
    "accelerate",
    "lightning.pytorch.tuner",
    "batch_probe",
    "batch_finder",
    "toma",
    "torch_max_mem",
)


def measured(name: str, tools: Sequence[str], kind: str, log: Path) -> dict[str, Any]:
    """All of one pair: the true limits, every tool's answer, and whether each answer trains."""
    import torch

    torch.backends.mkldnn.set_flags(False)
    case, device = CASES[name], torch.device(kind)
    _load()
    if kind == "cpu":
        for tool in TOOLS.values():
            try_on_tiny(tool, Cap.from_here(device))
    release(device)
    held = grow_arenas()
    cap = Cap.from_here(device)

    def limit(micro_batches: int, guess: int) -> int:
        def fits(rows: int) -> bool:
            said = in_fork(lambda: steps_fit(case, rows, micro_batches, cap), TRY_LIMIT_S, log)
            if said.get("timed_out"):
                raise TimeoutError(
                    f"{name}: training at {rows} rows was {said['error']}, so that the true limit is not known"
                )
            return bool(said.get("fits"))

        return true_limit(guess, fits)

    plain = limit(1, case.guess)
    limits = {"plain": plain, "accumulating": limit(2, max(1, plain))}
    found: dict[str, Any] = {"case": name, "room_bytes": case.room_bytes, "target_batch": case.target_batch}
    found |= {"limits": limits, "tools": {}}
    known: dict[tuple[int, bool], dict[str, Any]] = {}
    for tool_name in tools:
        tool = TOOLS[tool_name]
        if tool.version() is None:
            found["tools"][tool_name] = {"error": f"{tool.package} is not installed", "installed": False}
            continue
        one = in_fork(lambda tool=tool: search(case, tool, cap), SEARCH_LIMIT_S, log)  # type: ignore[misc]
        if one.get("answer"):
            key = one["answer"], tool.accumulates
            if key not in known:
                known[key] = in_fork(lambda key=key: trains(case, *key, cap), TRAINING_LIMIT_S, log)  # type: ignore[misc]
            one["training"] = known[key]
        found["tools"][tool_name] = one
        print(name, limits, tool_name, json.dumps(one), file=sys.stderr, flush=True)
    del held
    return found


def _load() -> None:
    """Everything that is installed, before the copies are made."""
    for module in LOADED:
        try:
            importlib.import_module(module)
        except ImportError:
            print(f"{module} is not installed", file=sys.stderr)
    load_fake_tensors()


def environment() -> dict[str, Any]:
    """What the figures depend on."""
    import torch

    return {
        "system": f"{platform.system()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "tools": {tool.package: tool.version() for tool in TOOLS.values()},
        "settings": ENVIRONMENT,
    }


def run(names: Sequence[str], tools: Sequence[str], kind: str, path: Path, known: list[dict[str, Any]]) -> None:
    """Measure these pairs, each in a process of its own, and write down all that is known after each."""
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "log.txt"
            asked = [sys.executable, __file__, "pair", name, "--device", kind, "--log", str(log), "--tools", "|".join(tools)]
            settings = {**os.environ, **ENVIRONMENT, "TMPDIR": folder}
            done = subprocess.run(asked, stdout=subprocess.PIPE, text=True, env=settings, check=False)
            if done.returncode:
                print(f"{name}: ended with {done.returncode}", file=sys.stderr, flush=True)
                continue
        known[:] = [pair for pair in known if pair["case"] != name] + [json.loads(done.stdout.splitlines()[-1])]
        known.sort(key=lambda pair: list(CASES).index(pair["case"]))
        write({"device": kind, "environment": environment(), "pairs": known}, path)


def write(report: dict[str, Any], path: Path) -> None:
    """As figures, and as tables."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    path.with_suffix(".md").write_text(markdown(report))


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", choices=["run", "render", "pair"])
    parser.add_argument("name", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("--only", help="a pair's name, or several with commas: " + ", ".join(CASES))
    parser.add_argument("--small", action="store_true", help="two pairs, three tools")
    parser.add_argument("--again", action="store_true", help="measure anew what is known already")
    parser.add_argument("--tools", help="names of tools with | between them: " + " | ".join(TOOLS))
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--results", type=Path, help="the JSON to write, the tables beside it")
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    quiet()
    tools = asked.tools.split("|") if asked.tools else list(SMALL_TOOLS if asked.small else TOOLS)
    if asked.do == "pair":
        print(json.dumps(measured(asked.name, tools, asked.device, asked.log)))
        return
    ending = ("_small" if asked.small else "") + ("" if asked.device == "cpu" else f"_{asked.device}")
    path = asked.results or RESULTS / f"peers{ending}.json"
    known = json.loads(path.read_text())["pairs"] if path.exists() else []
    if asked.do == "render":
        report = json.loads(path.read_text())
        path.with_suffix(".md").write_text(markdown(report))
        if path == RESULTS / "peers.json":
            README.write_text(in_readme(README.read_text(), report))
        return
    names = asked.only.split(",") if asked.only else list(SMALL if asked.small else CASES)
    measured_already = set() if asked.again or asked.only else {pair["case"] for pair in known}
    run([name for name in names if name not in measured_already], tools, asked.device, path, known)


if __name__ == "__main__":
    main()
