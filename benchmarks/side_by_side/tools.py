"""How each tool is asked for the largest batch, the way its own documentation shows.

Tools whose documentation wraps the user's training (accelerate, toma, torch-max-mem) get a training of three optimizer
steps, as many as Lightning takes for a size, and as the true limit is of. The size a user starts from is the batch that is
wanted, unless the documentation has another.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from side_by_side.caps import Cap
from side_by_side.cases import Batch, Case
from side_by_side.watching import is_oom
from torch import nn
from torch.utils.data import DataLoader

STEPS = 3


@dataclass
class Setting:
    """What a user has in hand when asking for a batch size.

    Attributes:
        folder: Where tools may write.
    """

    case: Case
    model: nn.Module
    optimizer: torch.optim.Optimizer
    cap: Cap
    folder: str

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.cap.device

    def batch(self, rows: int) -> Batch:
        """A batch on the device."""
        return self.case.batch(rows, self.device)


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A tool, and how it is called.

    Attributes:
        find: Returns the answer in rows, None where it says that nothing fits.
        package: The distribution that has it.
        rebuilds: Whether, by its documentation, the user's function makes model and optimizer anew for every size, so that
            there is no earlier state to keep.
        accumulates: Whether the answer is a micro-batch of a larger effective batch.
        loads_late: Whether it loads modules when it is first called.
    """

    find: Callable[[Setting], int | None]
    package: str
    rebuilds: bool = False
    accumulates: bool = False
    loads_late: bool = True

    def version(self) -> str | None:
        """The installed version, None where it is not installed."""
        try:
            return version(self.package)
        except PackageNotFoundError:
            return None


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, steps: int) -> None:
    """The plain loop: a batch for each optimizer step."""
    for _ in range(steps):
        optimizer.zero_grad()
        model(**batch)["loss"].backward()
        optimizer.step()


def autoaccum_probe(setting: Setting) -> int | None:
    """`autoaccum.probe`, bounded by the batch that is wanted; on a GPU it is told the cap, on the host it sees it."""
    import autoaccum

    result = autoaccum.probe(
        setting.model,
        setting.batch(2),
        optimizer=setting.optimizer,
        budget="100%" if setting.device.type == "cpu" else setting.cap.limit_bytes(setting.case.room_bytes),
        max_micro_batch=setting.case.target_batch,
    )
    return result.max_micro_batch


def accelerate_search(setting: Setting, start: int | None = None) -> int | None:
    """`find_executable_batch_size` around a function that makes model and optimizer itself and trains."""
    from accelerate import Accelerator
    from accelerate.utils import find_executable_batch_size

    accelerator = Accelerator(cpu=setting.device.type == "cpu")

    @find_executable_batch_size(starting_batch_size=start or setting.case.target_batch)
    def training(batch_size: int) -> int:
        nonlocal accelerator
        accelerator.free_memory()
        model = setting.case.model()
        optimizer = setting.case.optimizer_of(model.parameters())
        loader = DataLoader(setting.case.data(), batch_size=batch_size)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for _, batch in zip(range(STEPS), loader, strict=False):
            optimizer.zero_grad()
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
        return batch_size

    found: int = training()
    return found


def lightning_search(setting: Setting, mode: str) -> int | None:
    """`Tuner.scale_batch_size` on a module that has a `batch_size` and makes its own loader."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.tuner import Tuner

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.batch_size = setting.model, 2

        def training_step(self, batch: Batch, index: int) -> torch.Tensor:
            return self.model(**batch)["loss"]  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return setting.case.optimizer_of(self.parameters())

        def train_dataloader(self) -> Any:
            return DataLoader(setting.case.data(), batch_size=self.batch_size)

    accelerator = "cpu" if setting.device.type == "cpu" else "gpu"
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(accelerator=accelerator, devices=1, default_root_dir=setting.folder, **quiet)
    found: int | None = Tuner(trainer).scale_batch_size(Module(), mode=mode)
    return found


def trainer_search(setting: Setting) -> int | None:
    """`Trainer` with `auto_find_batch_size`, told the batch that is wanted."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=setting.folder,
        per_device_train_batch_size=setting.case.target_batch,
        auto_find_batch_size=True,
        max_steps=STEPS,
        use_cpu=setting.device.type == "cpu",
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(setting.model, arguments, train_dataset=setting.case.data(), optimizers=(setting.optimizer, None))
    trainer.train()
    return trainer.state.train_batch_size


def batch_probe_model(setting: Setting) -> int | None:
    """`probe_batch_size`, which takes AdamW for its step and subtracts 20 %."""
    from batch_probe import probe_batch_size

    return probe_batch_size(setting.model, setting.batch, verbose=False)  # type: ignore[no-any-return]


def batch_probe_work(setting: Setting) -> int | None:
    """`probe`, for any work that raises an out-of-memory error; the host's is told to it as `MemoryError`."""
    from batch_probe import probe

    def work(rows: int) -> None:
        try:
            train(setting.model, setting.optimizer, setting.batch(rows), 1)
        except RuntimeError as error:
            if is_oom(error):
                raise MemoryError(str(error)) from None
            raise

    return probe(work, backend="torch", verbose=False)  # type: ignore[no-any-return]


def batch_finder_search(setting: Setting) -> int | None:
    """`find_max_minibatch`, forward and backward without an optimizer, on random inputs of the shapes it is told."""
    from batch_finder import find_max_minibatch

    row = setting.case.row()
    if "input_ids" not in row:  # its random labels go beyond ten classes; without labels it takes the sum of the outputs
        del row["labels"]
    shapes = {name: _shape_in_words(value) for name, value in row.items()}
    return find_max_minibatch(  # type: ignore[no-any-return]
        setting.case.model, input_shapes={**shapes, "#constraints": "b=-1"}, device=setting.device, use_subprocess=False
    )


def _shape_in_words(value: torch.Tensor) -> str:
    kind = "float" if value.is_floating_point() else "int"
    return f"({', '.join(['b', *map(str, value.shape)])}), {kind}"


def toma_search(setting: Setting) -> int | None:
    """`toma.batch` around the training."""
    from toma import toma

    @toma.batch(initial_batchsize=setting.case.target_batch)  # type: ignore[untyped-decorator]
    def training(batchsize: int) -> int:
        train(setting.model, setting.optimizer, setting.batch(batchsize), STEPS)
        return batchsize

    return training()  # type: ignore[no-any-return]


def torch_max_mem_search(setting: Setting) -> int | None:
    """`maximize_memory_utilization` around the training."""
    from torch_max_mem import maximize_memory_utilization

    @maximize_memory_utilization()
    def training(batch_size: int) -> int:
        train(setting.model, setting.optimizer, setting.batch(batch_size), STEPS)
        return batch_size

    return training(batch_size=setting.case.target_batch)


TOOLS: dict[str, Tool] = {
    "autoaccum": Tool(find=autoaccum_probe, package="autoaccum", accumulates=True),
    "accelerate": Tool(find=accelerate_search, package="accelerate", rebuilds=True),
    "accelerate, default start": Tool(find=partial(accelerate_search, start=128), package="accelerate", rebuilds=True),
    "Lightning binsearch": Tool(find=partial(lightning_search, mode="binsearch"), package="lightning"),
    "Lightning power": Tool(find=partial(lightning_search, mode="power"), package="lightning"),
    "HF Trainer": Tool(find=trainer_search, package="transformers"),
    "batch-probe (model)": Tool(find=batch_probe_model, package="batch-probe", loads_late=False),
    "batch-probe (work)": Tool(find=batch_probe_work, package="batch-probe", loads_late=False),
    "batch-finder": Tool(find=batch_finder_search, package="batch-finder", loads_late=False, rebuilds=True),
    "toma": Tool(find=toma_search, package="toma", loads_late=False),
    "torch-max-mem": Tool(find=torch_max_mem_search, package="torch_max_mem", loads_late=False),
}
SMALL_TOOLS = ("autoaccum", "accelerate", "Lightning binsearch")
NOT_SHOWN = {
    "koila": "asks a GPU's driver for the memory and runs nothing: no answer without a GPU",
    "autovram, DeepSpeed autotuning": "start the user's script anew for every size on a GPU",
    "Composer, Ultralytics, RF-DETR, Ludwig": "find a size inside their own trainers, on GPUs, for their own models",
    "torch-kitsune": "estimates, and runs nothing",
}


def quiet() -> None:
    """No network, no bars, no advice: none of it is what is measured."""
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", PYTORCH_NVML_BASED_CUDA_CHECK="1")
