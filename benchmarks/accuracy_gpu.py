"""How near predictions for GPUs come to peaks that others measured on them, beside other tools' predictions of these.

    python benchmarks/accuracy_gpu.py                    # writes results/accuracy_gpu.json and results/accuracy_gpu.md
    python benchmarks/accuracy_gpu.py --folder FOLDER    # where environments are kept; build/published by default
    python benchmarks/accuracy_gpu.py --record           # writes the traces of tests/prediction/traces anew

No GPU is needed: runs are rebuilt on fake tensors, in environments of pinned versions that are made once. Peaks, and the
predictions of xMem, DNNMem, LLMem and SchedTune, are of the result files of github.com/Stone-ResearchLife/xMem (MIT), in
data/gpu_peaks.csv; torch-kitsune is asked here. Takes some three minutes on two cores, once the environments are there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "published"))

from cases import read_cases  # noqa: E402
from environments import PINS, environment, variables  # noqa: E402
from report import OUTSIDE_BYTES, as_json, as_markdown, out_of_memory, row_of, summary  # noqa: E402

FAMILIES = ("transformer", "cnn")
SCRIPTS = {"transformer": ["predict.py", "transformer"], "cnn": ["predict.py", "cnn"], "kitsune": ["static.py"]}
TRACES = HERE.parent / "tests" / "prediction" / "traces"

WHAT = (
    "Peaks of training on RTX 3060, RTX 4060 and A100, as published by the xMem project (MIT; data/gpu_peaks.csv), against "
    "what `autoaccum` predicts without a GPU: the training loop of the published runs on fake tensors, with the corrections "
    "that `predict` applies, and the caching allocator replayed at the most that the card leaves to it. No figure is fitted "
    "to a model or a run. To what the allocator reserves a constant of "
    f"{OUTSIDE_BYTES // 2**20} MiB is added for kernels and library state that are loaded outside of it: the middle of the "
    "6 to 20 MiB that the published peaks show."
)
HOW_CHOSEN = (
    "What was chosen knowing these peaks. For convolutions, that each dense NCHW float32 convolution takes a workspace for "
    "input, output and weight in all of its passes ('all workspaces', which `predict` counts) is one of some hundred rules "
    "of which workspaces cuDNN takes that were tried on these very runs. It has no number in it and follows from how cuDNN "
    "converts layouts, but its errors here are not those of a blind test. Without any workspace ('no workspaces') nothing "
    "was chosen; most peaks lie outside of what is between the two, which is therefore no interval of confidence. That the "
    "backward pass sums gradients in place was noticed on these runs too, and is what PyTorch's source does. Nothing else "
    "was chosen by them but the constant above.",
    "Lines of text differ in length. From batch 15 on nearly every batch has a line of the full 128 tokens, so that all "
    "batches have one shape; below, the shapes of the published runs are not known, and 128 tokens are assumed. Runs that "
    "died are a question of yes or no: what they held is a lower bound. We say that a run dies when the replay runs out of "
    "memory with all workspaces or with none.",
    "Errors of the other tools are counted as in the published files. xMem and DNNMem add what the framework itself took, "
    "context included, which the published peaks do not hold. LLMem takes no T5 and no convolutional network; the A100 runs "
    "have only xMem and some of DNNMem. torch-kitsune has no rule for Adafactor, does not know the two RTX cards, and feeds "
    "floating-point numbers, which no text model takes, so that it falls back on formulas for their activations; it was "
    "asked for the whole model, and as its README says for models of the hub, where it leaves out the language-model head.",
)


def main() -> None:
    """Make the environments, ask in each, write what came."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=HERE.parent / "build" / "published")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    folder = options.folder.resolve()
    if options.record:
        for family in FAMILIES:
            run(environment(family, folder), "store.py", family, str(TRACES))
        return
    pythons = {name: environment(name, folder) for name in PINS}
    write({name: answers(pythons[name], *SCRIPTS[name]) for name in PINS})


def run(python: Path, script: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a script of `published` by an environment's interpreter."""
    command = [str(python), str(HERE / "published" / script), *arguments]
    return subprocess.run(command, env=variables(), check=True, text=True, **options)


def answers(python: Path, script: str, *arguments: str) -> dict[str, dict[str, Any]]:
    """What a script prints, by the run's id; the versions under "environment"."""
    lines = map(json.loads, run(python, script, *arguments, stdout=subprocess.PIPE).stdout.splitlines())
    return {line.pop("id", "environment"): line for line in lines}


def write(answered: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Write the results, and print the table."""
    rows = [row_of(case, answered[case.family][case.id], answered["kitsune"][case.id]) for case in read_cases()]
    found = {
        "what": WHAT,
        "how_it_was_chosen": HOW_CHOSEN,
        "outside_of_allocator_bytes": OUTSIDE_BYTES,
        "environments": {name: lines["environment"]["environment"] for name, lines in answered.items()},
        "groups": summary(rows),
        "out_of_memory": out_of_memory(rows),
    }
    text = as_markdown(rows, found)
    results = HERE / "results" / "accuracy_gpu.json"
    results.write_text(json.dumps(found | {"rows": [as_json(row) for row in rows]}, indent=2) + "\n", encoding="utf-8")
    results.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
