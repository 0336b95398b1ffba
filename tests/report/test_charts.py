"""Pictures of speed: which points they have, what is joined, and that they are sound XML."""

from __future__ import annotations

import xml.etree.ElementTree
from xml.etree.ElementTree import Element

import msgspec

from autoaccum.records import Candidate, Fit, Levers, PlanRecord, ProbeResult, Setting, Trial
from autoaccum.report.charts import Point, front_of, pareto_figure, rates_of, throughput_figure
from autoaccum.timing import timing_of

GIB = 2**30


def drawn(figure: str) -> Element:
    """The figure as XML."""
    return xml.etree.ElementTree.fromstring(figure)


def texts(figure: str, name: str = "text") -> list[str]:
    """What stands in all elements of that name."""
    return ["".join(element.itertext()) for element in drawn(figure).iter(name)]


def classes(figure: str) -> list[str]:
    return [element.attrib.get("class", "") for element in drawn(figure).iter()]


def setting(number: int, peak_bytes: int | None, step_s: float | None, *, is_chosen: bool = False) -> Setting:
    return Setting(
        levers=Levers(checkpointing="full", checkpointed_blocks=number),
        standing="chosen" if is_chosen else "measured",
        micro_batch=2**number,
        accumulation_steps=1,
        peak_bytes=peak_bytes,
        timing=None if step_s is None else timing_of((step_s,) * 6),
    )


def plan_with(plan: PlanRecord, *settings: Setting, budget_bytes: int = 8 * GIB) -> PlanRecord:
    return msgspec.structs.replace(plan, settings=settings, budget_bytes=budget_bytes)


def point(number: int, peak_bytes: int, step_s: float) -> Point:
    timing = timing_of((step_s,) * 6)
    assert timing is not None
    return Point(number, "", False, peak_bytes, timing)


# -- step time against memory


def test_front_is_what_nothing_beats() -> None:
    """The front has each point that no other one beats in memory and time, from the least memory to the fastest."""
    points = [point(1, 8, 1.0), point(2, 4, 2.0), point(3, 6, 2.0), point(4, 2, 3.0), point(5, 8, 1.5)]
    assert [found.number for found in front_of(points)] == [4, 2, 1]


def test_front_has_one_of_two_equal_points() -> None:
    """Of two points with the same memory and time the first one is on the front."""
    assert [found.number for found in front_of([point(1, 8, 1.0), point(2, 8, 1.0)])] == [1]


def test_every_measured_setting_is_a_point(plan: PlanRecord) -> None:
    """Each setting that was run and timed is a point with its row's number, levers, peak and time; others are none."""
    words = texts(pareto_figure(plan), "title")
    assert words[1:] == [
        "3: none, 40.00 MiB, 1 s",
        "2: fused optimizer, 44.00 MiB, 700 ms",
        "1: full checkpointing of 6 blocks, bf16, 22.00 MiB, 500 ms",
    ]


def test_chosen_setting_is_marked_and_labelled(plan: PlanRecord) -> None:
    """The chosen setting has a ring and says that it is the chosen one."""
    figure = pareto_figure(plan)
    assert texts(figure).count("1 chosen") == 1 and classes(figure).count("aa-ring") == 2  # the other is the legend's


def test_less_memory_is_left_and_less_time_is_low(plan: PlanRecord) -> None:
    """A point with more memory lies further right, and one that takes longer lies higher."""
    figure = drawn(pareto_figure(plan_with(plan, setting(1, 4 * GIB, 2.0), setting(2, 6 * GIB, 1.0))))
    dots = {group[0].text: group[1].attrib for group in figure.iter("g")}
    slow, fast = (next(dots[name] for name in dots if name and name.startswith(start)) for start in ("2:", "1:"))
    assert float(slow["cx"]) < float(fast["cx"]) and float(slow["cy"]) < float(fast["cy"])


def test_budget_is_a_line_with_its_size(plan: PlanRecord) -> None:
    """A budget that is near is a line, named with its size."""
    figure = pareto_figure(plan_with(plan, setting(1, 6 * GIB, 1.0)))
    assert "budget 8.00 GiB" in texts(figure) and "aa-limit" in classes(figure)


def test_a_budget_far_away_is_named_only(plan: PlanRecord) -> None:
    """A budget far above all peaks would press the picture flat, and is said in its caption instead."""
    figure = pareto_figure(plan_with(plan, setting(1, 2 * GIB, 1.0)))
    assert "aa-limit" not in classes(figure) and "8.00 GiB is far to the right" in " ".join(texts(figure, "p"))


def test_front_is_heard(plan: PlanRecord) -> None:
    """The description names the points of the front in order."""
    figure = pareto_figure(plan_with(plan, setting(1, 4 * GIB, 2.0), setting(2, 6 * GIB, 1.0), setting(3, 7 * GIB, 3.0)))
    (words,) = texts(figure, "desc")
    assert words.startswith("From the least memory to the fastest: 2: full") and "; 1: full" in words and "3: " not in words


def test_nothing_measured_is_a_sentence(bare_plan: PlanRecord, plan: PlanRecord) -> None:
    """Without a setting that was run and timed there is a sentence in place of the picture."""
    for nothing in (bare_plan, plan_with(plan, setting(1, None, 1.0), setting(2, GIB, None), setting(3, GIB, 0.0))):
        assert pareto_figure(nothing).startswith('<p class="aa-missing">No setting was both run and timed')


def test_one_setting_is_enough(plan: PlanRecord) -> None:
    """A single setting is drawn, with ticks around it."""
    figure = pareto_figure(plan_with(plan, setting(1, 6 * GIB, 1.0, is_chosen=True), budget_bytes=100 * GIB))
    assert "1 chosen" in texts(figure) and len(texts(figure)) > 6


# -- throughput against micro-batch


def timed(size: int, step_s: float, *, levers: Levers = Levers(), **more: object) -> Trial:  # noqa: B008  # frozen
    known = {"candidate": Candidate(micro_batch=size, levers=levers), "wall_s": 1.0, "rows_per_step": 2 * size}
    return Trial(**known | {"outcome": Fit(peak_bytes=1, step_times_s=(step_s,))} | more)


def test_rates_are_rows_over_time() -> None:
    """A trial's rate is the rows of its step over the median of its times, and the quartiles are turned round."""
    fit = Fit(peak_bytes=1, step_times_s=(0.5, 1.0, 2.0))
    (rate,) = rates_of([timed(8, 0.0, outcome=fit)], (), 0)["none"]
    assert (rate.micro_batch, rate.low, rate.middle, rate.high) == (8, 16 / 1.5, 16.0, 16 / 0.75)


def test_lines_ascend_in_size() -> None:
    """Each setting of the levers has its own line, ascending in size whatever was run first."""
    bf16 = Levers(precision="bf16")
    found = rates_of([timed(8, 1.0), timed(2, 1.0), timed(4, 1.0, levers=bf16)], (), 0)
    assert {name: [rate.micro_batch for rate in rates] for name, rates in found.items()} == {"none": [2, 8], "bf16": [4]}


def test_plans_own_step_counts() -> None:
    """Of a size that was both probed and run as the plan's step, the plan's step counts, and a setting's times before it."""
    trials = timed(8, 2.0, purpose="confirm", rows_per_step=10), timed(8, 1.0)
    assert rates_of(trials, (), 0)["none"][0].middle == 5.0
    of_setting = Setting(levers=Levers(), standing="chosen", micro_batch=8, accumulation_steps=1, timing=timing_of((4.0,)))
    assert rates_of(trials, (of_setting,), 24)["none"][0].middle == 6.0


def test_failures_and_zero_times_have_no_rate(trials: tuple[Trial, ...]) -> None:
    """What did not fit or was not timed is no point, nor is a step of zero seconds."""
    (name,) = rates_of([*trials, timed(9, 0.0)], (), 0)
    assert [rate.micro_batch for rate in rates_of(trials, (), 0)[name]] == [2, 4]


def test_lines_of_the_plan_come_first(plan: PlanRecord) -> None:
    """The line of the plan's own levers is the first of the legend, and the fastest of the others follow."""
    figure = throughput_figure(plan.trials, plan.levers, plan.settings, 11)
    assert texts(figure, "li") == ["full checkpointing of 6 blocks, bf16", "fused optimizer", "none"]


def test_more_settings_than_colours_are_counted(plan: PlanRecord) -> None:
    """Eight lines are drawn, the fastest ones, and how many are not is said."""
    settings = [setting(number, GIB, 1.0 + number) for number in range(1, 13)]
    figure = throughput_figure((), Levers(), settings, 8)
    assert len(texts(figure, "li")) == 8 and "4 slower settings are not drawn" in " ".join(texts(figure, "p"))
    assert "full checkpointing of 1 block" in texts(figure, "li")


def test_axis_has_doublings(result: ProbeResult) -> None:
    """Sizes are on an axis of doublings, and rates begin at zero."""
    figure = throughput_figure(result.trials, result.levers)
    assert {"2", "4", "0", "micro-batch (rows)", "samples/s"} <= set(texts(figure))


def test_nothing_timed_is_a_sentence(bare_plan: PlanRecord) -> None:
    """Without a timed step there is a sentence in place of the picture."""
    figure = throughput_figure(bare_plan.trials, bare_plan.levers)
    assert figure.startswith('<p class="aa-missing">No optimizer step was timed')


def test_a_single_size_is_drawn() -> None:
    """One timed size alone is drawn without a failure."""
    assert "37" in texts(throughput_figure([timed(37, 1.0)], Levers()))
