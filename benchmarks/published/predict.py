"""Predicts the published runs of one family as this package does: run by the family's interpreter, see `environments`.

    python benchmarks/published/predict.py cnn          # prints one line of JSON a run, the versions first
    python benchmarks/published/predict.py cnn resnet   # only the runs whose id has this text

The package's own recorder, corrections and allocator follow the loop of the published runs on fake tensors. Knows nothing
of the published peaks.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import build
import torch
from cases import Case, read_cases
from environments import versions
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autoaccum.predicting import interval_frac
from autoaccum.prediction.allocator import Replay, replay
from autoaccum.prediction.corrections import as_on
from autoaccum.prediction.gpu_names import gpu_for
from autoaccum.prediction.recorder import Recorder
from autoaccum.prediction.trace import Trace


def main() -> None:
    """Print the versions, then a line for each run of the family; exact repeats are traced once."""
    family, part = sys.argv[1], "".join(sys.argv[2:])
    print(json.dumps({"environment": versions()}), flush=True)
    known: dict[str, dict[str, Any]] = {}
    for case in read_cases():
        if case.family == family and part in case.id:
            if case.repeat_group not in known:
                known[case.repeat_group] = predicted(case)
            print(json.dumps({"id": case.id, **known[case.repeat_group]}), flush=True)


def predicted(case: Case) -> dict[str, Any]:
    """What the allocator would come to, with all workspaces that convolutions may take, and with none of them."""
    trace, usable_bytes = recorded(case), gpu_for(case.gpu).usable_bytes
    with torch.device("meta"):
        error = interval_frac(build.build_model(case.model))
    return {
        "limit_bytes": usable_bytes,
        "interval_frac": error,
        "all_workspaces": _figures(replay(trace.events, trace.sizes, limit_bytes=usable_bytes)),
        "no_workspaces": _figures(replay(_without_workspaces(trace), trace.sizes, limit_bytes=usable_bytes)),
    }


def _figures(played: Replay) -> dict[str, Any]:
    return {
        "reserved_bytes": played.peak_reserved_bytes,
        "allocated_bytes": played.peak_allocated_bytes,
        "fits": played.fits,
        "flushes": played.flushes,
    }


def recorded(case: Case) -> Trace:
    """The allocations of a run's four iterations, as its GPU would make them."""
    gpu, recorder = gpu_for(case.gpu), Recorder()

    def mark(phase: Any) -> None:
        recorder.progress.phase = phase

    answers = build.answered(case.batch_size) if case.family == "transformer" else nullcontext()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = build.build_model(case.model).train()
        with answers, recorder.recording():
            recorder.hold(list(moved_in_order(model)), "weights")
            optimizer = build.make_optimizer(case, model)
            with as_on(gpu)(recorder, optimizer):
                build.run_loop(
                    model,
                    optimizer,
                    [partial(build.make_batch, case)] * build.ITERATIONS,
                    family=case.family,
                    zero_grad_mode=case.zero_grad_mode,
                    mark=mark,
                )
                return recorder.trace(case.batch_size, sums_in_place=True)


def moved_in_order(module: nn.Module) -> Iterator[torch.Tensor]:
    """Parameters and buffers in the order in which `Module.to` moves them: those of children first."""
    for child in module.children():
        yield from moved_in_order(child)
    yield from (tensor for tensor in module._parameters.values() if tensor is not None)
    yield from (tensor for tensor in module._buffers.values() if tensor is not None)


def _without_workspaces(trace: Trace) -> list[int]:
    """The events without the workspaces that convolutions give back; a matrix library keeps its own."""
    given_back = {~event for event in trace.events if event < 0 and trace.kinds[~event] == "workspaces"}
    return [event for event in trace.events if (event if event >= 0 else ~event) not in given_back]


if __name__ == "__main__":
    main()
