"""What fits under which levers, foreseen: by what ran where that tells, else by predictions that measurements correct."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoaccum.exploring import Exploration
from autoaccum.foreseeing import Foresight
from autoaccum.records import AS_IT_IS, Candidate, Fit, Levers, Outcome, OutOfMemory, Refused, Trial
from autoaccum.request import Request
from autoaccum.session import Search
from autoaccum.tradeoffs.points import Point, with_blocks
from autoaccum.workload import Workload

from .searches import mean_of, sgd, traced_once

pytestmark = pytest.mark.slow

FULL, SELECTIVE = Levers(checkpointing="full"), Levers(checkpointing="selective")
FOREACH = Levers(optimizer_impl="foreach")
TARGET = 24


class Block(nn.Module):
    """Holds so many times what it hands on."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.wide, self.activation = nn.Parameter(torch.ones(times)), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.activation(x[:, :, None] * self.wide).mean(2)
        return out


class Net(nn.Module):
    """Blocks one after the other, all alike or not."""

    def __init__(self, *times: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(each) for each in times)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Refusing(Net):
    """What it does depends on values, which fake tensors do not have, and on real ones of a few rows it says no."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) < 12 and float(x.detach().sum()) > -1:
            raise RuntimeError("too few rows to look at")
        return super().forward(x)


@pytest.fixture(autouse=True, scope="module")
def shared_traces() -> Iterator[None]:
    """Each model is traced once for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autoaccum.session.forecasts.traced", traced_once)
        yield


def search_of(
    model: nn.Module, budget: int | str, log: Sequence[Trial] = (), optimizer: Any = sgd, **numbers: Any
) -> Search:
    """A search that has run nothing but its log."""
    workload = Workload(model, torch.ones(2, 64), training_step=mean_of, optimizer=optimizer)
    levers = numbers.pop("levers", {"checkpointing": ["selective", "full"], "optimizer_impl": ["foreach"]})
    request = Request(target_batch=TARGET, levers=levers, budget=budget, **numbers)
    return Search(workload, request, "virtual:64MiB", None, None, log)


def trial(size: int, outcome: Outcome, levers: Levers = AS_IT_IS, purpose: Any = "probe") -> Trial:
    return Trial(
        candidate=Candidate(micro_batch=size, levers=levers), outcome=outcome, wall_s=1.0, rows_per_step=24, purpose=purpose
    )


def foresight_of(search: Search) -> Foresight:
    return Foresight(search, search.space())


def measured_peaks(model: nn.Module, family: Levers, size: int) -> list[int]:
    """The peaks of the plan's own steps with 0, 1, 2, ... blocks checkpointed, really run."""
    count = len(list(model.blocks))  # type: ignore[arg-type]
    with search_of(model, "64MiB", predict=False) as search:
        schedule = Exploration(search).schedule(size)
        trials = [search.confirm(with_blocks(family, k) if k else AS_IT_IS, schedule) for k in range(count + 1)]
    return [one.outcome.peak_bytes for one in trials if one is not None and isinstance(one.outcome, Fit)]


# -- predictions


@pytest.mark.parametrize("family", [FULL, SELECTIVE], ids=["full", "selective"])
def test_predicted_peaks_are_the_measured_ones(family: Levers) -> None:
    """On a device that counts storages, the prediction of every number of blocks is what a run of it measures."""
    model = Net(8, 8, 4)
    measured = measured_peaks(model, family, 8)
    with search_of(model, "64MiB") as search:
        foreseen = foresight_of(search)
        assert [foreseen.raw_peak(with_blocks(family, k) if k else AS_IT_IS, 8) for k in range(4)] == measured


def test_implementations_of_the_optimizer_are_traced_once() -> None:
    """Peaks with another implementation follow from its own step, whatever else is turned, and are what is measured."""

    def adamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, foreach=False)

    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(2)))
    both = Levers(checkpointing="full", checkpointed_blocks=2, optimizer_impl="foreach")
    with search_of(model, "64MiB", optimizer=adamw) as search:
        foreseen = foresight_of(search)
        predicted = [foreseen.raw_peak(levers, 8) for levers in (AS_IT_IS, FOREACH, with_blocks(FULL, 2), both)]
        assert both not in search.forecasts.known()
        schedule = Exploration(search).schedule(8)
        found = [search.confirm(levers, schedule) for levers in (AS_IT_IS, FOREACH, with_blocks(FULL, 2), both)]
    peaks = [one.outcome.peak_bytes for one in found if one is not None and isinstance(one.outcome, Fit)]
    assert predicted == peaks and predicted[1] > predicted[0]  # type: ignore[operator]


def test_measured_peak_shifts_the_prediction() -> None:
    """What a trial held beyond its prediction is expected at other sizes, and under levers that have not run, as well."""
    with search_of(Net(8, 8), "64MiB") as search:
        foreseen = foresight_of(search)
        raw = {size: foreseen.raw_peak(AS_IT_IS, size) or 0 for size in (8, 12)}
        search.log.trials.append(trial(8, Fit(peak_bytes=raw[8] + 10_000)))
        assert foreseen.peak(AS_IT_IS, 12) == raw[12] + 10_000
        turned = with_blocks(FULL, 2)
        assert foreseen.peak(turned, 12) == (foreseen.raw_peak(turned, 12) or 0) + 10_000
        search.log.trials.append(trial(8, Fit(peak_bytes=(foreseen.raw_peak(turned, 8) or 0) + 20_000), turned))
        assert foreseen.peak(turned, 12) == (foreseen.raw_peak(turned, 12) or 0) + 20_000


def test_prediction_that_was_not_made_is_not_made_for_a_table() -> None:
    """What is only shown is taken from the traces that there are."""
    with search_of(Net(8, 8), "64MiB") as search:
        foreseen = foresight_of(search)
        assert foreseen.known_peak(AS_IT_IS, 8) is None and search.forecasts.known() == {}
        foreseen.raw_peak(AS_IT_IS, 8)
        assert foreseen.known_peak(AS_IT_IS, 8) == foreseen.raw_peak(AS_IT_IS, 8)


# -- recomputation


@pytest.mark.slow
def test_work_counts_what_is_computed_again() -> None:
    """Each block that is computed again costs its own matrix products once more: a third of a step for all of them."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
    with search_of(model, "64MiB") as search:
        foreseen = foresight_of(search)
        works = []
        for blocks in (1, 2, 4):
            foreseen.raw_peak(AS_IT_IS, 8)
            foreseen.raw_peak(with_blocks(FULL, blocks), 8)
            works.append(foreseen.work(Point(with_blocks(FULL, blocks), 8)))
    step = 4 * 3 - 1  # the first layer has no gradient of its input
    assert works == pytest.approx([(step + blocks) / step for blocks in (1, 2, 4)], rel=0.01)


def test_selective_recomputation_costs_no_matrix_products() -> None:
    """With the results of matrix products kept, there is nothing to compute again that counts."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(2)))
    with search_of(model, "64MiB") as search:
        foreseen = foresight_of(search)
        foreseen.raw_peak(AS_IT_IS, 8)
        foreseen.raw_peak(with_blocks(SELECTIVE, 2), 8)
        assert foreseen.work(Point(with_blocks(SELECTIVE, 2), 8)) == pytest.approx(1.0, rel=0.01)


def test_unknown_work_is_that_of_the_model_as_it_is() -> None:
    """Without a trace of the setting nothing is assumed."""
    with search_of(Net(8, 8), "64MiB") as search:
        assert foresight_of(search).work(Point(with_blocks(FULL, 2), 8)) == 1.0


# -- how many blocks


@pytest.mark.parametrize(
    "times",
    [(2, 16, 4, 8), *(pytest.param(times, marks=pytest.mark.slow) for times in ((8, 8, 8, 8), (4, 4, 4, 32)))],
    ids=str,
)
def test_solved_number_of_blocks_is_the_smallest_that_fits(times: tuple[int, ...]) -> None:
    """For every budget the number is the one that trying them all finds, whether blocks are alike or not."""
    model = Net(*times)
    peaks = measured_peaks(model, FULL, 8)
    budgets = sorted({peak + more for peak in peaks for more in (-512, 0) if peak + more < peaks[0]})
    wanted = [next((blocks for blocks, peak in enumerate(peaks) if peak <= budget), None) for budget in budgets]
    with search_of(model, "64MiB") as search:
        foreseen, found = foresight_of(search), []
        for search.guide_bytes in budgets:
            found.append(foreseen.blocks_for(FULL, 8))
    assert found == wanted


@pytest.mark.slow
def test_few_numbers_of_blocks_are_traced() -> None:
    """The number is solved for, not tried: with ten blocks a handful of traces tell."""
    model = Net(*[8] * 10)
    with search_of(model, "64MiB") as search:
        most, least = (foresight_of(search).raw_peak(levers, 4) or 0 for levers in (AS_IT_IS, with_blocks(FULL, 10)))
    with search_of(model, (most + least) // 2) as search:
        found = foresight_of(search).blocks_for(FULL, 4)
        assert found is not None and 2 <= found <= 8
        assert len(search.forecasts.known()) <= 5


def test_family_that_never_fits_has_no_number() -> None:
    """Where not even all blocks would do, there is none."""
    with search_of(Net(8, 8), "8KiB") as search:
        assert foresight_of(search).blocks_for(FULL, TARGET) is None


def test_without_checkpointing_no_blocks_are_needed() -> None:
    """Where the size fits as it is the number is 0."""
    with search_of(Net(8, 8), "64MiB") as search:
        assert foresight_of(search).blocks_for(AS_IT_IS, TARGET) == 0


def test_without_a_prediction_all_blocks_are_taken() -> None:
    """Where nothing can be foreseen the most is done at once, rather than running out of memory block by block."""
    with search_of(Net(*[8] * 8), "64MiB", predict=False) as search:
        assert foresight_of(search).blocks_for(FULL, TARGET) == 8
        search.log.trials.append(trial(TARGET, OutOfMemory(cause="allocator"), with_blocks(FULL, 8)))
        assert foresight_of(search).blocks_for(FULL, TARGET) is None


# -- what ran tells


def fits(log: Sequence[Trial], levers: Levers, size: int, *, budget: str = "64MiB") -> bool:
    """As far as it is known without any prediction."""
    with search_of(Net(8, 8, 8, 8), budget, log, predict=False) as search:
        return foresight_of(search).fits(levers, size)


def test_nothing_known_may_fit() -> None:
    """Without a trial and without a prediction everything is worth a try."""
    assert fits([], with_blocks(FULL, 2), TARGET)


def test_failure_rules_out_larger_sizes_and_fewer_blocks() -> None:
    """What ran out of memory does so with more rows, and with fewer blocks computed again."""
    log = [trial(8, OutOfMemory(cause="allocator"), with_blocks(FULL, 2))]
    assert not fits(log, with_blocks(FULL, 2), 8)
    assert not fits(log, with_blocks(FULL, 2), 12)
    assert not fits(log, with_blocks(FULL, 1), 8)
    assert fits(log, with_blocks(FULL, 3), 8)
    assert fits(log, with_blocks(FULL, 2), 6)


def test_failure_says_nothing_of_other_families() -> None:
    """Another kind of checkpointing or another lever may have room."""
    log = [trial(8, OutOfMemory(cause="allocator"), with_blocks(FULL, 2))]
    for levers in (AS_IT_IS, with_blocks(SELECTIVE, 2), Levers(checkpointing="full", checkpointed_blocks=2, offload="cpu")):
        assert fits(log, levers, 8)


def test_what_ran_fits_whatever_was_predicted() -> None:
    """A setting that ran fits, and so do smaller sizes and more blocks, even where the prediction says otherwise."""
    with search_of(Net(8, 8, 8, 8), "10KiB") as search:
        foreseen = foresight_of(search)
        assert not foreseen.fits(with_blocks(FULL, 2), 8)
        search.log.trials.append(trial(8, Fit(peak_bytes=9000), with_blocks(FULL, 2), "confirm"))
        assert foreseen.fits(with_blocks(FULL, 2), 8) and foreseen.fits(with_blocks(FULL, 3), 6)


def test_size_that_is_too_small_says_nothing_of_larger_ones() -> None:
    """A model that refuses one row, as BatchNorm does, has not run out of memory."""
    log = [trial(1, Refused(bound="floor")), trial(8, Fit(peak_bytes=9000))]
    assert fits(log, AS_IT_IS, 8)
    assert fits(log, AS_IT_IS, 12)
    assert fits([trial(1, Refused(bound="floor"), with_blocks(FULL, 4))], with_blocks(FULL, 4), 8)


def test_ceiling_that_is_not_memory_rules_out_larger_sizes() -> None:
    """A limit of the host or of a launch holds for more rows as well."""
    log = [trial(8, Refused(bound="ceiling", limited_by="host"), with_blocks(FULL, 2))]
    assert not fits(log, with_blocks(FULL, 2), 12)


# -- what is worth foreseeing


def test_known_family_is_affordable_when_time_is_up() -> None:
    """After a minute of tracing nothing further is predicted, and what was predicted stays so."""
    with search_of(Net(8, 8), "64MiB") as search:
        foreseen = foresight_of(search)
        foreseen.raw_peak(AS_IT_IS, 8)
        search.forecasts.tracing_s = 1e9
        assert foreseen.is_affordable(AS_IT_IS) and not foreseen.is_affordable(FULL)


def test_family_that_differs_in_the_optimizer_alone_is_known_with_it() -> None:
    """The optimizer's implementation takes no trace of its own kind of checkpointing."""
    with search_of(Net(8, 8), "64MiB") as search:
        foreseen = foresight_of(search)
        foreseen.raw_peak(FULL, 8)
        search.forecasts.tracing_s = 1e9
        assert foreseen.is_affordable(Levers(checkpointing="full", optimizer_impl="foreach"))
