"""How the optimizer's step is implemented: flags that change and come back, and the same numbers whichever way."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop

from autoaccum import Accumulator
from autoaccum.devices import VirtualDevice
from autoaccum.levers import Subject, applied
from autoaccum.levers.optimizer import OptimizerImpl
from autoaccum.preserve import preserved
from autoaccum.probing import run_trial
from autoaccum.records import Candidate, Fit, Levers
from autoaccum.workload import Workload

from .models import HOST, plan_of, seed

LEVELS = OptimizerImpl.levels[1:]
FLAGS = {
    "for-loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True, "fused": False},
    "fused": {"foreach": False, "fused": True},
}
every_level = pytest.mark.parametrize("level", LEVELS)

Make = Callable[[Any], Optimizer]
WITH_FUSED: dict[str, Make] = {
    "SGD": lambda parameters: SGD(parameters, lr=0.05),
    "SGD with momentum": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda parameters: Adam(parameters, lr=0.01, amsgrad=True),
    "AdamW": lambda parameters: AdamW(parameters, lr=0.01),
    "Adagrad": lambda parameters: Adagrad(parameters, lr=0.05),
}
WITHOUT_FUSED: dict[str, Make] = {
    "NAdam": lambda parameters: NAdam(parameters, lr=0.01),
    "RMSprop": lambda parameters: RMSprop(parameters, lr=0.01, centered=True),
}


class Own(Optimizer):
    """An optimizer of one's own, without any implementation to choose."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * parameter.grad


def model() -> nn.Module:
    seed()
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def subject(module: nn.Module, optimizer: Optimizer | None) -> Subject:
    return Subject(module, HOST, optimizer)


def steps(module: nn.Module, optimizer: Optimizer, levers: Levers, count: int = 3) -> None:
    """Some steps, each with the lever turned anew, as an Accumulator does."""
    torch.manual_seed(1)
    for _ in range(count):
        optimizer.zero_grad()
        module(torch.randn(5, 6)).pow(2).sum().backward()
        with applied(levers, subject(module, optimizer)):
            optimizer.step()


@every_level
@pytest.mark.parametrize("make", [*WITH_FUSED.values(), *WITHOUT_FUSED.values()], ids=[*WITH_FUSED, *WITHOUT_FUSED])
def test_steps_are_the_same(make: Make, level: str) -> None:
    """Three steps give the weights and the state of three steps as they are by default."""
    if level == "fused" and make in WITHOUT_FUSED.values():
        pytest.skip("has no fused implementation")
    trained = []
    for levers in (Levers(), Levers(optimizer_impl=level)):
        module = model()
        optimizer = make(module.parameters())
        steps(module, optimizer, levers)
        trained.append((list(module.parameters()), [optimizer.state[parameter] for parameter in module.parameters()]))
    (weights, states), (other_weights, other_states) = trained
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(weights, other_weights, strict=True))
    for state, other_state in zip(states, other_states, strict=True):
        assert state.keys() == other_state.keys()
        for key, value in state.items():
            assert torch.allclose(torch.as_tensor(value), torch.as_tensor(other_state[key]), atol=1e-6), key


@every_level
def test_steps_after_the_lever(level: str) -> None:
    """Steps with the lever and then without go on from the same state: the weights are those of steps without."""
    weights = []
    for levers in (Levers(), Levers(optimizer_impl=level)):
        module = model()
        optimizer = AdamW(module.parameters(), lr=0.01)
        steps(module, optimizer, levers)
        steps(module, optimizer, Levers())
        steps(module, optimizer, levers)
        weights.append(list(module.parameters()))
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(*weights, strict=True))


@every_level
def test_flags_change_and_come_back(level: str) -> None:
    """While inside every group has the level's flags; afterwards the groups are as they were, each its own way."""
    module = model()
    optimizer = AdamW(
        [
            {"params": module[0].parameters(), "foreach": True},  # type: ignore[index]
            {"params": module[2].parameters(), "fused": True, "lr": 0.5},  # type: ignore[index]
        ]
    )
    before = [dict(group) for group in optimizer.param_groups]
    with applied(Levers(optimizer_impl=level), subject(module, optimizer)):
        assert all(group.items() >= FLAGS[level].items() for group in optimizer.param_groups)
        assert [group["lr"] for group in optimizer.param_groups] == [0.001, 0.5]
    assert [dict(group) for group in optimizer.param_groups] == before


@every_level
def test_what_the_caller_changes_inside_stays(level: str) -> None:
    """A learning rate that a scheduler sets while inside is not put back."""
    module = model()
    optimizer = AdamW(module.parameters(), lr=0.1)
    with applied(Levers(optimizer_impl=level), subject(module, optimizer)):
        optimizer.param_groups[0]["lr"] = 0.05
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_only_flags_that_there_are() -> None:
    """An optimizer with one of the flags only gets no other one."""
    module = model()
    optimizer = NAdam(module.parameters())
    keys = list(optimizer.param_groups[0])
    with applied(Levers(optimizer_impl="foreach"), subject(module, optimizer)):
        assert list(optimizer.param_groups[0]) == keys
        assert optimizer.param_groups[0]["foreach"] is True


@every_level
def test_optimizer_without_flags_is_left_alone(level: str) -> None:
    """An optimizer of one's own is told that it has no such implementation, and runs as ever where it is turned anyway."""
    module = model()
    optimizer = Own(module.parameters())
    reason = OptimizerImpl().reason_against(level, subject(module, optimizer))
    assert reason == f"Own has no {level} implementation"
    before = dict(optimizer.param_groups[0])
    steps(module, optimizer, Levers(optimizer_impl=level))
    assert optimizer.param_groups[0] == before


@every_level
def test_without_an_optimizer(level: str) -> None:
    """Without an optimizer at hand nothing is said against a level, and nothing is turned."""
    module = model()
    assert OptimizerImpl().reason_against(level, subject(module, None)) is None
    with applied(Levers(optimizer_impl=level), subject(module, None)):
        pass


# Reasons.


@pytest.mark.parametrize("make", WITH_FUSED.values(), ids=WITH_FUSED)
def test_one_after_the_other_is_the_default_on_the_host(make: Make) -> None:
    """On the host the step goes through parameters one by one anyway; the other two can be used."""
    module = model()
    optimizer = make(module.parameters())
    reasons = [OptimizerImpl().reason_against(level, subject(module, optimizer)) for level in LEVELS]
    assert reasons == [f"{type(optimizer).__name__} uses it already", None, None]


@pytest.mark.parametrize(
    ("options", "already"), [({"foreach": True}, "foreach"), ({"fused": True}, "fused"), ({"foreach": False}, "for-loop")]
)
def test_what_the_caller_chose_is_used_already(options: dict[str, Any], already: str) -> None:
    """The implementation that the caller chose is used already, and the other two are not."""
    module = model()
    optimizer = AdamW(module.parameters(), **options)
    reasons = {level: OptimizerImpl().reason_against(level, subject(module, optimizer)) for level in LEVELS}
    assert {level for level, reason in reasons.items() if reason == "AdamW uses it already"} == {already}


def test_lists_are_the_default_on_a_gpu() -> None:
    """On a GPU torch goes through lists by default, so that it is the other two that are left."""
    module = model()
    there = Subject(module, torch.device("cuda"), AdamW(module.parameters()))
    assert OptimizerImpl().reason_against("foreach", there) == "AdamW uses it already"
    assert OptimizerImpl().reason_against("for-loop", there) is None


@pytest.mark.parametrize("make", WITHOUT_FUSED.values(), ids=WITHOUT_FUSED)
def test_without_a_fused_implementation(make: Make) -> None:
    """An optimizer without a fused implementation is told so."""
    module = model()
    optimizer = make(module.parameters())
    reason = OptimizerImpl().reason_against("fused", subject(module, optimizer))
    assert reason == f"{type(optimizer).__name__} has no fused implementation"


def test_optimizers_that_need_a_closure_or_sparse_gradients() -> None:
    """LBFGS and SparseAdam have nothing to choose."""
    module = model()
    for optimizer in (torch.optim.LBFGS(module.parameters()), torch.optim.SparseAdam(list(module.parameters()))):
        reasons = [OptimizerImpl().reason_against(level, subject(module, optimizer)) for level in LEVELS]
        assert reasons == [f"{type(optimizer).__name__} has no {level} implementation" for level in LEVELS]


def test_what_the_fused_step_refuses() -> None:
    """Where torch refuses the caller's options or types, the reason is what torch says, in one line."""
    module = model()
    differentiable = AdamW(module.parameters(), differentiable=True)
    complex_numbers = AdamW([nn.Parameter(torch.zeros(3, dtype=torch.complex64))])
    for optimizer in (differentiable, complex_numbers):
        reason = OptimizerImpl().reason_against("fused", subject(module, optimizer))
        assert reason is not None
        assert reason.startswith("AdamW cannot: RuntimeError: ")
        assert "\n" not in reason


def test_embeddings_with_sparse_gradients() -> None:
    """Where gradients are sparse, which fused steps refuse when they come, the fused level is refused beforehand."""
    module = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))
    optimizer = SGD(module.parameters(), lr=0.1)
    assert OptimizerImpl().reason_against("fused", subject(module, optimizer)) is not None


def test_optimizer_that_makes_its_state_at_once() -> None:
    """An optimizer whose state is there before its first step, and which steps with it, can be asked about."""

    class Summing(SGD):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, lr=0.1)
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["sum"] = torch.zeros_like(parameter)

        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["sum"] += parameter.grad
            return super().step(closure)

    module = model()
    optimizer = Summing(module.parameters())
    assert OptimizerImpl().reason_against("foreach", subject(module, optimizer)) is None
    assert all(not state["sum"].any() for state in optimizer.state.values())


def test_optimizer_with_attributes_of_its_own() -> None:
    """An optimizer that derives from one of torch's, and steps with attributes of its own, can be turned as that one can."""

    class Trusted(AdamW):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, lr=0.01)
            self.trust = 0.5

        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["weight_decay"] = 0.01 * self.trust
            return super().step(closure)

    module = model()
    optimizer = Trusted(module.parameters())
    assert OptimizerImpl().reason_against("foreach", subject(module, optimizer)) is None
    assert optimizer.param_groups[0]["weight_decay"] == 0.01


@every_level
def test_asking_takes_no_step(level: str) -> None:
    """Asking runs no hook of the caller's, and leaves weights, state, groups and schedulers alone."""
    module, ran = model(), list[str]()
    optimizer = AdamW(module.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.register_step_pre_hook(lambda *_: ran.append("before"))
    optimizer.register_step_post_hook(lambda *_: ran.append("after"))
    groups, weights = copy.deepcopy(optimizer.param_groups), [parameter.clone() for parameter in module.parameters()]
    held = dict(vars(optimizer))
    OptimizerImpl().reason_against(level, subject(module, optimizer))
    assert (ran, dict(optimizer.state), scheduler.last_epoch) == ([], {}, 0)
    assert vars(optimizer).keys() == held.keys()
    assert all(map(torch.equal, weights, module.parameters()))
    for group, other in zip(groups, optimizer.param_groups, strict=True):
        assert {key: value for key, value in group.items() if key != "params"}.items() <= other.items()


# In training and in probes.


@every_level
def test_accumulator_under_a_plan(level: str) -> None:
    """A window under the plan's level gives the weights of a window without, and leaves the flags."""
    weights = []
    for levers in (Levers(), Levers(optimizer_impl=level)):
        module = model()
        optimizer = AdamW(module.parameters(), lr=0.01)
        before = dict(optimizer.param_groups[0])
        accumulator = Accumulator(
            module, optimizer, plan=plan_of(levers), training_step=lambda module, batch: module(batch).pow(2).mean()
        )
        torch.manual_seed(1)
        for _ in range(3):
            accumulator.step(torch.randn(6, 6))
        assert optimizer.param_groups[0] == before
        weights.append(list(module.parameters()))
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(*weights, strict=True))


def peak_of_step(levers: Levers, optimizer: Any) -> tuple[int, Workload]:
    """The peak of a probe of a model that is large beside its batch."""
    seed()
    device = VirtualDevice("1GiB")
    workload = Workload(nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))), torch.randn(2, 64), optimizer=optimizer)
    with preserved(workload.module, workload.own_optimizer, device=HOST) as snapshot:
        trial = run_trial(
            workload,
            device,
            Candidate(micro_batch=1, levers=levers),
            budget_bytes=2**30,
            snapshot=snapshot,
            windows=[[1, 1]] * 2,
            feed=lambda sizes: [workload.source.take(size) for size in sizes],
        ).trial
    assert isinstance(trial.outcome, Fit)
    return trial.outcome.peak_bytes, workload


def test_peaks_of_implementations() -> None:
    """Lists take a temporary as large as the weights; one after the other, and in one kernel, the step needs none."""
    peaks = {level: peak_of_step(Levers(optimizer_impl=level), AdamW)[0] for level in LEVELS}
    weights = 6 * 64 * 64 * 4
    assert peaks["fused"] <= peaks["for-loop"] < peaks["foreach"]
    assert peaks["foreach"] - peaks["fused"] > 0.5 * weights


@every_level
def test_factory_in_a_probe(level: str) -> None:
    """An optimizer that a factory makes for each trial steps in the level's way."""
    made: list[dict[str, Any]] = []

    class Seen(AdamW):
        def step(self, closure: Any = None) -> Any:
            made.append({flag: self.param_groups[0][flag] for flag in ("foreach", "fused")})
            return super().step(closure)

    peak_of_step(Levers(optimizer_impl=level), lambda parameters: Seen(parameters, lr=0.1))
    assert made == [FLAGS[level]] * 2


@every_level
def test_callers_optimizer_in_a_probe(level: str) -> None:
    """After a probe the caller's own optimizer has its flags and state back."""
    module = nn.Linear(8, 8)
    optimizer = AdamW(module.parameters(), lr=0.1)
    workload = Workload(module, torch.randn(2, 8), optimizer=optimizer)
    before = dict(optimizer.param_groups[0])
    with preserved(module, optimizer, device=HOST) as snapshot:
        run_trial(
            workload,
            VirtualDevice("1GiB"),
            Candidate(micro_batch=1, levers=Levers(optimizer_impl=level)),
            budget_bytes=2**30,
            snapshot=snapshot,
            windows=[[1, 1]] * 2,
            feed=lambda sizes: [workload.source.take(size) for size in sizes],
        )
    assert optimizer.param_groups[0] == before
    assert not optimizer.state


def test_frozen_and_unused_parameters() -> None:
    """A group with frozen parameters and some without a gradient steps in every way."""
    for level in LEVELS:
        module = model()
        module[0].weight.requires_grad_(False)  # type: ignore[index]
        optimizer = AdamW(module.parameters())
        assert OptimizerImpl().reason_against(level, subject(module, optimizer)) in (None, "AdamW uses it already")
        with applied(Levers(optimizer_impl=level), subject(module, optimizer)):
            hidden: Tensor = module[2](torch.randn(2, 8)).sum()  # type: ignore[index]
            hidden.backward()
            optimizer.step()
