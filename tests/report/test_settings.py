"""The trade-offs as rows: their order, what they are compared with, and what is not known."""

from __future__ import annotations

import msgspec

from autoaccum.records import Levers, PlanRecord, Setting
from autoaccum.report.settings import baseline, ordered, rate_of, setting_cells, setting_notes
from autoaccum.timing import timing_of


def of_levers(plan: PlanRecord, words: str) -> dict[str, str]:
    """The cells of the setting with these levers, by the names of their columns."""
    header, rows = setting_cells(plan)
    (row,) = [row for row in rows if row[1] == words]
    return dict(zip(header, row, strict=True))


def test_chosen_comes_first_and_left_out_last(settings: tuple[Setting, ...]) -> None:
    """The chosen setting is first, measured ones follow from fast to slow, and those that were left out are last."""
    assert [setting.standing for setting in ordered(settings)] == [
        "chosen",
        "measured",
        "measured",
        "not allowed",
        "does not fit",
        "not run",
    ]
    times_s = [setting.timing.median_s for setting in ordered(settings) if setting.timing is not None]
    assert times_s == [0.5, 0.7, 1.0]


def test_header_has_the_budget(plan: PlanRecord) -> None:
    """The columns are named, and that of the peaks says what they are part of."""
    assert setting_cells(plan).header == (
        "standing",
        "levers",
        "micro-batch x steps",
        "peak of 100 MiB",
        "optimizer step",
        "samples/s",
        "relative speed",
        "relative memory",
    )


def test_row_of_the_chosen_setting(plan: PlanRecord) -> None:
    """A measured setting has its sizes, its peak of the budget, its times, its rate, and both against the baseline."""
    assert setting_cells(plan).rows[0] == (
        "chosen",
        "full checkpointing of 6 blocks, bf16",
        "4 x 3",
        "22.00 MiB (22 %)",
        "500 ms (500 to 500 ms, n=12)",
        "44",
        "2.00x",
        "0.55x",
    )


def test_row_of_the_baseline(plan: PlanRecord) -> None:
    """The setting without levers is what the others are compared with, and its noise is said."""
    row = of_levers(plan, "none")
    assert (row["relative speed"], row["relative memory"]) == ("baseline", "baseline")
    assert row["optimizer step"].endswith("noisy: \u00b120 %)")


def test_rows_of_what_was_not_run(plan: PlanRecord) -> None:
    """What was predicted says so, and what is not known is a dash."""
    assert of_levers(plan, "for-loop optimizer")["optimizer step"] == "2 s (predicted)"
    assert of_levers(plan, "offload to the host")["peak of 100 MiB"] == "150 MiB (150 %, predicted)"
    assert list(of_levers(plan, "fp16").values())[3:] == ["-"] * 5


def test_differences_within_the_noise_are_none(plan: PlanRecord) -> None:
    """A setting that differs from the baseline by less than the noise is as fast."""
    noisy = timing_of((0.9, 1.0, 1.0, 1.1, 1.1, 1.2))
    settings = tuple(
        msgspec.structs.replace(setting, timing=noisy) if setting.levers == Levers(optimizer_impl="fused") else setting
        for setting in plan.settings
    )
    changed = msgspec.structs.replace(plan, settings=settings)
    assert of_levers(changed, "fused optimizer")["relative speed"] == "the same"


def test_without_a_baseline_nothing_is_relative(plan: PlanRecord) -> None:
    """Where the setting without levers was not measured, the columns against it are left out."""
    settings = tuple(setting for setting in plan.settings if setting.levers != Levers())
    assert baseline(settings) is None
    assert "relative" not in " ".join(setting_cells(msgspec.structs.replace(plan, settings=settings)).header)


def test_names_of_blocks_make_no_lever(settings: tuple[Setting, ...]) -> None:
    """The setting without levers is the baseline even where the caller named blocks."""
    named = msgspec.structs.replace(settings[2], levers=Levers(block_names=("a",)))
    assert baseline([named]) == named


def test_rates_are_over_all_ranks(plan: PlanRecord) -> None:
    """The rate of a setting counts the rows of all ranks."""
    assert plan.world_size == 2 and rate_of(plan, ordered(plan.settings)[0]) == plan.effective_batch / 0.5


def test_notes_are_in_the_order_of_the_rows(plan: PlanRecord) -> None:
    """Each note belongs to the row of its place."""
    assert setting_notes(plan) == ("",) * 5 + ("a | b <i>",)


def test_no_time_is_no_rate(plan: PlanRecord) -> None:
    """A step of zero seconds, as a coarse clock gives it, has neither a rate nor a speed."""
    settings = tuple(
        msgspec.structs.replace(setting, timing=setting.timing and timing_of((0.0,) * 6)) for setting in plan.settings
    )
    header, rows = setting_cells(msgspec.structs.replace(plan, settings=settings))
    assert rows[0][header.index("samples/s")] == "-"
