"""Plans and results in plain words and as Markdown, whatever the texts in them hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import msgspec
import pytest
from markdown_it import MarkdownIt

from autoaccum.records import CheckResult, Evidence, Levers, LimitedBy, PlanRecord, ProbeResult
from autoaccum.report.text import check_text, plan_lines, plan_markdown, plan_text, probe_lines, probe_markdown


def changed(record: PlanRecord, **values: object) -> PlanRecord:
    return msgspec.structs.replace(record, **values)


def test_lines_of_a_plan(plan: PlanRecord) -> None:
    """A plan says its sizes, its limit, its memory, its speed, its levers and where it was found."""
    assert plan_lines(plan) == [
        ("Plan", "2 x 4 + 3 (3 micro-batches) on rank 1 of 2 = one optimizer step of 22 samples"),
        ("Largest micro-batch", "4, limited by memory (measured: it ran, and 13 failed; sizes between them were not tried)"),
        ("Memory", "measured peak 22.00 MiB of a budget of 100 MiB"),
        ("Of that", "weights 4.00 MiB, gradients 3.00 MiB, optimizer state 6.00 MiB"),
        ("Speed", "500 ms (500 to 500 ms, n=12) per optimizer step, 44 samples/s"),
        ("Levers", "full checkpointing of 6 blocks, bf16"),
        ("Model", "<script>alert(1)</script>, optimizer AdamW"),
        ("Probed with", "8 rows:\ninput_ids (8, 16)"),
        ("Device", "cuda:0 (A | B [bold]GPU[/bold]), torch 2.6.0"),
    ]


def test_lines_of_a_bare_plan(bare_plan: PlanRecord) -> None:
    """What is not known is left out or said to be unknown, never made up."""
    assert plan_lines(bare_plan) == [
        ("Plan", "7 (1 micro-batch) = one optimizer step of 7 samples"),
        ("Largest micro-batch", "7, limited by the target itself: everything fits at once (predicted: nothing was run)"),
        ("Memory", "budget 100 MiB, peak not measured"),
        ("Levers", "none"),
    ]


def test_predicted_limit_of_a_search_is_not_said_to_be_without_trials(plan: PlanRecord) -> None:
    """Where trials ran, a size that is predicted to fit is one that did not run with the chosen levers."""
    found = plan_lines(changed(plan, evidence="predicted"))[1][1]
    assert found == "4, limited by memory (predicted: it was not run with these levers)"


def test_lines_of_a_result(result: ProbeResult) -> None:
    """A probe's result says its limit, its memory and where it was found."""
    assert [what for what, _ in probe_lines(result)] == [
        "Largest micro-batch",
        "Memory",
        "Of that",
        "Model",
        "Probed with",
        "Device",
    ]
    assert probe_lines(result)[0][1].startswith("4, limited by memory (measured: ")


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((7,), "7 (1 micro-batch)"),
        ((4, 3), "4 + 3 (2 micro-batches)"),
        ((37, 37, 36), "2 x 37 + 36 (3 micro-batches)"),
        ((2, 2, 2), "3 x 2 (3 micro-batches)"),
        ((3, 3, 2, 2), "2 x 3 + 2 x 2 (4 micro-batches)"),
    ],
)
def test_sizes_in_words(bare_plan: PlanRecord, sizes: tuple[int, ...], words: str) -> None:
    """Equal sizes are counted together, in the order in which they are run."""
    total, largest = sum(sizes), max(sizes)
    plan = changed(
        bare_plan,
        target_batch=total,
        effective_batch=total,
        micro_batch_sizes=sizes,
        micro_batch=largest,
        max_micro_batch=largest,
        accumulation_steps=len(sizes),
    )
    assert plan_lines(plan)[0][1] == f"{words} = one optimizer step of {total} samples"


def test_every_limit_and_evidence_has_its_own_words(bare_plan: PlanRecord) -> None:
    """No two combinations of limit and evidence read the same."""
    limits, evidences = get_args(LimitedBy), get_args(Evidence)
    texts = {plan_text(changed(bare_plan, limited_by=limit, evidence=ev)) for limit in limits for ev in evidences}
    assert len(texts) == len(limits) * len(evidences)


def test_text_is_aligned(plan: PlanRecord) -> None:
    """In the text, all values begin in one column, and the advice and each warning follow as notes."""
    text = plan_text(changed(plan, environment=None, advice=("more",), warnings=("first", "second")))
    lines = text.splitlines()
    assert lines[-3:] == ["Advice               more", "Note                 first", "Note                 second"]
    assert {line[19:21] for line in lines} == {"  "} and {line[21] != " " for line in lines} == {True}


@pytest.mark.parametrize("kind", ["plan", "result"])
def test_markdown_rows_are_whole(kind: str, request: pytest.FixtureRequest) -> None:
    """Pipes and line breaks in a text do not break a row: every row of a table has the columns of its header."""
    record = request.getfixturevalue(kind)
    text = plan_markdown(record) if kind == "plan" else probe_markdown(record)
    columns = [line.replace("\\|", "").count("|") for line in text.splitlines() if line.startswith("|")]
    facts = len(plan_lines(record) if kind == "plan" else probe_lines(record))
    if kind == "plan":
        assert columns == [3] * (2 + facts) + [10] * (2 + len(record.settings)) + [8] * (2 + len(record.trials))
    else:
        assert columns == [3] * (2 + facts) + [7] * (2 + len(record.trials))


@pytest.mark.parametrize("kind", ["plan", "result"])
def test_markdown_holds_no_markup_of_others(kind: str, request: pytest.FixtureRequest) -> None:
    """A text that is HTML is shown as text."""
    record = request.getfixturevalue(kind)
    text = plan_markdown(record) if kind == "plan" else probe_markdown(record)
    assert "<script>" not in text and "<i>" not in text and "<b>" not in text
    assert "&lt;script>alert(1)&lt;/script>" in text or "&lt;script&gt;alert(1)&lt;/script&gt;" in text


def test_markdown_sections(plan: PlanRecord) -> None:
    """The report has the plan, its trade-offs, trials and notes under headings, and ends with a line break."""
    text = plan_markdown(plan)
    assert [line.lstrip("# ") for line in text.splitlines() if line.startswith("#")] == [
        "autoaccum plan",
        "Trade-offs",
        "Advice",
        "Trials",
        "Left out",
        "Notes",
    ]
    assert text.endswith("\n") and not text.endswith("\n\n")


def test_markdown_has_no_empty_section(bare_plan: PlanRecord) -> None:
    """What there is nothing of has no heading."""
    assert "###" not in plan_markdown(bare_plan)


def test_markdown_marks_the_chosen_setting(plan: PlanRecord) -> None:
    """The chosen setting is the first row of the trade-offs, and the only one in bold."""
    rows = [line for line in plan_markdown(plan).splitlines() if line.count("|") > 8][2:8]
    assert rows[0].startswith("| **chosen** | **full checkpointing of 6 blocks, bf16** | **4 x 3** |")
    assert ["**" in row for row in rows] == [True] + [False] * 5


def test_markdown_has_notes_of_settings(plan: PlanRecord) -> None:
    """Why a setting was left out stands in the last column of the trade-offs."""
    assert "| - | - | a \\| b &lt;i&gt; |" in plan_markdown(plan)


def test_objective_is_said_where_it_is_memory(bare_plan: PlanRecord) -> None:
    """A plan that was made for the lowest peak says so."""
    assert ("Objective", "the lowest peak, and the fastest among equals") in plan_lines(
        changed(bare_plan, objective="memory")
    )


def test_failures_under_other_levers_are_no_limit(plan: PlanRecord) -> None:
    """What failed under other levers than the plan's says nothing about its largest micro-batch."""
    other = changed(plan, levers=Levers(), limited_by="caller")
    assert plan_lines(other)[1][1].endswith("(measured: it ran, and no larger size was tried)")


def test_markdown_notes_are_one_line_each(plan: PlanRecord) -> None:
    """A warning of several lines is one item of the list of notes."""
    notes = plan_markdown(plan).partition("### Notes\n\n")[2].splitlines()
    assert len(notes) == 1 and notes[0].startswith("- a ")


def test_text_of_an_exact_check() -> None:
    """An exact check says so in its first line, and then by how much the gradients differ, over which rows, in what."""
    result = CheckResult(exact=True, relative_error=3.14159e-16, norm_ratio=1.0, micro_batch_sizes=(11, 5))
    assert check_text(result).splitlines() == [
        "exact: accumulated gradients are those of the whole batch",
        "  relative error 3.1e-16, norm ratio 1 (11 + 5 rows against 16, float64)",
    ]


def test_text_of_a_check_that_is_not_exact() -> None:
    """A check that is not exact says so, and has every reason and every note on a line of its own."""
    result = CheckResult(
        exact=False,
        relative_error=0.25,
        norm_ratio=0.1234567,
        micro_batch_sizes=(7, 3),
        dtype="bfloat16",
        reasons=("Layer 1: BatchNorm.", "The loss is a sum."),
        notes=("20 rows did not fit.",),
    )
    assert check_text(result).splitlines() == [
        "not exact",
        "  relative error 0.25, norm ratio 0.123457 (7 + 3 rows against 10, bfloat16)",
        "  - Layer 1: BatchNorm.",
        "  - The loss is a sum.",
        "  note: 20 rows did not fit.",
    ]


MARKUP = [
    "a \\| b \\",
    "\\",
    "**bold** _it_ ~~gone~~ `code`",
    "``` fence",
    "~~~",
    "[link](javascript:alert) ![picture](http://x/y.png)",
    "[a]: http://x",
    "# heading",
    "- item",
    "+ item",
    "1. item",
    "12) item",
    "> quote",
    "---",
    "===",
    "<script>alert(1)</script> <!-- &lt;b&gt; &#60;",
    "a\n\n# heading\n\n- item | b",
]


def kinds_of(markdown: str) -> list[str]:
    """What a reader of GitHub's Markdown finds in it, but for the texts."""
    tokens = MarkdownIt("gfm-like", {"linkify": False}).parse(markdown)
    inner = [[part.type for part in token.children or () if part.type not in ("text", "text_special")] for token in tokens]
    return [kind for token, parts in zip(tokens, inner, strict=True) for kind in (token.type, *parts)]


def with_text(plan: PlanRecord, text: str) -> PlanRecord:
    """The plan with the text wherever a text of others can stand."""
    environment = msgspec.structs.replace(plan.environment, device=text, device_name=text, model=text, batch=text)
    settings = tuple(msgspec.structs.replace(setting, note=text) for setting in plan.settings)
    return changed(plan, environment=environment, settings=settings, warnings=(text, text), advice=(text,))


@pytest.mark.parametrize("text", MARKUP)
def test_text_is_no_markdown(plan: PlanRecord, text: str) -> None:
    """A text that is Markdown adds no cell, block, link or emphasis to the report."""
    assert kinds_of(plan_markdown(with_text(plan, text))) == kinds_of(plan_markdown(with_text(plan, "x")))


@pytest.mark.parametrize("text", MARKUP[:-1])
def test_text_in_markdown_is_read_back(plan: PlanRecord, text: str) -> None:
    """A reader of the Markdown sees the text as it was, in a table and in a list."""
    tokens = MarkdownIt("gfm-like", {"linkify": False}).parse(plan_markdown(with_text(plan, text)))
    read = ["".join(part.content for part in token.children or ()) for token in tokens if token.type == "inline"]
    assert read.count(text) >= len(plan.settings) + 3


@pytest.mark.parametrize("show", [plan_text, plan_markdown])
def test_terminal_is_not_told_anything(plan: PlanRecord, show: Callable[[PlanRecord], str]) -> None:
    """Escape sequences and other control characters in names and warnings are shown as signs that they were there."""
    text = show(with_text(plan, "\x1b]0;title\x07 \x08\x9b31m \rover"))
    assert all(char.isprintable() or char in "\n\t" for char in text) and "\ufffd" in text


def test_check_tells_a_terminal_nothing() -> None:
    """The names of layers in the reasons of a check are only shown."""
    result = CheckResult(exact=False, relative_error=1.0, norm_ratio=1.0, reasons=("\x1b[2J",), notes=("\x07",))
    assert "\x1b" not in check_text(result) and "\x07" not in check_text(result)
