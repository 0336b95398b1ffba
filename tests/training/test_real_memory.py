"""Running out of real memory in the middle of a window, on a real model, in a process of its own under RLIMIT_DATA."""

from __future__ import annotations

import sys
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA limits allocations on Linux only"),
]

CHILD = """
import gc, logging, resource
import torch
from torch import nn
from autoaccum import Accumulator, tokens
from autoaccum.devices.cpu import CpuDevice
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=2048, hidden_size=128, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=128, attention_dropout=0.1,
)
model = LlamaForCausalLM(config)
model.train()
ids = torch.randint(0, 2048, (24, 128))
labels = ids.clone()
for row in range(24):
    labels[row, 8 + 4 * row :] = -100  # uneven answers
batch = {"input_ids": ids, "labels": labels}

class Recording(torch.optim.SGD):
    def step(self, closure=None):
        self.gradients = [p.grad.clone() for group in self.param_groups for p in group["params"]]
        super().step(closure)

def run(micro_batch):
    optimizer = Recording(model.parameters(), lr=0.0)  # the parameters stay what they are
    acc = Accumulator(model, optimizer, micro_batch=micro_batch, weight=tokens("labels", shift=True))
    torch.manual_seed(7)
    step = acc.step(batch)
    return acc, step, optimizer.gradients, torch.get_rng_state()

device = CpuDevice()
with device.steadied():
    run(2)
    gc.collect()
    device.release()
    held = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData")) * 1024
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (held + 160 * 2**20, before[1]))
    acc, step, gradients, generator = run(24)
    second = acc.step(batch)
    resource.setrlimit(resource.RLIMIT_DATA, before)
    _, expected, reference, generator_expected = run(max(step.micro_batch_sizes))
answer({
    "replays": step.replays, "sizes": step.micro_batch_sizes, "expected_sizes": expected.micro_batch_sizes,
    "same": all(torch.equal(a, b) for a, b in zip(gradients, reference)),
    "loss": step.loss == expected.loss, "generator": torch.equal(generator, generator_expected),
    "second_replays": second.replays, "weight": step.weight, "labels": int((labels[:, 1:] != -100).sum()),
})
"""


@pytest.fixture(scope="module")
def found(run_child: Any) -> dict[str, Any]:
    """One window that runs out of memory and is replayed, and the same window in small micro-batches from the start."""
    answer: dict[str, Any] = run_child(CHILD)
    return answer


def test_window_is_replayed_smaller(found: dict[str, Any]) -> None:
    """24 rows do not fit at once; the window goes through in smaller micro-batches, all rows in it."""
    assert found["replays"] >= 1
    assert len(found["sizes"]) > 1
    assert sum(found["sizes"]) == 24
    assert found["weight"] == found["labels"]


def test_replay_is_bit_equal(found: dict[str, Any]) -> None:
    """Gradients, loss and generator are those of a run that used the smaller size from the start, with dropout."""
    assert found["sizes"] == found["expected_sizes"]
    assert found["same"]
    assert found["loss"]
    assert found["generator"]


def test_limit_is_remembered(found: dict[str, Any]) -> None:
    """The next window starts with what fitted."""
    assert found["second_replays"] == 0
