"""How far predicted peaks are from measured ones on host memory, over models, optimizers and memory levers.

    python benchmarks/accuracy.py [--jobs 2] [--settings "bert;vit"] [--keep]

Every setting runs in a process of its own. A small probe goes first: the first pass in a process loads the code of kernels,
which no tensor holds; what it leaves resident is a column of its own. Then three sizes, chosen by the prediction so that the
step adds about 40, 100 and 260 MiB to what is held: the resident peak of `autoaccum.probe` at just that size, against the
forecast with what the process held just before. Errors are of the whole resident peak, and of the added part alone.
Written: `results/accuracy.json` and `results/accuracy.md`. `--keep` keeps what is known already of other settings.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from search import _BERT, _HF, GPT, MIB, MODELS, adam, environment, in_process, mib, mlp, one_peak, own, sgd, table, target
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autoaccum.devices import device_for
from autoaccum.prediction.forecast import Forecast, traced
from autoaccum.preserve import preserved
from autoaccum.workload import Workload

RESULTS = Path(__file__).parent / "results"
ADDED = (40 * MIB, 100 * MIB, 260 * MIB)
WARM_UP_ROWS = 4
MEDIAN_FRAC, WORST_FRAC = 0.01, 0.05  # of the whole resident peak
MOST_ROWS = 4096

WHY = """\
What the prediction does not know, by how it grows:

- With the rows: the fused LSTM of the CPU keeps a workspace whose size fake tensors give as nothing, and which grows in
  steps of pages that real traces at two small sizes do not show.
- With every new size, once: oneDNN compiles and keeps kernels for each shape of a convolution or a bfloat16 product.
- Once in a process: the code of kernels, some of which only larger sizes run. The last column has what the first pass
  leaves; the rest is in the first or second peak of a setting, and gone in the third.
"""

# -- settings


class Checkpointed(nn.Module):
    """Blocks of a linear layer, GELU and LayerNorm, each run again in the backward pass."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.first = nn.Linear(32, 256)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256), nn.LayerNorm(256)) for _ in range(4)
        )
        self.last = nn.Linear(256, 8)

    def forward(self, x_btc: Tensor) -> Tensor:
        """Scores of every position."""
        x_btc = self.first(x_btc)
        for block in self.blocks:
            x_btc = x_btc + checkpoint(block, x_btc, use_reentrant=self.use_reentrant)
        return self.last(x_btc)  # type: ignore[no-any-return]


class ClippingAdamW(torch.optim.AdamW):
    """Clips where a training loop would do so: just before the step."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Clip, then step."""
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        return super().step(closure)


def autocast_step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The model's own loss, its forward pass in bfloat16."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(**batch)["loss"]  # type: ignore[no-any-return]


def with_checkpoints(text: str, use_reentrant: bool) -> Workload:
    """A transformers model with its own activation checkpointing."""
    workload = target(text)
    workload.module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})  # type: ignore[operator]
    return workload


def frozen(text: str, part: str) -> Workload:
    """A model of which a part is not trained."""
    workload = target(text)
    workload.module.get_submodule(part).requires_grad_(False)
    return workload


def untied(text: str) -> Workload:
    """The demonstration GPT with weights of its own in the head."""
    workload = target(text)
    head: Any = workload.module.get_submodule("head")
    head.weight = nn.Parameter(head.weight.detach().clone())
    return workload


def vit() -> Workload:
    """A small vision transformer, whose step fake tensors refuse."""
    import transformers

    torch.manual_seed(0)
    config = transformers.ViTConfig(
        image_size=64, patch_size=8, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256
    )
    model = transformers.ViTForImageClassification(config).train()
    return Workload(model, {"pixel_values": torch.randn(4, 3, 64, 64), "labels": torch.randint(2, (4,))})


GPT2 = f"hf:gpt2?n_embd=128&n_layer=4&n_head=4&{_HF}"
LLAMA = (
    f"hf:llama?hidden_size=128&num_hidden_layers=4&num_attention_heads=4&num_key_value_heads=2&{_HF}&intermediate_size=256"
)
BIG_GPT = "demo:gpt?layers=4&width=256&vocabulary=2048&seq_len=32"  # 3.7 million weights, so that the optimizer counts
SETTINGS: dict[str, Callable[[], Workload]] = {
    **MODELS,
    "gpt, AdamW for-loop": partial(target, BIG_GPT, optimizer=partial(adam, foreach=False)),
    "gpt, AdamW foreach": partial(target, BIG_GPT, optimizer=partial(adam, foreach=True)),
    "gpt, AdamW fused": partial(target, BIG_GPT, optimizer=partial(adam, fused=True)),
    "gpt, SGD": partial(target, BIG_GPT, optimizer=sgd),
    "gpt, clipped": partial(target, BIG_GPT, optimizer=ClippingAdamW),
    "gpt, first block frozen": partial(frozen, BIG_GPT, "blocks.0"),
    "gpt, head not tied": partial(untied, BIG_GPT),
    "gpt, autocast": partial(target, GPT, training_step=autocast_step),
    "llama, autocast": partial(target, LLAMA, training_step=autocast_step),
    "bert, checkpointed": partial(with_checkpoints, f"hf:bert?{_BERT}", False),
    "bert, checkpointed reentrant": partial(with_checkpoints, f"hf:bert?{_BERT}", True),
    "gpt2, checkpointed": partial(with_checkpoints, GPT2, False),
    "llama, checkpointed": partial(with_checkpoints, LLAMA, False),
    "mlp, checkpointed": partial(own, partial(Checkpointed, False)),
    "mlp, checkpointed reentrant": partial(own, partial(Checkpointed, True)),
    "mlp, SGD and wide": partial(own, partial(mlp, 512, 6), optimizer=sgd),
    "vit": vit,
}

# -- in a process of its own


def measure(setting: str) -> dict[str, Any]:
    """Predicted and measured peaks of one setting at three sizes."""
    workload = SETTINGS[setting]()
    device = device_for("cpu", torch.device("cpu"))

    def settled() -> int:
        gc.collect()
        device.release()
        return device.held_bytes(())

    def forecast() -> Forecast:
        assert found.growth is not None
        return Forecast(found.growth, unit=device.unit, held_bytes=settled())

    with preserved(workload.module, workload.own_optimizer, device=workload.device, on_disk=True) as snapshot:
        found = traced(workload, device, snapshot=snapshot)
    if found.growth is None:
        raise RuntimeError(str(found.note))
    before, foreseen = settled(), forecast().peak_bytes(WARM_UP_ROWS)
    first_peak = one_peak(workload, WARM_UP_ROWS, "cpu")
    first = {"first_pass_bytes": settled() - before, "first_peak_over_bytes": first_peak - foreseen}
    sizes = [compare(workload, forecast, settled, added) for added in ADDED]
    return {"setting": setting, "note": found.note, **first, "sizes": sizes}


def compare(
    workload: Workload, forecast: Callable[[], Forecast], settled: Callable[[], int], added: int
) -> dict[str, float]:
    """The smallest size that is predicted to add so much: its predicted and measured peak."""
    held, now = settled(), forecast()
    rows = next(rows for rows in range(2, MOST_ROWS) if now.peak_bytes(rows) - held >= added or rows == MOST_ROWS - 1)
    predicted, measured = now.peak_bytes(rows), one_peak(workload, rows, "cpu")
    return {
        "rows": rows,
        "held_bytes": held,
        "predicted_bytes": predicted,
        "measured_bytes": measured,
        "error_frac": round(predicted / measured - 1, 5),
        "added_error_frac": round((predicted - held) / (measured - held) - 1, 5),
    }


# -- in the process that starts them


def summary_of(settings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Median and worst errors, and what a first pass leaves behind."""
    sizes = [(one["setting"], size) for one in settings for size in one["sizes"]]
    summary: dict[str, Any] = {"settings": len(settings), "peaks": len(sizes)}
    for what in ("error_frac", "added_error_frac"):
        errors = [(abs(size[what]), size[what], setting, size["rows"]) for setting, size in sizes]
        worst = max(errors)
        summary[what] = {
            "median": round(statistics.median(error[0] for error in errors), 5),
            "largest": round(worst[0], 5),
            "largest_at": f"{worst[2]}, {worst[3]} rows",
            "most_too_low": min(error[1] for error in errors),
            "most_too_high": max(error[1] for error in errors),
        }
    passes = [one["first_pass_bytes"] for one in settings]
    over = [one["first_peak_over_bytes"] for one in settings]
    for name, found in (("first_pass", passes), ("first_peak_over", over)):
        low, middle, high = (round(take(found) / MIB, 1) for take in (min, statistics.median, max))
        summary[f"{name}_mib"] = {"least": low, "median": middle, "most": high}
    whole = summary["error_frac"]
    summary["as_required"] = whole["median"] <= MEDIAN_FRAC and whole["largest"] <= WORST_FRAC
    return summary


def percent(frac: float) -> str:
    """A signed fraction in percent."""
    return f"{frac * 100:+.2f} %"


def markdown(report: dict[str, Any]) -> str:
    """The report as tables."""
    about = ", ".join(f"{name} {value}" for name, value in report["environment"].items())
    summary = report["summary"]
    rows = [
        [name, *(f"{summary[key][what] * 100:.2f} %" for what in ("median", "largest")), summary[key]["largest_at"]]
        for name, key in (("whole resident peak", "error_frac"), ("added by the step", "added_error_frac"))
    ]
    parts = ["# Predicted and measured peaks on host memory\n", f"`python benchmarks/accuracy.py`: {about}.\n"]
    parts.append(f"{summary['settings']} settings, {summary['peaks']} peaks.\n")
    parts.append(table(["error of", "median", "largest", "largest at"], rows))
    rows = [
        [words, *summary[key].values()]
        for words, key in (
            ("left resident by the first pass of a process", "first_pass_mib"),
            ("the first peak above its prediction", "first_peak_over_mib"),
        )
    ]
    parts.append(table(["MiB", "least", "median", "most"], rows))
    beyond = [
        f"{one['setting']} {size['rows']} rows ({percent(size['error_frac'])})"
        for one in report["settings"]
        for size in one["sizes"]
        if abs(size["error_frac"]) > WORST_FRAC
    ]
    parts.append(f"Further than {WORST_FRAC:.0%} from the whole peak: {'; '.join(beyond) or 'none'}.\n")
    parts.append(WHY)
    header = [
        "setting",
        "rows",
        "held, MiB",
        "predicted, MiB",
        "measured, MiB",
        "error",
        "error of the added",
        "left by the first pass, MiB",
    ]
    rows = [
        [
            one["setting"] if not index else "",
            size["rows"],
            *(mib(size[f"{what}_bytes"]) for what in ("held", "predicted", "measured")),
            percent(size["error_frac"]),
            percent(size["added_error_frac"]),
            mib(one["first_pass_bytes"]) if not index else "",
        ]
        for one in report["settings"]
        for index, size in enumerate(one["sizes"])
    ]
    parts.append(table(header, rows))
    notes = [f"- {one['setting']}: {one['note']}" for one in report["settings"] if one["note"]]
    return "\n".join([*parts, *notes]) + "\n"


def run_all(names: Sequence[str], jobs: int, known: list[dict[str, Any]], path: Path) -> None:
    """Measure these settings, and write down what is known after each."""
    writing = Lock()

    def run(name: str) -> None:
        try:
            found = in_process(__file__, {"setting": name})
        except RuntimeError as error:
            print(name, error, file=sys.stderr, flush=True)
            return
        print(name, [(size["rows"], size["error_frac"], size["added_error_frac"]) for size in found["sizes"]], flush=True)
        with writing:
            known.append(found)
            known.sort(key=lambda one: list(SETTINGS).index(one["setting"]))
            write(known, path)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run, names))


def write(known: Sequence[dict[str, Any]], path: Path) -> None:
    """Write JSON, and the same as tables."""
    report = {"environment": environment(), "summary": summary_of(known), "settings": known}
    path.write_text(json.dumps(report, indent=1) + "\n")
    path.with_suffix(".md").write_text(markdown(report))


def main() -> None:
    """Measure all settings, or one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--jobs", type=int, default=1, help="settings at a time")
    parser.add_argument("--settings", help="names, with semicolons between them")
    parser.add_argument("--keep", action="store_true", help="keep what is known of other settings")
    asked = parser.parse_args()
    if asked.job:
        print(json.dumps(measure(**json.loads(asked.job))))
        return
    names, path = asked.settings.split(";") if asked.settings else list(SETTINGS), RESULTS / "accuracy.json"
    kept = json.loads(path.read_text())["settings"] if asked.keep and path.exists() else []
    known = [one for one in kept if one["setting"] not in names]
    run_all(names, asked.jobs, known, path)
    write(known, path)
    print(json.dumps(summary_of(known), indent=2))


if __name__ == "__main__":
    main()
