"""Lightning Fabric: an Accumulator takes what `fabric.setup` gives, and is refused where Fabric would scale again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import types
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import autoaccum
from autoaccum import Accumulator, InvalidRequestError, autotune

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what Lightning imports
    fabric_module = pytest.importorskip("lightning.fabric", reason="lightning is not installed")
    from lightning.fabric import Fabric

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning.*"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*"),
]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def rows() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(27, 4, generator=generator), torch.randint(3, (27,), generator=generator))


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def whole_batches(model: nn.Module) -> Tensor:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for inputs, target in DataLoader(rows(), batch_size=10):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), target).backward()
        optimizer.step()
    return flat(model)


@pytest.mark.slow
def test_objects_that_are_set_up_take_the_whole_batchs_steps() -> None:
    """Tuned before `setup`, trained after it, over a loader of Fabric's that yields whole batches."""
    model, expected = network(), whole_batches(network())
    plan = autotune(model, rows(), 10, loss_fn=F.cross_entropy, max_micro_batch=3, device="virtual:1GiB", levers="none")
    fabric = Fabric(accelerator="cpu", devices=1)
    wrapped, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    loader = fabric.setup_dataloaders(DataLoader(rows(), batch_size=10))
    acc = Accumulator(wrapped, optimizer, plan=plan, loss_fn=F.cross_entropy)
    assert [acc.step(batch).micro_batch_sizes for batch in loader] == [(3, 3, 2, 2)] * 2 + [(3, 2, 2)]
    assert float((flat(model) - expected).abs().max()) < 2e-6


def test_wrapped_module_in_mixed_precision_is_refused_with_the_way_to_do_it() -> None:
    """Fabric wants its own backward there; the module inside, under Fabric's autocast, is the same arithmetic."""
    model, fabric = network(), Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    wrapped, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    with pytest.raises(InvalidRequestError, match=r"pass model\.module instead, and call it in fabric\.autocast\(\)"):
        Accumulator(wrapped, optimizer, micro_batch=3, loss_fn=F.cross_entropy)
    seen = []

    def step(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        with fabric.autocast():
            out = module(batch[0])
            seen.append(out.dtype)
            return F.cross_entropy(out, batch[1])

    acc = Accumulator(wrapped.module, optimizer, micro_batch=3, training_step=step)
    assert not acc.step(rows().tensors).skipped
    assert set(seen) == {torch.bfloat16}


def test_optimizer_with_a_scaler_of_its_own_is_refused() -> None:
    """Its step would divide gradients by a scale that no loss was multiplied with."""
    model, fabric = network(), Fabric(accelerator="cpu", devices=1)
    _, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    optimizer._strategy = types.SimpleNamespace(precision=types.SimpleNamespace(scaler=torch.amp.GradScaler("cpu")))
    with pytest.raises(InvalidRequestError, match=r"pass optimizer\.optimizer and scaler="):
        Accumulator(model, optimizer, micro_batch=3, loss_fn=F.cross_entropy)


RANKS = """
import sys
sys.path.insert(0, {tests!r})
from test_fabric import *

if __name__ == "__main__":
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    model = network()
    wrapped, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    acc = Accumulator(wrapped, optimizer, micro_batch=2, loss_fn=F.cross_entropy)
    sizes = []
    for inputs, target in DataLoader(rows(), batch_size=10):  # rank 0 takes 7 of 10 rows, rank 1 the rest
        mine = slice(0, 7) if fabric.global_rank == 0 else slice(7, None)
        sizes.append(acc.step((inputs[mine], target[mine])).weight)
    difference = float((flat(model) - whole_batches(network())).abs().max())
    Path(sys.argv[1], f"rank{{fabric.global_rank}}.json").write_text(json.dumps([sizes, difference]))
"""


@pytest.mark.slow
def test_two_ranks_with_uneven_shares_take_the_steps_of_one_process(tmp_path: Path) -> None:
    """DDP over gloo, 7 and 3 rows of each batch, none on one rank in the last: the gradient of all of them."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(RANKS.format(tests=str(Path(__file__).parent))))
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(autoaccum.__file__).parents[1]), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    for rank in range(2):
        sizes, difference = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert sizes == [10.0, 10.0, 7.0]
        assert difference < 2e-6
