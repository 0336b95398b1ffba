"""What a search costs with a prediction and without: probes, failures and answers, on host memory and on virtual devices.

    python benchmarks/search.py [--jobs 2] [--models gpt-narrow,bert] [--keep]

Every search runs in a process of its own, since resident peaks of one process are not those of another: `autotune` for a
target of 256 and `probe(exact=True)`, each with the prediction and with `Request(predict=False)`. Budgets are the measured
peaks of two sizes, rounded up to whole MiB. On virtual devices, which count the tensors themselves, the answers must be
equal; resident peaks wander by some hundred KiB from process to process, so there the difference is recorded.
Written: `results/search.json` and `results/search.md`. `--keep` keeps what is known already of other models.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import autoaccum
from autoaccum.errors import NothingFitsError
from autoaccum.records import Fit, OutOfMemory, Trial
from autoaccum.request import Request
from autoaccum.session import Search
from autoaccum.targets import load_target
from autoaccum.tune import probe_workload
from autoaccum.workload import Workload

RESULTS = Path(__file__).parent / "results"
TARGET = 256
ROWS = (14, 60)  # limits that the budgets are made for
# A first pass through convolutions and bfloat16 products compiles kernels, which takes more than 14 rows of these models.
ROWS_OF = {"resnet-narrow": (60, 240), "resnet-wide": (60, 240), "llama-bf16": (40, 120)}
VIRTUAL_ROWS = 37
MIB = 2**20
CALLS = ("autotune", "probe")
REAL_FAILURES = ("allocator", "unclear", "retries", "process")  # the others ran to the end, and their peak was too high

# -- models

_HF = "vocab_size=2000&seq_len=64"
_BERT = f"hidden_size=128&num_hidden_layers=2&num_attention_heads=2&intermediate_size=256&{_HF}"


class Lstm(nn.Module):
    """Two layers of LSTM and a head at the last position."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(32, 128, num_layers=2, batch_first=True)
        self.head = nn.Linear(128, 8)

    def forward(self, x_btc: Tensor) -> Tensor:
        """Scores of a sequence."""
        return self.head(self.lstm(x_btc)[0][:, -1])  # type: ignore[no-any-return]


def mlp(width: int = 256, depth: int = 4, dropout: float = 0.0) -> nn.Module:
    """Layers that each keep rows * 64 * width numbers a few times: inputs are (B, 64, 32)."""
    layers: list[nn.Module] = [nn.Linear(32, width)]
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width), *([nn.Dropout(dropout)] if dropout else [])]
    return nn.Sequential(*layers, nn.Linear(width, 8))


def own(build: Callable[[], nn.Module], **more: Any) -> Workload:
    """A workload on (B, 64, 32) inputs with the mean square of the output as its loss, unless more is said."""
    torch.manual_seed(0)
    more.setdefault("training_step", square_step)
    return Workload(build(), torch.randn(8, 64, 32), **more)


def square_step(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean square of the output."""
    return model(batch).pow(2).mean()  # type: ignore[no-any-return]


def item_step(model: nn.Module, batch: Tensor) -> Tensor:
    """A loss that is divided by its own value, which has to be read."""
    loss = functional.smooth_l1_loss(model(batch), torch.ones(()).expand(batch.shape[0], 64, 8))
    return loss / max(1.0, loss.item())


def target(text: str, dtype: torch.dtype | None = None, **more: Any) -> Workload:
    """A built-in target, in another dtype or with another optimizer where asked."""
    torch.manual_seed(0)
    found = load_target(text)
    if dtype is not None:
        found.module.to(dtype)
    if not more:
        return found
    sample = found.source.take(8)
    more.setdefault("training_step", found.loss.training_step)
    return Workload(found.module, sample, loss_fn=found.loss.loss_fn, weight=found.weight, **more)


def adam(parameters: Any, **settings: Any) -> torch.optim.Optimizer:
    """AdamW with settings."""
    return torch.optim.AdamW(parameters, **settings)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Plain SGD, which keeps no state."""
    return torch.optim.SGD(parameters, lr=0.01)


GPT = "demo:gpt?layers=2&width=64&vocabulary=1024&seq_len=64"
MODELS: dict[str, Callable[[], Workload]] = {
    "gpt-narrow": partial(target, GPT),
    "gpt-deep": partial(target, "demo:gpt?layers=6&width=64&vocabulary=512&seq_len=32"),
    "gpt-vocabulary": partial(target, "demo:gpt?layers=1&width=64&vocabulary=8192&seq_len=32"),
    "resnet-narrow": partial(target, "demo:resnet?image=32&width=16&blocks=1"),
    "resnet-wide": partial(target, "demo:resnet?image=16&width=64&blocks=1"),
    "bert": partial(target, f"hf:bert?{_BERT}"),
    "gpt2": partial(target, f"hf:gpt2?n_embd=128&n_layer=2&n_head=4&{_HF}"),
    "llama": partial(
        target,
        f"hf:llama?hidden_size=128&num_hidden_layers=2&num_attention_heads=4&num_key_value_heads=2&intermediate_size=256&{_HF}",
    ),
    "llama-bf16": partial(
        target,
        f"hf:llama?hidden_size=128&num_hidden_layers=2&num_attention_heads=4&num_key_value_heads=2&intermediate_size=256&{_HF}",
        torch.bfloat16,
    ),
    "t5": partial(target, f"hf:t5?d_model=128&d_kv=32&d_ff=256&num_layers=2&num_heads=4&{_HF}"),
    "distilbert": partial(target, f"hf:distilbert?dim=128&n_layers=2&n_heads=4&hidden_dim=256&{_HF}"),
    "lstm": partial(own, Lstm),
    "mlp-sgd": partial(own, mlp, optimizer=sgd),
    "mlp-foreach": partial(own, partial(mlp, 192), optimizer=partial(adam, foreach=True)),
    "mlp-item": partial(own, mlp, training_step=item_step),
    "mlp-dropout": partial(own, partial(mlp, dropout=0.1)),
}
ON_VIRTUAL = ("gpt-narrow", "resnet-narrow", "llama", "lstm", "mlp-sgd", "mlp-item", "mlp-dropout")


# -- in a process of its own


def calibrate(model: str, device: str) -> dict[str, Any]:
    """Measured peaks of the sizes that budgets are made for, after a first pass at a small one."""
    workload = MODELS[model]()
    sizes = limits_of(model, device)
    return {"peaks": {rows: one_peak(workload, rows, device) for rows in (4, *sizes)}}


def limits_of(model: str, device: str) -> tuple[int, ...]:
    """The limits that budgets are made for."""
    return ROWS_OF.get(model, ROWS) if device == "cpu" else (VIRTUAL_ROWS,)


def one_peak(workload: Workload, rows: int, device: Any) -> int:
    """Measured peak of a probe at this size, with memory to spare."""
    found = probe_workload(
        workload,
        Request(max_micro_batch=rows, multiple_of=rows),
        device="cpu" if device == "cpu" else autoaccum.VirtualDevice(8 * 2**30),
    )
    assert found.measured_peak_bytes is not None
    return found.measured_peak_bytes


def search(model: str, device: str, call: str, budget_bytes: int, predict: bool) -> dict[str, Any]:
    """One search, with what it tried and what was predicted of it."""
    workload = MODELS[model]()
    target_batch = TARGET if call == "autotune" else None
    on_host = device == "cpu"
    request = Request(target_batch=target_batch, budget=budget_bytes if on_host else None, predict=predict)
    begun = time.perf_counter()
    with Search(workload, request, "cpu" if on_host else autoaccum.VirtualDevice(budget_bytes), None, None, ()) as one:
        try:
            record: Any = one.plan() if call == "autotune" else one.result()
        except NothingFitsError:
            record = None
        forecast, held_bytes = one._forecast, one.budget.held_bytes
    predicted = (lambda rows: None) if forecast is None else forecast.peak_bytes
    trials, answer = one.log.trials, 0 if record is None else record.max_micro_batch
    probes = [trial for trial in trials if trial.purpose == "probe"]
    fitted = [t.outcome.peak_bytes for t in probes if t.candidate.micro_batch == answer and isinstance(t.outcome, Fit)]
    return {
        "answer": answer,
        "evidence": None if record is None else record.evidence,
        "probes": len(probes),
        "failures": sum(not isinstance(trial.outcome, Fit) for trial in trials),
        "real_failures": sum(is_real_failure(trial) for trial in trials),
        "peak_bytes": max(fitted, default=None),
        "budget_bytes": budget_bytes,
        "held_bytes": held_bytes,
        "held_after_trace_bytes": None if forecast is None else forecast._held_bytes,
        "seconds": round(time.perf_counter() - begun, 2),
        "trials": [logged(trial, predicted(trial.candidate.micro_batch)) for trial in trials],
        "warnings": [text for text in (record.warnings if record else ()) if "fake tensors" in text],
    }


def is_real_failure(trial: Trial) -> bool:
    """Whether memory really ran out, rather than a peak above the budget being measured."""
    return isinstance(trial.outcome, OutOfMemory) and trial.outcome.cause in REAL_FAILURES


def logged(trial: Trial, predicted_bytes: int | None) -> dict[str, Any]:
    """A trial in few words."""
    outcome = trial.outcome
    return {
        "rows": trial.candidate.micro_batch,
        "purpose": trial.purpose,
        "outcome": "fits" if isinstance(outcome, Fit) else getattr(outcome, "cause", "refused"),
        "peak_bytes": getattr(outcome, "peak_bytes", None),
        "predicted_bytes": predicted_bytes,
    }


# -- in the process that starts them


def in_process(script: str, job: dict[str, Any]) -> dict[str, Any]:
    """Run one job of a benchmark in a fresh process; waiting threads sleep, since others may run beside it."""
    # As the command line's worker: oneDNN's cache of compiled kernels would grow with every size that is tried.
    settings = {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1"}
    environment = {**os.environ, **settings}
    done = subprocess.run(
        [sys.executable, script, "--job", json.dumps(job)], capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{job} failed:\n{done.stderr[-3000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def pairs_of(model: str, device: str) -> Iterator[dict[str, Any]]:
    """All searches of one model on one kind of device."""
    peaks = in_process(__file__, {"do": "calibrate", "model": model, "device": device})["peaks"]
    for rows in limits_of(model, device):
        budget_bytes = -(-peaks[str(rows)] // MIB) * MIB if device == "cpu" else peaks[str(rows)]
        per_row = (peaks[str(max(map(int, peaks)))] - peaks["4"]) / (max(map(int, peaks)) - 4)
        job = {"do": "search", "model": model, "device": device, "budget_bytes": budget_bytes}
        for call in CALLS:
            both = [in_process(__file__, {**job, "call": call, "predict": predict}) for predict in (True, False)]
            yield {
                "model": model,
                "device": device,
                "call": call,
                "for_rows": rows,
                "budget_bytes": budget_bytes,
                "row_bytes": round(per_row),
                "with": both[0],
                "without": both[1],
            }


def missed(pair: dict[str, Any]) -> list[str]:
    """What this pair should have done better with the prediction."""
    found, most = pair["with"], (4 if pair["call"] == "autotune" else 5)
    said = [f"{found['probes']} probes, not at most {most}"] if found["probes"] > most else []
    if not found["answer"] and pair["without"]["answer"]:
        said.append("nothing fitted")
    if pair["call"] == "probe" and found["failures"] > 2:
        said.append(f"{found['failures']} failures, not at most 2")
    if pair["device"] != "cpu" and found["answer"] != pair["without"]["answer"]:
        said.append(f"{found['answer']} rows, not {pair['without']['answer']}")
    return said


def summary_of(pairs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Median and largest numbers of each call, with the prediction and without."""
    summary: dict[str, Any] = {}
    for device in ("cpu", "virtual"):
        for call in CALLS:
            chosen = [pair for pair in pairs if (pair["device"], pair["call"]) == (device, call)]
            if not chosen:
                continue
            of_call = summary[f"{device} {call}"] = {"pairs": len(chosen)}
            for side in ("with", "without"):
                for what in ("probes", "failures", "real_failures"):
                    counts = [pair[side][what] for pair in chosen]
                    of_call[f"{what}_{side}"] = {"median": statistics.median(counts), "max": max(counts)}
            apart = [pair["with"]["answer"] - pair["without"]["answer"] for pair in chosen]
            of_call["answers_equal"] = sum(not rows for rows in apart)
            of_call["largest_difference_rows"] = max(map(abs, apart))
    return summary


def environment() -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": version_of("transformers"),
        "threads": torch.get_num_threads(),
    }


def version_of(package: str) -> str | None:
    """The version that is installed, None where there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


def mib(count: float | None, digits: int = 1) -> str:
    """Bytes in MiB."""
    return "" if count is None else f"{count / MIB:.{digits}f}"


def log_text(found: dict[str, Any]) -> str:
    """The trials in order, peaks measured / predicted in MiB."""
    return ", ".join(
        f"{trial['rows']} {trial['outcome']} {mib(trial['peak_bytes'])}/{mib(trial['predicted_bytes'])}"
        for trial in found["trials"]
        if trial["purpose"] == "probe"
    )


def markdown(report: dict[str, Any]) -> str:
    """The report as tables."""
    setting = ", ".join(f"{name} {value}" for name, value in report["environment"].items())
    parts = ["# Probes of a search with and without a prediction\n", f"`python benchmarks/search.py`: {setting}.\n"]
    columns = ("probes_with", "probes_without", "failures_with", "failures_without", "real_failures_with")
    columns = (*columns, "real_failures_without")
    rows = [
        [
            name,
            one["pairs"],
            *(f"{one[column]['median']:g} / {one[column]['max']}" for column in columns),
            f"{one['answers_equal']} of {one['pairs']}",
            one["largest_difference_rows"],
        ]
        for name, one in report["summary"].items()
    ]
    header = ["search", "pairs", *(column.replace("_", " ") + ", median / max" for column in columns)]
    parts.append(table([*header, "answers equal", "largest difference, rows"], rows))
    parts.append("A real failure is one where memory ran out; the others ran, but their peak was above the budget.\n")
    parts.append(
        "Processes run with ONEDNN_PRIMITIVE_CACHE_CAPACITY=1, as the command line's worker does: else every new size of a "
        "convolution or bfloat16 product leaves compiled kernels resident. An answer of 0: nothing fitted.\n"
    )
    for call in CALLS:
        parts.append(f"## {call}\n")
        parts.append(table(PAIR_COLUMNS, [pair_row(pair) for pair in report["pairs"] if pair["call"] == call]))
    misses = [pair for pair in report["pairs"] if missed(pair)]
    parts.append("## Searches that took more than they should\n")
    parts.append("Rows, outcome, peak measured / predicted in MiB.\n")
    for pair in misses:
        parts.append(f"- {pair['model']} on {pair['device']}, {pair['call']}, {mib(pair['budget_bytes'])} MiB: ")
        parts[-1] += f"{'; '.join(missed(pair))}. {log_text(pair['with'])}"
    return "\n".join([*parts, *([] if misses else ["None."])]) + "\n"


PAIR_COLUMNS = [
    "model",
    "device",
    "budget, MiB",
    "MiB a row",
    "rows with / without",
    "room left with / without, MiB",
    "probes with / without",
    "failures with / without",
    "resident after the trace, more by MiB",
    "seconds with / without",
]


def pair_row(pair: dict[str, Any]) -> list[Any]:
    """One line of the table."""
    sides = [pair["with"], pair["without"]]

    def both(show: Callable[[dict[str, Any]], Any]) -> str:
        return " / ".join(str(show(side)) for side in sides)

    after = pair["with"]["held_after_trace_bytes"]
    return [
        pair["model"],
        pair["device"],
        mib(pair["budget_bytes"]),
        mib(pair["row_bytes"], 2),
        both(lambda side: side["answer"]),
        both(lambda side: mib(side["peak_bytes"] and side["budget_bytes"] - side["peak_bytes"], 2)),
        both(lambda side: side["probes"]),
        both(lambda side: side["failures"]),
        "" if after is None else mib(after - pair["with"]["held_bytes"]),
        both(lambda side: side["seconds"]),
    ]


def run_all(models: Sequence[str], jobs: int, known: list[dict[str, Any]], path: Path) -> None:
    """Add all pairs of these models to what is known, and write it down after each."""
    wanted = [(model, "cpu") for model in models] + [(model, "virtual") for model in models if model in ON_VIRTUAL]
    writing = Lock()

    def run(model: str, device: str) -> None:
        try:
            for pair in pairs_of(model, device):
                probes = [pair[side]["probes"] for side in ("with", "without")]
                print(model, device, pair["call"], pair["for_rows"], probes, *missed(pair), flush=True)
                with writing:
                    known.append(pair)
                    known.sort(
                        key=lambda one: (list(MODELS).index(one["model"]), one["device"], one["for_rows"], one["call"])
                    )
                    write(known, path)
        except RuntimeError as error:
            print(model, device, error, file=sys.stderr, flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda one: run(*one), wanted))


def write(pairs: list[dict[str, Any]], path: Path) -> None:
    """Write JSON, and the same as tables."""
    report = {"environment": environment(), "summary": summary_of(pairs), "pairs": pairs}
    path.write_text(json.dumps(report, indent=1) + "\n")
    path.with_suffix(".md").write_text(markdown(report))


def main() -> None:
    """Run the searches, or one job of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--jobs", type=int, default=1, help="searches at a time")
    parser.add_argument("--models", default=",".join(MODELS), help="names, with commas between them")
    parser.add_argument("--keep", action="store_true", help="keep what is known of other models")
    asked = parser.parse_args()
    if asked.job:
        job = json.loads(asked.job)
        print(json.dumps({"calibrate": calibrate, "search": search}[job.pop("do")](**job)))
        return
    models, path = asked.models.split(","), RESULTS / "search.json"
    kept = json.loads(path.read_text())["pairs"] if asked.keep and path.exists() else []
    known = [pair for pair in kept if pair["model"] not in models]
    run_all(models, asked.jobs, known, path)
    write(known, path)
    print(json.dumps(summary_of(known), indent=2))


if __name__ == "__main__":
    main()
