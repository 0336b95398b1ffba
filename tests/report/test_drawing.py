"""What pictures are drawn with: labels that do not overlap, and texts that stay inside."""

from __future__ import annotations

import xml.etree.ElementTree

from hypothesis import given
from hypothesis import strategies as st

from autoaccum.report.axes import BOTTOM_PX, LEFT_PX, LETTER_PX, RIGHT_PX, TOP_PX, WIDTH_PX, Unit, across_axis, upright_axis
from autoaccum.report.drawing import Box, Labels, frame, label_at, legend, picture

METRE = Unit("m", 1)
PLACES = st.lists(st.tuples(st.floats(LEFT_PX, RIGHT_PX), st.floats(TOP_PX, BOTTOM_PX)), min_size=1, max_size=30)


@given(PLACES)
def test_labels_do_not_overlap(places: list[tuple[float, float]]) -> None:
    """No label overlaps another one or a mark, wherever the points are; one that finds no place is left out."""
    labels = Labels(places)
    drawn = [labels.beside(x, y, f"{number} chosen") for number, (x, y) in enumerate(places)]
    boxes = [Box(x - 6, y - 6, x + 6, y + 6) for x, y in places]
    for text in filter(None, drawn):
        element = xml.etree.ElementTree.fromstring(text)
        left, baseline = float(element.attrib["x"]), float(element.attrib["y"])
        box = Box(left, baseline - 9.9, left + len(element.text or "") * LETTER_PX - 0.1, baseline + 2.9)
        assert not any(box.hits(other._replace(left=other.left + 0.1, top=other.top + 0.1)) for other in boxes)
        boxes.append(box)


def test_a_lonely_point_is_labelled_to_its_right() -> None:
    """A label stands to the right of its point where that is free, and to its left at the right border."""
    assert xml.etree.ElementTree.fromstring(Labels([(100, 100)]).beside(100, 100, "1")).attrib["x"] == "108"
    assert float(xml.etree.ElementTree.fromstring(Labels([(400, 100)]).beside(400, 100, "12345")).attrib["x"]) < 370


def test_a_label_that_must_be_there_covers_marks() -> None:
    """Where nothing is free, a label that must be there is drawn over marks, and any other one is left out."""
    crowd = [(x, y) for x in range(60, 400, 8) for y in range(40, 250, 8)]
    assert Labels(crowd).beside(200, 100, "1") == "" and "1 chosen" in Labels(crowd).beside(
        200, 100, "1 chosen", always=True
    )


@given(st.floats(-100, 600), st.text("abc", min_size=1, max_size=30))
def test_a_label_stays_inside(x: float, text: str) -> None:
    """A label in the middle of a point at the border is moved inside."""
    element = xml.etree.ElementTree.fromstring(label_at(x, 100, text))
    half_px = len(text) * LETTER_PX / 2
    assert float(element.attrib["x"]) - half_px >= LEFT_PX - 0.1 and float(element.attrib["x"]) + half_px <= WIDTH_PX + 0.1


def test_frame_has_every_tick_and_name() -> None:
    """A frame shows the texts of all ticks and the names of both axes."""
    across, up = across_axis([3.0], "right", (METRE,)), upright_axis([20.0], "up", (METRE,))
    texts = [element.text for element in xml.etree.ElementTree.fromstring(f"<g>{frame(across, up)}</g>").iter("text")]
    assert texts == ["0", "5", "10", "15", "20", "0", "1", "2", "3", "up (m)", "right (m)"]


def test_picture_can_be_heard() -> None:
    """A picture is an image with a title and a description."""
    element = xml.etree.ElementTree.fromstring(picture("a <b>", "c & d"))
    assert element.attrib["role"] == "img" and [child.text for child in element] == ["a <b>", "c & d"]


def test_legend_has_text_beside_each_mark() -> None:
    """A legend is a list of marks, which are not read aloud, with their texts."""
    element = xml.etree.ElementTree.fromstring(legend([(label_at(8, 8, "x"), "one & <i>")]))
    (item,) = element
    assert item[0].attrib["aria-hidden"] == "true" and item[0].tail == "one & <i>"
