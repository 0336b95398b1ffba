"""The user's model, loss and optimizer as one thing that takes a training step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoaccum.errors import InvalidRequestError
from autoaccum.losses import UNUSED_LOSS_FN
from autoaccum.workload import Workload, num_bytes, step_hooks_suspended

SAMPLE = torch.randn(4, 3)


def test_training_step_wins_over_loss_function() -> None:
    """With both given, only the training step is called, and a warning says so."""
    workload = Workload(
        nn.Linear(3, 2),
        (SAMPLE, torch.randint(2, (4,))),
        loss_fn=lambda output, target: pytest.fail("called"),
        training_step=lambda model, batch: model(batch[0]).sum() * 0 + 7,
    )
    assert float(workload.loss(workload.source.take(2)).detach()) == 7
    assert workload.warnings == [UNUSED_LOSS_FN]


def test_loss_function_gets_output_and_target() -> None:
    """loss_fn(output, target) is called with the model's output on the input and the sample's target."""
    model = nn.Linear(3, 2)
    target = torch.randint(2, (4,))
    workload = Workload(model, (SAMPLE, target), loss_fn=F.cross_entropy)
    assert torch.equal(workload.loss((SAMPLE, target)), F.cross_entropy(model(SAMPLE), target))


def test_loss_before_training_step_before_mean_of_outputs_is_said() -> None:
    """Without any loss the mean of the outputs is used and a warning says so."""
    model = nn.Linear(3, 2)
    workload = Workload(model, SAMPLE)
    assert torch.allclose(workload.loss(SAMPLE), model(SAMPLE).mean())
    assert "mean of its outputs" in workload.warnings[0]


def test_wrapper_is_taken_off() -> None:
    """A DataParallel wrapper is not what is probed."""
    inner = nn.Linear(3, 2)
    assert Workload(nn.DataParallel(inner), SAMPLE).module is inner


def test_model_without_values_is_no_workload_to_run() -> None:
    """A model on the meta device can be predicted, not run."""
    with pytest.raises(InvalidRequestError, match="meta device"):
        Workload(nn.Linear(3, 3, device="meta"), SAMPLE).refuse_meta()


@pytest.mark.parametrize(
    ("optimizer", "name"),
    [
        (None, "AdamW (assumed)"),
        (torch.optim.SGD, "SGD"),
        (lambda parameters: torch.optim.Adam(parameters), "<lambda>"),
    ],
)
def test_optimizer_is_named_and_made_of_trainable_parameters(optimizer: Any, name: str) -> None:
    """A factory is called with the trainable parameters; nothing given means AdamW."""
    model = nn.Sequential(nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 2))
    workload = Workload(model, SAMPLE, optimizer=optimizer)
    made = workload.make_optimizer()
    assert workload.optimizer_name == name
    assert [id(p) for group in made.param_groups for p in group["params"]] == [id(p) for p in model[1].parameters()]


def test_own_optimizer_is_used_as_it_is() -> None:
    """A ready optimizer is the one that steps."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    workload = Workload(model, SAMPLE, optimizer=optimizer)
    assert workload.make_optimizer() is workload.own_optimizer is optimizer


def test_account_splits_trainable_and_frozen() -> None:
    """Frozen weights have no gradient; buffers are apart."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False).requires_grad_(False), nn.BatchNorm1d(4))
    account = Workload(model, torch.randn(2, 4)).account(optimizer_state_bytes=9)
    assert (account.trainable_bytes, account.frozen_bytes, account.gradient_bytes) == (32, 64, 32)
    assert (account.buffer_bytes, account.optimizer_state_bytes) == (40, 9)


def test_shared_storage_counts_once() -> None:
    """Views and repeats of one tensor are one storage."""
    tensor = torch.zeros(10)
    assert num_bytes([tensor, tensor, tensor[2:], None]) == 40


def test_batch_norms_that_use_the_batch_are_listed() -> None:
    """Those in train mode, and those that keep no statistics at all; a frozen one is left out."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3).eval(), nn.BatchNorm1d(3, track_running_stats=False).eval())
    assert Workload(model, SAMPLE).training_batch_norms() == ["0", "2"]


def test_model_in_eval_mode_is_set_to_train_but_for_batch_norm() -> None:
    """A freshly loaded model is probed as it will be trained, its BatchNorm left frozen, and that is said."""
    model = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(3), nn.Linear(3, 2)).eval()
    workload = Workload(model, SAMPLE)
    workload.set_training_mode()
    assert [module.training for module in model.modules()] == [True, True, False, True]
    assert "eval mode" in workload.warnings[0]


def test_model_in_train_mode_keeps_its_frozen_parts() -> None:
    """Where the root is in train mode the caller chose what is not."""
    model = nn.Sequential(nn.Dropout(0.5).eval(), nn.Linear(3, 2))
    workload = Workload(model, SAMPLE)
    workload.set_training_mode()
    assert not model[0].training
    assert workload.warnings == []


def test_step_hooks_come_back() -> None:
    """Hooks of the optimizer's steps are silent inside and there again afterwards."""
    model, seen = nn.Linear(3, 2), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *args: seen.append("pre"))
    optimizer.register_step_post_hook(lambda *args: seen.append("post"))
    with step_hooks_suspended(optimizer):
        optimizer.step()
    assert seen == []
    optimizer.step()
    assert seen == ["pre", "post"]


def test_moved_model_keeps_its_parameters() -> None:
    """After a move the optimizer's parameters are still the model's."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    workload = Workload(model, SAMPLE, optimizer=optimizer)
    workload.move_to(torch.device("cpu"))
    assert optimizer.param_groups[0]["params"][0] is model.weight
    assert workload.device == torch.device("cpu")


@pytest.mark.parametrize(
    ("losses", "counts_rows"),
    [
        ({"loss_fn": F.cross_entropy}, False),
        ({"loss_fn": F.cross_entropy, "training_step": lambda model, batch: model(batch[0]).mean()}, True),
        ({}, True),
    ],
    ids=["loss_fn", "training_step", "neither"],
)
def test_weight_is_that_of_the_loss_that_is_used(losses: Any, counts_rows: bool) -> None:
    """With "samples", a loss of torch's says what it divides by, but not where a training step wins over it."""
    assert Workload(nn.Linear(3, 2), (SAMPLE, torch.randint(2, (4,))), **losses).weigher.counts_rows == counts_rows


class Detector(nn.Module):
    """Takes lists of images and targets; losses in train mode, detections otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 5)

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None) -> Any:
        outputs = [self.head(self.convolution(image[None]).mean((2, 3))[0]) for image in images]
        if not self.training:
            return [{"boxes": output[None, :4]} for output in outputs]
        assert targets is not None
        boxes = [
            (output[:4] - target["boxes"].mean(0)).pow(2).mean() if len(target["boxes"]) else output[:4].sum() * 0
            for output, target in zip(outputs, targets, strict=True)
        ]
        return {"loss_box": torch.stack(boxes).mean(), "loss_class": torch.stack(outputs)[:, 4].pow(2).mean()}


def test_detector_with_lists_is_called_with_both_and_its_losses_are_summed() -> None:
    """Lists of images and targets go in together; the dict of losses is summed; an image without boxes is no trouble."""
    images = [torch.rand(3, 8 + index, 9) for index in range(4)]
    targets = [{"boxes": torch.rand(index % 3, 4), "labels": torch.ones(index % 3)} for index in range(4)]
    model = Detector()
    workload = Workload(model, (images, targets))
    losses = model(images, targets)
    assert torch.allclose(workload.loss((images, targets)), losses["loss_box"] + losses["loss_class"])
    assert len(workload.source.take(6)[0]) == 6
