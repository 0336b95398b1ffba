"""The published training runs, and the dimensions of every model that they may name.

    python benchmarks/published/cases.py

prints the cases and their published peaks. Knows nothing of torch, so that any environment can read it.
Source of the peaks: the result files of github.com/Stone-ResearchLife/xMem (MIT); `source_path` of each row names its file.
Source of the dimensions: the models' configurations on the Hugging Face hub, in the words of transformers 4.51.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PEAKS = Path(__file__).resolve().parent.parent / "data" / "gpu_peaks.csv"
IMAGE_PIXELS = 86
MAX_TOKENS = 128
FIRST_STEADY_BATCH = 15
"""From this batch size on, nearly every batch holds a line of MAX_TOKENS tokens, so that all batches have one shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One training run on one GPU.

    Attributes:
        family: "cnn" or "transformer".
        model: A torchvision call as text, or the id of a model on the hub.
        optimizer: "SGD", "Adam", "AdamW", "RMSprop", "Adagrad" or "Adafactor".
        zero_grad_mode: Gradients are dropped 0: as an iteration begins, 1: between forward and backward, 2: after the step.
        ground_peak_bytes: What the device held at most, less what it held before training (so without the CUDA context).
        out_of_memory: The run died; `ground_peak_bytes` is then only a lower bound.
        one_shape: All batches have one shape. False for small batches of text, whose lengths are not known.
        source_path: The result file in the source repository.
        baselines: Bytes that published tools predicted, by tool; None where a tool does not support the case.
    """

    id: str
    family: str
    model: str
    optimizer: str
    batch_size: int
    zero_grad_mode: int
    gpu: str
    gpu_total_bytes: int
    ground_peak_bytes: int
    out_of_memory: bool
    one_shape: bool
    repeat_group: str
    source_path: str
    baselines: dict[str, int | None]


def read_cases(path: Path = PEAKS) -> Iterator[Case]:
    """The cases of a table of published peaks, in its order."""
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            yield Case(
                id=row["id"],
                family=row["family"],
                model=row["model"],
                optimizer=row["optimizer"],
                batch_size=int(row["batch_size"]),
                zero_grad_mode=int(row["zero_grad_effective"]),
                gpu=row["gpu"],
                gpu_total_bytes=int(row["gpu_total_bytes"]),
                ground_peak_bytes=int(row["ground_peak_bytes"]),
                out_of_memory=row["real_oom"] == "true",
                one_shape=row["input_shape_constant"] == "yes",
                repeat_group=row["repeat_group"],
                source_path=row["source_path"],
                baselines={tool: _bytes(row[f"{tool}_estimate_bytes"]) for tool in ("xmem", "dnnmem", "llmem", "schedtune")},
            )


def _bytes(text: str) -> int | None:
    return round(float(text)) if text else None


CNN_PARAMETERS = {
    "torchvision.models.vgg16(weights=None)": 138_357_544,
    "torchvision.models.vgg19(weights=None)": 143_667_240,
    "torchvision.models.resnet101(weights=None)": 44_549_160,
    "torchvision.models.resnet152(weights=None)": 60_192_808,
    "torchvision.models.mobilenet_v2(weights=None)": 3_504_872,
    "torchvision.models.convnext_tiny(weights=None)": 28_589_128,
    "torchvision.models.convnext_base(weights=None)": 88_591_464,
    "torchvision.models.regnet_x_400mf(weights=None)": 5_495_976,
    "torchvision.models.regnet_y_400mf(weights=None)": 4_344_144,
    "torchvision.models.MNASNet(alpha=1.0, num_classes=10)": 3_115_122,
    "torchvision.models.mobilenet_v3_small(weights=None, num_classes=10)": 1_528_106,
    "torchvision.models.mobilenet_v3_large(weights=None, num_classes=10)": 4_214_842,
}
"""Parameters of every convolutional model of the published runs."""


@dataclass(frozen=True, slots=True)
class TextModel:
    """How a model of the hub is built: its configuration class, its parameters, what differs from that class's defaults."""

    config: str
    parameters: int
    dimensions: dict[str, Any]


def _text(config: str, parameters: int, **dimensions: Any) -> TextModel:
    return TextModel(config, parameters, dimensions)


def _decoder(config: str, parameters: int, sizes: tuple[int, ...], **more: Any) -> TextModel:
    """One of the newer decoders. `sizes`: width, layers, heads, key heads, inner width, vocabulary, positions."""
    names = (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "vocab_size",
    )
    return TextModel(config, parameters, dict(zip((*names, "max_position_embeddings"), sizes, strict=True)) | more)


def _opt(parameters: int, width: int, layers: int, heads: int, inner: int, **more: Any) -> TextModel:
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "ffn_dim")
    sizes = dict(zip(names, (width, layers, heads, inner), strict=True))
    return TextModel("OPTConfig", parameters, sizes | {"dropout": 0.1, "attention_dropout": 0.0} | more)


_NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
_T5 = {"d_kv": 64, "decoder_start_token_id": 0}

TEXT_MODELS = {
    "EleutherAI/gpt-neo-125M": _text(
        "GPTNeoConfig", 125_198_592, hidden_size=768, num_layers=12, num_heads=12, attention_types=[[["global", "local"], 6]]
    ),
    "facebook/opt-125m": _opt(125_239_296, 768, 12, 12, 3072),
    "facebook/opt-350m": _opt(331_196_416, 1024, 24, 16, 4096, word_embed_proj_dim=512, do_layer_norm_before=False),
    "cerebras/Cerebras-GPT-111M": _text(
        "GPT2Config", 111_050_496, n_layer=10, n_positions=2048, activation_function="gelu", **_NO_DROPOUT
    ),
    "distilbert/distilgpt2": _text("GPT2Config", 81_912_576, n_layer=6),
    "openai-community/gpt2": _text("GPT2Config", 124_439_808),
    "google-t5/t5-small": _text("T5Config", 60_506_624, **_T5),
    "google-t5/t5-base": _text("T5Config", 222_903_552, d_model=768, d_ff=3072, num_layers=12, num_heads=12, **_T5),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": _decoder(
        "Qwen2Config", 1_777_088_000, (1536, 28, 12, 2, 8960, 151936, 131072), tie_word_embeddings=False
    ),
    "Qwen/Qwen3-4B": _decoder(
        "Qwen3Config", 4_022_468_096, (2560, 36, 32, 8, 9728, 151936, 40960), head_dim=128, tie_word_embeddings=True
    ),
    "Qwen/Qwen3-0.6B": _decoder(
        "Qwen3Config", 596_049_920, (1024, 28, 16, 8, 3072, 151936, 40960), head_dim=128, tie_word_embeddings=True
    ),
    "meta-llama/Llama-3.2-3B-Instruct": _decoder(
        "LlamaConfig", 3_212_749_824, (3072, 28, 24, 8, 8192, 128256, 131072), head_dim=128, tie_word_embeddings=True
    ),
    "google/gemma-2-2b-it": _decoder("Gemma2Config", 2_614_341_888, (2304, 26, 8, 4, 9216, 256000, 8192), head_dim=256),
    "EleutherAI/pythia-1b": _text(
        "GPTNeoXConfig",
        1_011_781_632,
        hidden_size=2048,
        num_hidden_layers=16,
        num_attention_heads=8,
        intermediate_size=8192,
        vocab_size=50304,
    ),
}
"""Every transformer of the published runs. Weights are drawn at random in float32, whatever type the hub's file names."""


def main() -> None:
    """Print the cases."""
    for case in read_cases():
        peak_mib = case.ground_peak_bytes / 2**20
        print(f"{case.id:48} {peak_mib:8.0f} MiB{' at least: out of memory' if case.out_of_memory else ''}")


if __name__ == "__main__":
    main()
