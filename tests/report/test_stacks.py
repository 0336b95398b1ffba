"""The picture of memory over one optimizer step: what it keeps of many events, and what it says."""

from __future__ import annotations

import xml.etree.ElementTree

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoaccum.records import Timeline
from autoaccum.report.stacks import columns_of, timeline_figure

MIB = 2**20


def texts(figure: str, name: str = "text") -> list[str]:
    """What stands in all elements of that name."""
    return ["".join(element.itertext()) for element in xml.etree.ElementTree.fromstring(figure).iter(name)]


def changed(timeline: Timeline, **values: object) -> Timeline:
    return msgspec.structs.replace(timeline, **values)


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=3000), st.integers(0, 2**20))
def test_peak_is_kept(held: list[int], other: int) -> None:
    """However many events there are, at most 320 are drawn, and the one at which most is held is among them."""
    columns = columns_of(Timeline(title="", held_bytes={"a": tuple(held), "b": (other,) * len(held)}, phases=()))
    if max(held) + other == 0:
        assert columns is None
        return
    assert columns is not None and len(columns.events) == min(len(held), 320)
    assert max(columns.totals) == max(held) + other
    assert columns.events == sorted(columns.events)


def test_kinds_are_of_the_same_event(timeline: Timeline) -> None:
    """What is drawn of every kind is what it holds after the same event, so that the stack is one that there was."""
    columns = columns_of(changed(timeline, held_bytes={"a": tuple(range(1000)), "b": tuple(range(1000, 0, -1))}))
    assert columns is not None and set(columns.totals) == {1000}
    assert [sum(held) for held in zip(*columns.held_bytes.values(), strict=True)] == columns.totals


def test_peak_and_limit_are_named(timeline: Timeline) -> None:
    """The peak and the limit bear their sizes."""
    assert {"peak 13.00 MiB", "limit 16.00 MiB"} <= set(texts(timeline_figure(timeline)))


def test_a_limit_far_above_is_named_only(timeline: Timeline) -> None:
    """A limit far above the peak would press the picture flat, and is said in the caption instead."""
    figure = timeline_figure(changed(timeline, limit_bytes=2**40))
    assert "aa-limit" not in figure and "The limit of 1.00 TiB is far above." in texts(figure, "p")[0]


def test_without_a_limit_none_is_drawn(timeline: Timeline) -> None:
    """Where there is no limit, there is neither a line nor a word about one."""
    figure = timeline_figure(changed(timeline, limit_bytes=None))
    assert "limit" not in figure


def test_phases_are_shaded_and_named(timeline: Timeline) -> None:
    """Every phase has its shade, and those that are wide enough their names."""
    figure = timeline_figure(timeline)
    shades = [element.attrib["class"] for element in xml.etree.ElementTree.fromstring(figure).iter("rect")]
    assert shades == ["aa-data", "aa-forward", "aa-backward", "aa-optimizer"]
    assert {"data", "forward", "backward", "optimizer"} <= set(texts(figure))


def test_caption_says_that_it_is_predicted(timeline: Timeline) -> None:
    """The caption has the title of the timeline and that nothing of it was measured."""
    assert texts(timeline_figure(timeline), "p")[0].startswith("One step <b>here</b>. Predicted, not measured;")


def test_legend_is_a_table_of_what_is_held(timeline: Timeline) -> None:
    """The legend has each kind that is ever held, from the uppermost down, with its bytes at the peak and at most."""
    figure = timeline_figure(timeline)
    assert texts(figure, "tr") == [
        "held byat the peakat most",
        "activations & <i>9.00 MiB9.00 MiB",
        "weights4.00 MiB4.00 MiB",
        "in all13.00 MiB13.00 MiB",
    ]


def test_colours_are_those_of_the_kinds(timeline: Timeline) -> None:
    """A kind has the same colour in the picture and in the legend."""
    root = xml.etree.ElementTree.fromstring(timeline_figure(timeline))
    areas = [element.attrib["class"] for element in root.iter("path") if "aa-area" in element.attrib["class"]]
    swatches = [element.attrib["class"] for element in root.iter("span")]
    assert areas == ["aa-area aa-c0", "aa-area aa-c1"] and swatches == ["aa-swatch aa-c1", "aa-swatch aa-c0"]


def test_description_says_where_the_peak_is(timeline: Timeline) -> None:
    """What is heard in place of the picture is the peak, its phase and what holds it."""
    assert texts(timeline_figure(timeline), "desc") == [
        "The peak of 13.00 MiB is in the backward phase: weights 4.00 MiB, activations & <i> 9.00 MiB."
    ]


@pytest.mark.parametrize("held", [{}, {"a": ()}, {"a": (0, 0)}, {"a": (1, 2), "b": ()}])
def test_nothing_held_is_a_sentence(timeline: Timeline, held: dict[str, tuple[int, ...]]) -> None:
    """A timeline without events or bytes is a sentence in place of the picture, and so is none at all."""
    sentence = timeline_figure(None)
    assert sentence.startswith('<p class="aa-missing">') and timeline_figure(changed(timeline, held_bytes=held)) == sentence


@pytest.mark.parametrize("phases", [(), ((0, "data"),), ((-5, "data"), (3, "forward"), (99, "backward"))])
def test_odd_phases_are_drawn(timeline: Timeline, phases: tuple[tuple[int, str], ...]) -> None:
    """Without phases, or with some that lie outside, the rest of the picture is the same."""
    assert "peak 13.00 MiB" in texts(timeline_figure(changed(timeline, phases=phases)))


def test_one_event_is_drawn(timeline: Timeline) -> None:
    """A single event is a picture as well."""
    figure = timeline_figure(changed(timeline, held_bytes={"a": (MIB,)}, phases=((0, "data"),)))
    assert "peak 1.00 MiB" in texts(figure)
