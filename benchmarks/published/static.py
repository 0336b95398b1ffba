"""Asks torch-kitsune, a static predictor, for the published runs: run by the interpreter of "kitsune", see `environments`.

    python benchmarks/published/static.py      # prints one line of JSON a run, the versions first

Asked as its README says: `predict_memory` for models that are there, `predict_hf_memory` for those of the Hugging Face hub,
in training mode, float32, with the run's optimizer and shapes. Its answer is made of shapes only, so models and inputs are
on the meta device, which gives the same bytes as real ones and takes no memory.

The hub is not asked: `predict_hf_memory` gets the configuration that it would read there. As it builds models without the
language-model head, the run's own model is given to `predict_memory` too, and both answers are printed. Both feed floating
point numbers, which no embedding takes, and fall back on formulas that know no attention.
"""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

import build
import torch
from cases import IMAGE_PIXELS, MAX_TOKENS, TEXT_MODELS, Case, read_cases
from environments import versions

OPTIMIZERS = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad")
"""Those it has a rule for; another one is counted as if it were Adam, which is no prediction."""


def main() -> None:
    """Print the versions, then a line for each run."""
    print(json.dumps({"environment": versions()}), flush=True)
    known: dict[str, dict[str, Any]] = {}
    for case in read_cases():
        if case.repeat_group not in known:
            known[case.repeat_group] = answers(case)
        print(json.dumps({"id": case.id, **known[case.repeat_group]}), flush=True)


def answers(case: Case) -> dict[str, Any]:
    """Bytes by the way of asking, or why it cannot be asked."""
    if case.optimizer not in OPTIMIZERS:
        return {"refused": f"no rule for {case.optimizer}"}
    if case.family == "cnn":
        return {"as_documented_bytes": _asked(case, (3, IMAGE_PIXELS, IMAGE_PIXELS))}
    return {"as_documented_bytes": _hub_asked(case), "own_model_bytes": _asked(case, (MAX_TOKENS,))}


def _asked(case: Case, input_shape: tuple[int, ...]) -> int:
    from kitsune.predict import predict_memory

    with torch.device("meta"):
        result = predict_memory(build.build_model(case.model), input_shape=input_shape, **_options(case))
    return int(result.total_bytes)


def _hub_asked(case: Case) -> int:
    import transformers
    from kitsune.predict.hf_integration import predict_hf_memory

    entry = TEXT_MODELS[case.model]
    config = getattr(transformers, entry.config)(**entry.dimensions)
    with mock.patch.object(transformers.AutoConfig, "from_pretrained", lambda *arguments, **keywords: config):
        result = predict_hf_memory(case.model, seq_len=MAX_TOKENS, **_options(case))
    return int(result.total_bytes)


def _options(case: Case) -> dict[str, Any]:
    return {
        "batch_size": case.batch_size,
        "dtype": "float32",
        "optimizer": case.optimizer.lower(),
        "training": True,
    }


if __name__ == "__main__":
    main()
