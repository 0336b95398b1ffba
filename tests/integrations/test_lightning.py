"""The callback trains in Lightning as one process with whole batches would, and leaves nothing of its search behind."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

import autoaccum
from autoaccum import Accumulator, InvalidRequestError, MissingExtraError, Plan, autotune, tokens
from autoaccum.records import Levers

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what Lightning imports
    L = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    from lightning.pytorch.callbacks import BatchSizeFinder, GradientAccumulationScheduler, ModelCheckpoint
    from lightning.pytorch.loggers.logger import Logger

from autoaccum.integrations.lightning import AutoAccum, trainer_kwargs

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning.*"),
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

EXACT = 2e-6


class Rows(L.LightningModule):  # type: ignore[misc,name-defined]
    """A mean over rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        self.after_steps: list[Tensor] = []
        self.calls: list[str] = []

    def loss(self, batch: Any) -> Tensor:
        inputs, target = batch
        return F.cross_entropy(self.net(inputs).flatten(0, -2), target.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls.append("training_step")
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(batch[0]))
        return loss

    def configure_optimizers(self) -> Any:
        self.calls.append("configure_optimizers")
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)

    def on_train_batch_end(self, *args: Any) -> None:
        if len(self.after_steps) < self.trainer.global_step:
            self.after_steps.append(flat(self))


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])


def rows(count: int = 27) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(count, 4, generator=generator), torch.randint(3, (count,), generator=generator))


def texts(count: int = 27) -> TensorDataset:
    """Rows of up to five labels, most of them ignored in some rows."""
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(3, (count, 5), generator=generator)
    labels[torch.rand(count, 5, generator=generator) < 0.6] = -100
    labels[:, 0] = 1
    return TensorDataset(torch.randn(count, 5, 4, generator=generator), labels)


def trainer(*callbacks: Any, **options: Any) -> Any:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return L.Trainer(**{"accelerator": "cpu", "devices": 1, "max_epochs": 2, "callbacks": [*callbacks], **quiet, **options})


def quick(target: int = 10, **options: Any) -> AutoAccum:
    """A callback whose search is short."""
    return AutoAccum(target, **{"max_micro_batch": 3, "device": "virtual:1GiB", "levers": "none", **options})


def whole_batches(model: Rows, data: Any, target: int = 10, epochs: int = 2, clip: float | None = None) -> list[Tensor]:
    """The parameters after each step of one process that takes whole batches."""
    optimizer, after = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9), []
    for batch in [batch for _ in range(epochs) for batch in DataLoader(data, batch_size=target)]:
        optimizer.zero_grad()
        model.loss(batch).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        after.append(flat(model))
    return after


def largest_difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    assert len(ours) == len(theirs)
    return max(float((one - other).abs().max()) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("clip", [None, 0.3])
def test_every_step_is_that_of_the_whole_batch(clip: float | None) -> None:
    """Windows of 10, 10 and 7 rows in micro-batches of 3 and 2, two epochs: parameters agree after each of the six steps."""
    model, data = Rows(), rows()
    expected = whole_batches(copy.deepcopy(model), data, clip=clip)
    callback = quick()
    trainer(callback, gradient_clip_val=clip).fit(model, DataLoader(data, batch_size=6))
    assert callback.plan is not None and callback.plan.micro_batch_sizes == (3, 3, 2, 2)
    assert largest_difference(model.after_steps, expected) < EXACT


@pytest.mark.slow
def test_every_step_is_exact_for_a_loss_over_tokens() -> None:
    """Micro-batches with different numbers of labels count by their labels."""
    model, data = Rows(), texts()
    expected = whole_batches(copy.deepcopy(model), data)
    trainer(AutoAccum(plan=ready_plan(), weight=tokens(1))).fit(model, DataLoader(data))
    assert largest_difference(model.after_steps, expected) < EXACT


@pytest.mark.parametrize("data", [rows(), texts()])
def test_lightning_alone_is_not_exact(data: TensorDataset) -> None:
    """With its own accumulation the last window of an epoch, or a loss over tokens, is off: what the callback is for."""
    model = Rows()
    expected = whole_batches(copy.deepcopy(model), data, target=8)
    trainer(accumulate_grad_batches=4).fit(model, DataLoader(data, batch_size=2))
    assert largest_difference(model.after_steps, expected) > 1e-3


class Module(Rows):
    def train_dataloader(self) -> Any:
        self.calls.append("train_dataloader")
        return DataLoader(rows(), batch_size=5)


class Data(L.LightningDataModule):  # type: ignore[misc,name-defined]
    def train_dataloader(self) -> Any:
        return DataLoader(rows(), batch_size=5)


def test_data_may_come_from_anywhere() -> None:
    """Given to `fit`, by the module or by a data module: the same training."""
    plan, trained = ready_plan(), []
    for model, given in (
        (Rows(), {"train_dataloaders": DataLoader(rows())}),
        (Module(), {}),
        (Rows(), {"datamodule": Data()}),
    ):
        trainer(AutoAccum(plan=plan)).fit(model, **given)
        trained.append(flat(model))
    assert torch.equal(trained[0], trained[1]) and torch.equal(trained[0], trained[2])


def ready_plan(levers: Levers | None = None, target: int = 10) -> Plan:
    """A plan that nothing has to be searched for."""
    plan = searched(target)
    fields = {name: getattr(plan, name) for name in Plan.__struct_fields__}
    return Plan(**fields | ({} if levers is None else {"levers": levers}))


@cache
def searched(target: int) -> Plan:
    return autotune(Rows().net, torch.randn(2, 4), target, max_micro_batch=3, device="virtual:1GiB", levers="none")


class Watched(Logger):
    """Counts what is written, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []

    @property
    def name(self) -> str:
        return "watched"

    @property
    def version(self) -> str:
        return "0"

    @property
    def experiment(self) -> Any:
        return self.steps

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Not looked at."""

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.steps.append(-1 if step is None else step)


class Restless(Rows):
    """Leaves traces wherever it can: statistics, masks, counters, the logger itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))
        self.count = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.count += 1
        self.logger.experiment.append(self.count)
        return super().training_step(batch, batch_idx)

    def on_train_batch_start(self, *args: Any) -> None:
        self.calls.append("on_train_batch_start")


def test_search_leaves_no_trace() -> None:
    """With a search before it, training is bit for bit what it is without: weights, statistics, masks, counters, log."""
    found, ready = [], ready_plan()
    for callback in (quick(), AutoAccum(plan=ready)):
        torch.manual_seed(4)
        model, logger = Restless(), Watched()
        torch.manual_seed(5)
        trainer(callback, logger=logger, log_every_n_steps=1).fit(model, DataLoader(rows(), shuffle=True))
        found.append((flat(model), *model.buffers(), model.count, logger.steps, torch.get_rng_state()))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other
    assert found[0][-3] == 2 * 11  # micro-batches of two epochs


def test_hooks_are_called_as_often_as_without_a_search() -> None:
    """The search asks for data and optimizer once, and calls no hook of a batch."""
    model = Module()
    trainer(quick(), max_epochs=1).fit(model)
    assert model.calls[:2] == ["configure_optimizers", "train_dataloader"]
    assert model.calls.count("train_dataloader") == 1


def test_number_of_steps_is_known_to_configure_optimizers() -> None:
    """Before anything is tuned, `estimated_stepping_batches` is that of the effective batch."""

    class Scheduled(Module):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.2)
            self.expected = self.trainer.estimated_stepping_batches
            schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=int(self.expected))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    model = Scheduled()
    run = trainer(quick())
    run.fit(model)
    assert model.expected == run.global_step == 6
    assert run.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.0)
    assert model.calls.count("train_dataloader") == 1


def test_loader_is_asked_for_anew_when_the_trainer_wants_it() -> None:
    """With `reload_dataloaders_every_n_epochs`, every epoch has the loader that the module then gives."""
    model = Module()
    trainer(AutoAccum(plan=ready_plan()), max_epochs=3, reload_dataloaders_every_n_epochs=1).fit(model)
    assert model.calls.count("train_dataloader") == 3
    assert len(model.after_steps) == 9


@pytest.mark.parametrize("fails", [False, True])
def test_levers_are_on_while_fit_trains_and_off_afterwards(fails: bool) -> None:
    """Also after an error, when the trainer's own settings come back as well."""

    class Looking(Rows):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.seen = self.trainer.optimizers[0].param_groups[0]["foreach"]
            if fails and batch_idx == 5:
                raise KeyError("the user's own")
            return super().training_step(batch, batch_idx)

    model, plan = Looking(), ready_plan(Levers(optimizer_impl="foreach"))
    run = trainer(AutoAccum(plan=plan))
    source = run.fit_loop._data_source
    if fails:
        with pytest.raises(KeyError, match="the user's own"):
            run.fit(model, DataLoader(rows()))
    else:
        run.fit(model, DataLoader(rows()))
    assert model.seen is True
    assert run.optimizers == [] or run.optimizers[0].param_groups[0]["foreach"] is None
    assert run.accumulate_grad_batches == 1 and run.fit_loop._data_source is source


class Deep(Rows):
    """Has blocks that can be checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]
        self.net = nn.Sequential(nn.Linear(4, 8), *blocks, nn.Linear(8, 3))


def test_checkpointed_blocks_train_alike_and_are_saved_as_they_are(tmp_path: Path) -> None:
    """With activation checkpointing on, steps are exact, and a checkpoint made meanwhile has the module's own names."""
    model, data = Deep(), rows()
    names, expected = list(model.state_dict()), whole_batches(copy.deepcopy(model), data)
    plan = ready_plan(Levers(checkpointing="full", checkpointed_blocks=2))
    saving = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
    trainer(AutoAccum(plan=plan), saving, enable_checkpointing=True).fit(model, DataLoader(data))
    assert largest_difference(model.after_steps, expected) < EXACT
    saved = [torch.load(path, weights_only=True)["state_dict"] for path in sorted(tmp_path.glob("*.ckpt"))]
    assert len(saved) == 3 and all(list(state) == names for state in saved)


def test_run_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """Two epochs in one fit, or one fit after another from its checkpoint: the same parameters."""
    whole, parts, data = Rows(), [Rows(), Rows()], rows()
    plan = ready_plan()
    trainer(AutoAccum(plan=plan)).fit(whole, DataLoader(data))
    first = trainer(AutoAccum(plan=plan), max_epochs=1)
    first.fit(parts[0], DataLoader(data))
    first.save_checkpoint(tmp_path / "first.ckpt")
    trainer(AutoAccum(plan=plan)).fit(parts[1], DataLoader(data), ckpt_path=tmp_path / "first.ckpt")
    assert torch.equal(flat(whole), flat(parts[1]))


def test_trainer_of_pytorch_lightning_takes_it_as_well() -> None:
    """The package of the same code under its other name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other = pytest.importorskip("pytorch_lightning", reason="pytorch_lightning is not installed")

    class Other(other.LightningModule):  # type: ignore[misc,name-defined]
        loss = Rows.loss

        def __init__(self) -> None:
            super().__init__()
            self.net, self.after_steps = Rows().net, [torch.empty(0)]

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss(batch)

        configure_optimizers = lambda self: torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)  # noqa: E731

    model = Other()
    expected = whole_batches(Rows(), rows())
    run = other.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[quick()],
    )
    run.fit(model, DataLoader(rows()))
    assert float((flat(model) - expected[-1]).abs().max()) < EXACT


def test_second_fit_tunes_again() -> None:
    """One trainer and one callback, two fits."""
    model, callback = Rows(), quick()
    run = trainer(callback, max_epochs=1)
    run.fit(model, DataLoader(rows()))
    run.fit_loop.max_epochs = 2
    run.fit(model, DataLoader(rows()))
    assert run.global_step == 6


def test_whole_numbers_of_batches_are_effective_batches() -> None:
    """`limit_train_batches=2` is two optimizer steps, and validation every two is after each second one."""

    class Validated(Rows):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.calls.append(f"validated after {self.trainer.global_step}")

    model = Validated()
    run = trainer(
        AutoAccum(plan=ready_plan()), max_epochs=2, limit_train_batches=2, val_check_interval=1, num_sanity_val_steps=0
    )
    run.fit(model, DataLoader(rows()), DataLoader(rows(1)))
    assert [call for call in model.calls if call.startswith("validated")] == [f"validated after {n}" for n in (1, 2, 3, 4)]
    assert (run.limit_train_batches, run.val_check_interval) == (2, 1)


def test_part_of_the_batches_is_a_part_of_the_effective_batches() -> None:
    """`limit_train_batches=0.7` of three windows is two, as `estimated_stepping_batches` says before tuning."""
    model = Rows()
    run = trainer(AutoAccum(plan=ready_plan()), max_epochs=1, limit_train_batches=0.7)
    run.fit(model, DataLoader(rows()))
    assert run.global_step == 2 and model.calls.count("training_step") == 8
    assert run.limit_train_batches == 0.7


@pytest.mark.parametrize(("target", "limit"), [(40, 9), (10, 10)])
def test_window_may_be_all_of_the_data_or_one_micro_batch(target: int, limit: int) -> None:
    """A target above the data's length gives the step of all data; one that fits as a whole needs no accumulation."""
    model, data = Rows(), rows()
    expected = whole_batches(copy.deepcopy(model), data, target=target)
    callback = quick(target, max_micro_batch=limit)
    trainer(callback).fit(model, DataLoader(data))
    assert callback.plan is not None and callback.plan.micro_batch <= limit
    assert largest_difference(model.after_steps, expected) < EXACT


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(rows())


def test_stream_without_length_is_exact() -> None:
    """Nobody knows when it ends; the last window is then as long as it is."""
    model = Rows()
    expected = whole_batches(copy.deepcopy(model), rows(), target=8)
    callback = quick(8)
    trainer(callback).fit(model, DataLoader(Stream(), batch_size=5))
    assert callback.plan is not None and callback.plan.micro_batch_sizes == (2, 2, 2, 2)
    assert largest_difference(model.after_steps, expected) < EXACT


def test_window_without_labels_moves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Its loss is NaN, and its weight zero: parameters stay, and the next window is right."""
    data = TensorDataset(torch.randn(20, 1, 4), torch.cat([torch.full((10, 1), -100), torch.ones(10, 1, dtype=torch.long)]))
    model = Rows()
    before = flat(model)
    trainer(AutoAccum(plan=ready_plan(), weight=tokens(1)), max_epochs=1).fit(model, DataLoader(data))
    assert torch.equal(model.after_steps[0], before)
    assert torch.isfinite(model.after_steps[1]).all() and not torch.equal(model.after_steps[1], before)
    assert "without any weight" in caplog.text


def test_search_runs_the_step_under_the_trainers_precision() -> None:
    """With bf16-mixed, sizes are tried in bfloat16."""

    class Noting(Rows):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.calls.append(str(self.net(batch[0]).dtype))
            return super().training_step(batch, batch_idx)

    model = Noting()
    trainer(quick(), max_epochs=1, precision="bf16-mixed").fit(model, DataLoader(rows()))
    assert model.calls[1] == "torch.bfloat16" and "torch.float32" not in model.calls


def test_hooks_around_the_transfer_belong_to_a_micro_batch() -> None:
    """What they make of a batch is what is tried, whichever class has them."""

    class Transforming(Data):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [batch[0].flatten(1), batch[1]]

        def train_dataloader(self) -> Any:
            inputs, target = rows().tensors
            return DataLoader(TensorDataset(inputs.view(-1, 2, 2), target))

    model, expected = Rows(), whole_batches(Rows(), rows())
    trainer(quick()).fit(model, datamodule=Transforming())
    assert largest_difference(model.after_steps, expected) < EXACT


def test_fast_dev_run_takes_the_data_as_it_is() -> None:
    """One batch to see whether the code runs needs no search."""
    model, callback = Rows(), quick()
    trainer(callback, fast_dev_run=True).fit(model, DataLoader(rows(), batch_size=6))
    assert callback.plan is None and model.calls.count("training_step") == 1


# -- what cannot be exact


class Manual(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Taking(Rows):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        raise AssertionError("never run")


class Without(Rows):
    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        return None


def refused(model: Rows, loader: Any, *callbacks: Any, **options: Any) -> str:
    run = trainer(*(callbacks or [quick()]), **options)
    with pytest.raises(InvalidRequestError) as caught:
        run.fit(model, loader)
    assert run.accumulate_grad_batches == options.get("accumulate_grad_batches", 1)
    return str(caught.value)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (Manual, {}, "use autoaccum.Accumulator inside training_step"),
        (Taking, {}, "expected training_step(batch, batch_idx)"),
        (Without, {}, "training_step returned NoneType"),
        (Rows, {"accumulate_grad_batches": 2}, "accumulate_grad_batches=2) and AutoAccum both set the accumulation"),
        (Rows, {"overfit_batches": 2}, "overfit_batches=2) counts batches of a loader"),
    ],
)
def test_setting_that_cannot_be_exact_is_refused(model: type[Rows], options: Any, message: str) -> None:
    """With the reason and the remedy; the trainer stays as it was."""
    assert message in refused(model(), DataLoader(rows()), **options)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: GradientAccumulationScheduler({1: 2}), "GradientAccumulationScheduler: it sets accumulate_grad_batches"),
        (lambda: quick(8), "several AutoAccum callbacks"),
    ],
)
def test_callback_that_sets_the_same_is_refused(other: Callable[[], Any], message: str) -> None:
    """Two that change the accumulation cannot both be right."""
    assert message in refused(Rows(), DataLoader(rows()), quick(), other())


def test_batch_size_finder_beside_it_is_refused() -> None:
    """Lightning's own finder wants an attribute of the module, which it would change."""

    class Sized(Module):
        batch_size = 2

    assert "BatchSizeFinder: it looks for a batch size as well" in refused(Sized(), None, quick(), BatchSizeFinder())


class OwnBatches(BatchSampler):
    pass


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (DataLoader(rows(), batch_sampler=OwnBatches(SequentialSampler(rows()), 2, False)), "the batch sampler OwnBatches"),
        ([DataLoader(rows()), DataLoader(rows())], "the training data is a list; expected one torch DataLoader"),
        (DataLoader(rows(), drop_last=True), "drop_last=True drops every window: the data has 27 samples"),
        (DataLoader(TensorDataset(torch.zeros(0, 4), torch.zeros(0))), "empty data set"),
    ],
)
def test_data_that_cannot_be_cut_is_refused(loader: Any, message: str) -> None:
    """With the reason."""
    assert message in refused(Rows(), loader, quick(28))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give either target_batch="),
        ({"target_batch": 4, "levers": "all"}, "Trainer\\(precision='bf16-mixed'\\)"),
        ({"target_batch": 4, "levers": ["precision"]}, "would turn the precision"),
        ({"target_batch": 4, "levers": "checkpoint"}, "is no lever"),
        ({"target_batch": 0}, "target_batch=0"),
        ({"target_batch": 4, "weight": "rows"}, "weight='rows' is unknown"),
    ],
)
def test_wrong_argument_is_refused_at_once(arguments: Any, message: str) -> None:
    """Not only when fit starts."""
    with pytest.raises(InvalidRequestError, match=message):
        AutoAccum(**arguments)


def test_missing_lightning_is_said_with_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the callback is made, not where the module is imported."""
    monkeypatch.setitem(sys.modules, "lightning", None)
    with pytest.raises(MissingExtraError, match=r'pip install "autoaccum\[lightning\]"'):
        AutoAccum(8)


def test_plan_for_other_ranks_is_refused() -> None:
    """Its sizes are those of each of two ranks."""
    plan = ready_plan()
    fields = {name: getattr(plan, name) for name in Plan.__struct_fields__}
    two = Plan(**fields | {"world_size": 2, "micro_batch_sizes": (3, 2), "accumulation_steps": 2})
    assert "the plan is for 2 ranks and the trainer has 1" in refused(Rows(), DataLoader(rows()), AutoAccum(plan=two))


# -- plain keywords


def test_equal_plan_becomes_keywords_of_the_trainer() -> None:
    """They are accepted by Trainer as they are."""
    plan = ready_plan(Levers(precision="bf16"), target=9)
    assert trainer_kwargs(plan) == {"accumulate_grad_batches": 3, "precision": "bf16-mixed"}
    assert trainer(**trainer_kwargs(plan)).accumulate_grad_batches == 3


@pytest.mark.parametrize(
    ("levers", "target", "message"),
    [
        (None, 10, r"micro-batches have 2 to 3 rows.*equal_micro_batches=True"),
        (Levers(precision="tf32"), 9, "set_float32_matmul_precision"),
        (Levers(optimizer_impl="foreach"), 9, r"Trainer cannot turn optimizer_impl.*AutoAccum\(plan=plan\)"),
    ],
)
def test_plan_that_a_trainer_cannot_follow_is_refused(levers: Levers | None, target: int, message: str) -> None:
    """With what to do instead."""
    with pytest.raises(InvalidRequestError, match=message):
        trainer_kwargs(ready_plan(levers, target))


# -- manual optimization


class Gan(L.LightningModule):  # type: ignore[misc,name-defined]
    """Two networks, two optimizers; the loader yields whole batches, and each phase has an accumulator."""

    def __init__(self, micro_batch: int) -> None:
        super().__init__()
        self.automatic_optimization, self.micro_batch = False, micro_batch
        torch.manual_seed(3)
        self.generator = nn.Linear(4, 8)
        self.critic = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.generator.parameters(), 1e-2), torch.optim.Adam(self.critic.parameters(), 1e-2)

    def on_fit_start(self) -> None:
        generator, critic = self.optimizers()
        size = self.micro_batch
        self.generating = Accumulator(self.generator, generator, micro_batch=size, training_step=self.generator_loss)
        self.judging = Accumulator(self.critic, critic, micro_batch=size, training_step=self.critic_loss)

    def critic_loss(self, critic: nn.Module, batch: Any) -> Tensor:
        real, noise = batch
        out = critic(torch.cat([real, self.generator(noise).detach()]))
        return F.softplus(-out[: len(real)]).mean() + F.softplus(out[len(real) :]).mean()

    def generator_loss(self, generator: nn.Module, batch: Any) -> Tensor:
        return F.softplus(-self.critic(generator(batch[1]))).mean()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.log("critic", self.judging.step(batch).loss)
        self.log("generator", self.generating.step(batch).loss)


def test_two_accumulators_train_a_gan_under_manual_optimization() -> None:
    """Micro-batches of 5 give the parameters of whole batches of 20, and the trainer counts the steps of both."""
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(50, 8, generator=generator), torch.randn(50, 4, generator=generator))
    trained = []
    for micro_batch in (5, 20):
        model, run = Gan(micro_batch).double(), trainer(max_epochs=1, precision="64-true")
        run.fit(model, DataLoader(data, batch_size=20))
        assert run.global_step == 2 * 3
        trained.append(flat(model))
    assert float((trained[0] - trained[1]).abs().max()) < 1e-12


# -- several ranks, and real memory

RANKS = """
import json, sys
from pathlib import Path
import torch
sys.path.insert(0, {tests!r})
from test_lightning import *

class Uneven(Rows):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

if __name__ == "__main__":
    found = {{}}
    for name, data, options in (
        ("rows", rows(21), {{}}),
        ("tokens", texts(23), {{"weight": tokens(1)}}),
        ("shuffled", rows(27), {{}}),
    ):
        model = Uneven()
        expected = whole_batches(copy.deepcopy(model), data, clip=0.3)
        loader = DataLoader(data, batch_size=4, shuffle=name == "shuffled")
        callback = quick(max_micro_batch=2, **options)
        run = trainer(callback, devices=2, strategy="ddp", gradient_clip_val=0.3)
        run.fit(model, loader)
        seen = [callback.plan.micro_batch_sizes, [callback.plan.schedule(rank) for rank in range(2)], run.global_step]
        same = largest_difference(model.after_steps, expected) if name != "shuffled" else 0.0
        found[name] = [*seen, same, flat(model).tolist()]
    fields = {{name: getattr(callback.plan, name) for name in Plan.__struct_fields__}}
    levers = Levers(checkpointing="full", checkpointed_blocks=2, optimizer_impl="foreach")
    model, data = Deep(), rows(27)
    expected = whole_batches(copy.deepcopy(model), data)
    run = trainer(AutoAccum(plan=Plan(**fields | {{"levers": levers}})), devices=2, strategy="ddp")
    run.fit(model, DataLoader(data))
    difference = largest_difference(model.after_steps, expected)
    found["levers"] = [*found["rows"][:2], run.global_step, difference, flat(model).tolist()]
    Path(sys.argv[1], f"rank{{run.global_rank}}.json").write_text(json.dumps(found))
"""


@pytest.mark.slow
def test_two_ranks_take_the_steps_of_one_process(tmp_path: Path) -> None:
    """DDP over gloo: one plan, 5 and 5 rows in equal numbers of micro-batches, the last window of 1 or 3 rows; clipped."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(RANKS.format(tests=str(Path(__file__).parent))))
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
        env=rank_environment(),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first == second
    for sizes, of_ranks, steps, difference, _ in first.values():
        assert (sizes, of_ranks, steps) == ([2, 2, 1], [[2, 2, 1], [2, 2, 1]], 6)
        assert difference < EXACT


def rank_environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(autoaccum.__file__).parents[1]), "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_fit_stays_inside_a_real_budget(run_child: Callable[..., Any]) -> None:
    """In host memory: what is tuned under a budget trains three optimizer steps inside it, and as the whole batch would."""
    found = run_child(
        f"""
        import warnings
        warnings.simplefilter("ignore")
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_lightning import *

        class Wide(Rows):
            def __init__(self):
                super().__init__()
                self.net = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.Linear(1024, 3))
            def on_train_batch_end(self, *args):
                pass  # no copies of the parameters

        torch.manual_seed(0)
        data = TensorDataset(torch.randn(56_000, 64), torch.randint(3, (56_000,)))
        model = Wide()
        other = copy.deepcopy(model)
        def resident():
            return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) * 1024
        def held():
            return int(next(l for l in open("/proc/self/status") if l.startswith("VmRSS")).split()[1]) * 1024
        budget = held() + 280 * 2**20
        callback = AutoAccum(24_000, budget=budget, levers="none", time_budget_s=30)
        class Watching(L.Callback):
            def on_train_start(self, *args):
                open("/proc/self/clear_refs", "w").write("5")
        run = trainer(callback, Watching(), max_epochs=1)
        run.fit(model, DataLoader(data, batch_size=64))
        peak = resident()
        expected = whole_batches(other, data, target=24_000, epochs=1)[-1]
        plan = callback.plan
        answer([plan.limited_by, plan.accumulation_steps, run.global_step, peak - budget,
                float((flat(model) - expected).abs().max())])
        """
    )
    limited_by, accumulation_steps, steps, above_bytes, difference = found
    assert (limited_by, steps) == ("memory", 3) and accumulation_steps > 1
    assert above_bytes <= 12 * 2**20  # what a process holds besides its tensors wanders by so much; one row takes 16 KiB
    assert difference < EXACT
