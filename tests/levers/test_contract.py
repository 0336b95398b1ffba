"""What every lever promises, held by one suite that runs over all levers, levels and models."""

from __future__ import annotations

import copy
from contextlib import ExitStack, nullcontext
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import Tensor

from autoaccum import Accumulator
from autoaccum.devices import VirtualDevice
from autoaccum.levers import LEVERS, AbstractLever, Subject, applied
from autoaccum.preserve import preserved
from autoaccum.probing import run_trial
from autoaccum.records import Candidate, Fit, Levers
from autoaccum.workload import Workload

from .models import CASE_NAMED, HOST, Case, differing, generator_states, plan_of, seed

TURNED = [(lever.name, level) for lever in LEVERS for level in lever.levels[1:]]
LEVER_NAMED = {lever.name: lever for lever in LEVERS}
ORDINARY, WITH_STATISTICS, WITH_CACHE = (CASE_NAMED[name] for name in ("gpt", "resnet", "llama"))
SEVERAL, SLOW = (ORDINARY, WITH_STATISTICS, WITH_CACHE), pytest.mark.slow

every_lever = pytest.mark.parametrize("lever", LEVERS, ids=lambda lever: lever.name)
every_level = pytest.mark.parametrize(("name", "level"), TURNED, ids=lambda part: str(part))


def at(name: str, level: str, case: Case) -> Levers:
    """One lever at one level, and all the blocks that there are."""
    blocks = case.blocks if name == "checkpointing" else 0
    return Levers(**{name: level}, checkpointed_blocks=blocks)


class Turned:
    """A model with an optimizer, on which one lever is to be turned."""

    def __init__(self, case: Case, name: str, level: str) -> None:
        self.made = case.make(torch.float32)  # mixed precision is for models in float32
        trainable = [parameter for parameter in self.made.module.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trainable)
        self.subject = Subject(self.made.module, HOST, self.optimizer, worth_moving_bytes=0)
        self.levers = at(name, level, case)
        self.reason = LEVER_NAMED[name].reason_against(level, self.subject)

    def run(self, *, steps: bool = False) -> Tensor:
        """A forward and a backward pass, and where asked for an optimizer step; gives the loss."""
        loss = self.made.loss(self.made.module, self.made.batches[0])
        loss.backward()
        if steps:
            self.optimizer.step()
        return loss.detach()


@pytest.fixture
def turned(case: Case, name: str, level: str) -> Turned:
    """The lever on the model; skipped where the lever itself says that it cannot be turned there."""
    found = Turned(case, name, level)
    if found.reason is not None:
        pytest.skip(found.reason)
    return found


def photo(turned: Turned) -> dict[str, Any]:
    """Everything that a lever could leave behind: modules, their registries and attributes, configurations, flags, modes."""
    module = turned.made.module
    seen: dict[str, Any] = {"modules": list(module.named_modules()), "state": list(module.state_dict())}
    for name, part in module.named_modules():
        seen[f"class of {name}"] = type(part)
        seen[f"keys of {name}"] = list(vars(part))
        for key, value in vars(part).items():
            seen[f"{name}.{key}"] = value
            if isinstance(value, dict):
                seen[f"contents of {name}.{key}"] = list(value.items())
        config = vars(part).get("config")
        if config is not None:
            seen[f"configuration of {name}"] = list(vars(config).items())
    for name, parameter in module.named_parameters():
        seen[f"flag of {name}"], seen[f"dtype of {name}"] = parameter.requires_grad, parameter.dtype
        seen[f"hooks of {name}"] = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    for index, group in enumerate(turned.optimizer.param_groups):
        seen[f"group {index}"] = [(key, value) for key, value in group.items() if key != "params"]
    seen["optimizer"] = [(key, value) for key, value in vars(turned.optimizer).items() if isinstance(value, bool)]
    seen["modes"] = (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
    )
    return seen


def differences(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    """What is not the same object any more; numbers, texts and sets count by value, lists by their members."""
    return {key for key in before.keys() | after.keys() if not _is_same(before.get(key, ...), after.get(key, ...))}


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, (list, tuple)) and type(one) is type(other):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return isinstance(one, (int, float, str, set)) and type(one) is type(other) and bool(one == other)


def changed_by_itself(case: Case) -> set[str]:
    """What a training step of this model changes without any lever."""
    plain = Turned(case, "offload", "off")
    before = photo(plain)
    plain.run()
    return differences(before, photo(plain))


# What a lever is.


@every_lever
def test_is_final(lever: AbstractLever) -> None:
    """A lever's class is marked as final and derives from the abstract one directly."""
    assert type(lever).__bases__ == (AbstractLever,)
    assert getattr(type(lever), "__final__", False)


def test_every_lever_is_registered() -> None:
    """Every class that derives from the abstract one is in `LEVERS`, once."""
    assert sorted(map(id, AbstractLever.__subclasses__())) == sorted(id(type(lever)) for lever in LEVERS)


def test_every_lever_has_a_field() -> None:
    """The fields of `Levers` are the levers, besides the two that say which blocks are meant."""
    assert {lever.name for lever in LEVERS} == set(Levers.__struct_fields__) - {"checkpointed_blocks", "block_names"}


@every_lever
def test_levels_are_those_of_its_field(lever: AbstractLever) -> None:
    """The levels are the literals that its field may hold, in their order."""
    assert lever.levels == get_args(get_type_hints(Levers)[lever.name])


@every_lever
def test_first_level_is_the_default(lever: AbstractLever) -> None:
    """The first level is what `Levers()` says, and nothing is ever against it."""
    assert lever.levels[0] == getattr(Levers(), lever.name)
    assert lever.reason_against(lever.levels[0], Turned(ORDINARY, lever.name, lever.levels[0]).subject) is None


@every_lever
def test_says_whether_it_keeps_the_numerics(lever: AbstractLever) -> None:
    """Only precision changes what is learned."""
    assert lever.keeps_numerics == (lever.name != "precision")


@every_level
def test_reason_is_a_sentence(case: Case, name: str, level: str) -> None:
    """A reason against a level is None or one line of words without a full stop."""
    reason = Turned(case, name, level).reason
    if reason is not None:
        assert len(reason.split()) >= 4
        assert reason == reason.strip()
        assert "\n" not in reason
        assert not reason.endswith(".")
        assert all(part not in reason for part in ("  ", " ,", "None", "()", "{}"))


@pytest.mark.parametrize(("name", "level"), [(lever.name, level) for lever in LEVERS for level in lever.levels])
def test_reason_leaves_no_trace(name: str, level: str) -> None:
    """Asking for a reason changes neither the model nor the optimizer nor a generator."""
    asked = Turned(WITH_STATISTICS, "offload", "off")
    before, generator = photo(asked), torch.get_rng_state()
    LEVER_NAMED[name].reason_against(level, asked.subject)
    assert differences(before, photo(asked)) == set()
    assert not asked.optimizer.state
    assert torch.equal(generator, torch.get_rng_state())


# That it really runs.


@every_level
def test_without_a_reason_it_runs(turned: Turned) -> None:
    """Where nothing is said against a level, a training step runs under it and its loss is near that without."""
    untouched = copy.deepcopy(turned.made.module)
    seed(3)
    expected = turned.made.loss(untouched, turned.made.batches[0])
    seed(3)
    with applied(turned.levers, turned.subject):
        assert turned.run(steps=True).item() == pytest.approx(expected.item(), rel=0.05)
    assert all(bool(torch.isfinite(parameter).all()) for parameter in turned.optimizer.param_groups[0]["params"])


# That it leaves nothing behind.


@every_level
def test_is_turned_while_inside(name: str, level: str) -> None:
    """While inside something differs: the model, the optimizer's flags, or how tensors are saved."""
    turned = Turned(WITH_STATISTICS, name, level)
    if turned.reason is not None:
        pytest.skip(turned.reason)
    before, took = photo(turned), []
    turned.subject = turned.subject._replace(note_host_bytes=took.append)
    with applied(turned.levers, turned.subject):
        turned.run()
        assert differences(before, photo(turned)) - changed_by_itself(WITH_STATISTICS) or took


@every_level
def test_nothing_is_left_without_running(turned: Turned) -> None:
    """A context that is entered and left leaves every object, key, flag and value as it was."""
    before = photo(turned)
    weights = [tensor.clone() for tensor in turned.made.module.state_dict().values()]
    with applied(turned.levers, turned.subject):
        pass
    assert differences(before, photo(turned)) == set()
    assert all(map(torch.equal, weights, turned.made.module.state_dict().values()))


@every_level
def test_nothing_is_left_after_running(turned: Turned, case: Case) -> None:
    """After a forward and a backward pass nothing has changed but what the model itself changes."""
    before = photo(turned)
    weights = [parameter.detach().clone() for parameter in turned.made.module.parameters()]
    with applied(turned.levers, turned.subject):
        turned.run()
    assert differences(before, photo(turned)) <= changed_by_itself(case)
    assert all(map(torch.equal, weights, turned.made.module.parameters()))


WAYS_OUT = [
    pytest.param(error, case, id=f"{error.__name__}-{case.name}", marks=() if case in (WITH_CACHE,) else pytest.mark.slow)
    for error in (RuntimeError, KeyboardInterrupt, SystemExit)
    for case in CASE_NAMED.values()
]


@every_level
@pytest.mark.parametrize(("error", "model"), WAYS_OUT)
def test_nothing_is_left_after_an_error(name: str, level: str, error: type[BaseException], model: Case) -> None:
    """An error or Ctrl-C between the forward and the backward pass comes out, and leaves everything as it was."""
    turned = Turned(model, name, level)
    if turned.reason is not None:
        pytest.skip(turned.reason)
    before = photo(turned)
    with pytest.raises(error), applied(turned.levers, turned.subject):
        turned.made.loss(turned.made.module, turned.made.batches[0])
        raise error
    assert differences(before, photo(turned)) <= changed_by_itself(model)


@every_level
@pytest.mark.parametrize("model", [ORDINARY, WITH_CACHE, CASE_NAMED["own forward"]], ids=lambda case: case.name)
def test_contexts_in_contexts(name: str, level: str, model: Case) -> None:
    """The same levers turned twice run, give the gradients of once, and leave nothing."""
    gradients = []
    for times in (1, 2):
        turned = Turned(model, name, level)
        if turned.reason is not None:
            pytest.skip(turned.reason)
        before = photo(turned)
        seed(3)
        with ExitStack() as stack:
            for _ in range(times):
                stack.enter_context(applied(turned.levers, turned.subject))
            turned.run()
        assert differences(before, photo(turned)) <= changed_by_itself(model)
        gradients.append([parameter.grad for parameter in turned.made.module.parameters() if parameter.grad is not None])
    assert all(map(torch.equal, *gradients))


@every_level
def test_turned_again(name: str, level: str) -> None:
    """A lever that was turned and turned back can be turned again, and does the same again."""
    turned = Turned(ORDINARY, name, level)
    if turned.reason is not None:
        pytest.skip(turned.reason)
    before, losses = photo(turned), []
    for _ in range(3):
        with applied(turned.levers, turned.subject):
            losses.append(turned.run())
        assert differences(before, photo(turned)) == set()
    assert torch.equal(losses[0], losses[2])


def test_all_levers_at_once() -> None:
    """All levers turned together run, and leave nothing."""
    levers = Levers(checkpointing="full", checkpointed_blocks=2, precision="bf16", optimizer_impl="foreach", offload="cpu")
    for case in (ORDINARY, WITH_STATISTICS, WITH_CACHE):
        turned = Turned(case, "offload", "off")
        before = photo(turned)
        with applied(levers, turned.subject):
            assert torch.isfinite(turned.run(steps=True))
        assert differences(before, photo(turned)) <= changed_by_itself(case)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_contexts_of_different_levers(order: tuple[int, int]) -> None:
    """Contexts of different levers go into one another in either order, and leave nothing."""
    turned = Turned(ORDINARY, "offload", "off")
    before = photo(turned)
    both = (at("checkpointing", "full", ORDINARY), at("precision", "bf16", ORDINARY))
    with applied(both[order[0]], turned.subject), applied(both[order[1]], turned.subject):
        assert torch.isfinite(turned.run())
    assert differences(before, photo(turned)) == set()


@every_level
def test_model_copied_while_inside(name: str, level: str) -> None:
    """A deep copy that is made while a lever is turned computes with its own weights, whatever becomes of the model's."""
    turned = Turned(ORDINARY, name, level)
    if turned.reason is not None:
        pytest.skip(turned.reason)
    with applied(turned.levers, turned.subject):
        kept = copy.deepcopy(turned.made.module)
        expected = turned.made.loss(turned.made.module, turned.made.batches[0])
        with torch.no_grad():
            for parameter in turned.made.module.parameters():
                parameter.zero_()
    assert turned.made.loss(kept, turned.made.batches[0]).item() == pytest.approx(expected.item(), rel=1e-2)


def test_default_does_nothing() -> None:
    """`Levers()` changes nothing while inside."""
    turned = Turned(ORDINARY, "offload", "off")
    before = photo(turned)
    with applied(Levers(), turned.subject):
        assert differences(before, photo(turned)) == set()


# In a probe and in training.


@every_level
@pytest.mark.parametrize(
    "model", [ORDINARY, WITH_STATISTICS, pytest.param(WITH_CACHE, marks=pytest.mark.slow)], ids=lambda case: case.name
)
def test_probe_puts_everything_back(name: str, level: str, model: Case) -> None:
    """After a trial under a lever weights, statistics, state, flags, generators and modules are as before, bit for bit."""
    turned = Turned(model, name, level)
    if turned.reason is not None:
        pytest.skip(turned.reason)
    turned.run(steps=True)  # there is state to be put back
    module, made = turned.made.module, turned.made
    for parameter in module.parameters():
        parameter.grad = None
    workload = Workload(module, made.batches[0], training_step=made.loss, optimizer=turned.optimizer)
    before, values, states = photo(turned), values_of(turned), generator_states()
    with preserved(module, turned.optimizer, device=HOST) as snapshot:
        trial = run_trial(
            workload,
            VirtualDevice("1GiB"),
            Candidate(micro_batch=2, levers=turned.levers),
            budget_bytes=2**30,
            snapshot=snapshot,
            windows=[[2, 2]] * 2,
            feed=lambda sizes: [workload.source.take(size) for size in sizes],
        ).trial
    assert isinstance(trial.outcome, Fit)
    assert differences(before, photo(turned)) <= changed_by_itself(model)
    assert differing(values, values_of(turned)) == []
    assert torch.equal(states[0], generator_states()[0])
    assert states[1:] == generator_states()[1:]


def values_of(turned: Turned) -> dict[str, Any]:
    """Copies of all weights, buffers and optimizer state."""
    found = {name: tensor.clone() for name, tensor in turned.made.module.state_dict().items()}
    for index, state in enumerate(turned.optimizer.state.values()):
        found |= {f"{index}.{key}": torch.as_tensor(value).clone() for key, value in state.items()}
    return found


@every_level
@pytest.mark.parametrize("model", [ORDINARY, WITH_STATISTICS], ids=lambda case: case.name)
def test_plan_applied_around_an_accumulator(name: str, level: str, model: Case) -> None:
    """An Accumulator inside of its own plan's context takes the steps that it takes without, and leaves nothing."""
    found = []
    for is_around in (False, True):
        turned = Turned(model, name, level)
        if turned.reason is not None:
            pytest.skip(turned.reason)
        before, made = photo(turned), turned.made
        plan = plan_of(turned.levers, rows=2, micro_batch=1)
        accumulator = Accumulator(made.module, turned.optimizer, plan=plan, training_step=made.loss)
        seed(3)
        with plan.applied(made.module, turned.optimizer) if is_around else nullcontext():
            for batch in made.batches:
                step = accumulator.step(first_rows(batch, 2 * (4 if model is WITH_STATISTICS else 1)))
                assert not step.skipped
        assert differences(before, photo(turned)) <= changed_by_itself(model)
        found.append(turned.made.module.state_dict())
    assert differing(found[0], found[1], rtol=1e-5) == []


def first_rows(batch: Any, count: int) -> Any:
    """Some rows of a batch."""
    return (
        {key: value[:count] for key, value in batch.items()} if isinstance(batch, dict) else tuple(x[:count] for x in batch)
    )
