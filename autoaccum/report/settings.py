"""The trade-offs: one row per setting of the levers, each against the setting that turns none. Decides nothing."""

from __future__ import annotations

from collections.abc import Sequence

from autoaccum.records import PlanRecord, Setting
from autoaccum.report.tables import Cells, is_default, levers_in_words, rate_in_words, timing_in_words, without_empty
from autoaccum.timing import are_equal, noise_frac
from autoaccum.units import format_bytes, format_seconds

_ORDER = ("chosen", "measured", "not allowed", "does not fit", "not run")
_BASELINE = "baseline"
_UNKNOWN_S = float("inf")  # sorts behind every time that is known


def ordered(settings: Sequence[Setting]) -> tuple[Setting, ...]:
    """The chosen setting, then the measured ones from fast to slow, then those that were left out."""
    return tuple(sorted(settings, key=_place))


def _place(setting: Setting) -> tuple[int, float, str]:
    known_s = setting.predicted_step_s if setting.timing is None else setting.timing.median_s
    return _ORDER.index(setting.standing), _UNKNOWN_S if known_s is None else known_s, levers_in_words(setting.levers)


def baseline(settings: Sequence[Setting]) -> Setting | None:
    """The fastest setting that turns no lever, None where none was measured."""
    return next(
        (setting for setting in ordered(settings) if is_default(setting.levers) and setting.timing is not None), None
    )


def rate_of(plan: PlanRecord, setting: Setting) -> float | None:
    """Samples per second over all ranks under this setting, None where it was not timed."""
    step_s = setting.timing.median_s if setting.timing else None
    return plan.effective_batch / step_s if step_s else None


def setting_cells(plan: PlanRecord) -> Cells:
    """The trade-offs as text, in the order of `ordered`; columns that say nothing are left out."""
    base = baseline(plan.settings)
    header = (
        "standing",
        "levers",
        "micro-batch x steps",
        f"peak of {format_bytes(plan.budget_bytes)}",
        "optimizer step",
        "samples/s",
        "relative speed",
        "relative memory",
    )
    return without_empty(header, [_cells(plan, setting, base) for setting in ordered(plan.settings)])


def brief_cells(plan: PlanRecord) -> Cells:
    """What was measured, or would be possible, in few words; what was not run is left out, and the chosen one is starred."""
    base = baseline(plan.settings)
    header = ("", "levers", "micro-batch x steps", f"peak of {format_bytes(plan.budget_bytes)}", "optimizer step", "speed")
    shown = [setting for setting in ordered(plan.settings) if setting.standing != "not run"]
    return without_empty(header, [_brief_cells(setting, base) for setting in shown])


def _brief_cells(setting: Setting, base: Setting | None) -> tuple[str, ...]:
    peak_bytes = setting.predicted_peak_bytes if setting.peak_bytes is None else setting.peak_bytes
    timing = setting.timing
    step = setting.standing if timing is None else f"{format_seconds(timing.median_s)} \u00b1{noise_frac(timing):.0%}"
    return (
        "*" if setting.standing == "chosen" else "",
        levers_in_words(setting.levers),
        f"{setting.micro_batch} x {setting.accumulation_steps}",
        format_bytes(peak_bytes),
        step,
        "" if base is None else _speed(setting, base),
    )


def setting_notes(plan: PlanRecord) -> tuple[str, ...]:
    """Why each setting stands as it does, in the order of `ordered`; empty where there is nothing to say."""
    return tuple(setting.note for setting in ordered(plan.settings))


def _cells(plan: PlanRecord, setting: Setting, base: Setting | None) -> tuple[str, ...]:
    return (
        setting.standing,
        levers_in_words(setting.levers),
        f"{setting.micro_batch} x {setting.accumulation_steps}",
        _peak(plan, setting),
        _step(setting),
        rate_in_words(rate_of(plan, setting)),
        "" if base is None else _speed(setting, base),
        "" if base is None else _memory(setting, base),
    )


def _peak(plan: PlanRecord, setting: Setting) -> str:
    is_measured = setting.peak_bytes is not None
    peak_bytes = setting.peak_bytes if is_measured else setting.predicted_peak_bytes
    if peak_bytes is None:
        return "-"
    share = f"{100 * peak_bytes / plan.budget_bytes:.0f} %" if plan.budget_bytes else ""
    return f"{format_bytes(peak_bytes)} ({', '.join(filter(None, (share, '' if is_measured else 'predicted')))})"


def _step(setting: Setting) -> str:
    if setting.timing is not None:
        return timing_in_words(setting.timing)
    return "-" if setting.predicted_step_s is None else f"{format_seconds(setting.predicted_step_s)} (predicted)"


def _speed(setting: Setting, base: Setting) -> str:
    """How often the setting's step goes into the baseline's; no number where noise hides the difference."""
    if setting is base:
        return _BASELINE
    if setting.timing is None or base.timing is None or not setting.timing.median_s:
        return "-"
    return "the same" if are_equal(setting.timing, base.timing) else f"{base.timing.median_s / setting.timing.median_s:.2f}x"


def _memory(setting: Setting, base: Setting) -> str:
    if setting is base:
        return _BASELINE
    return f"{setting.peak_bytes / base.peak_bytes:.2f}x" if setting.peak_bytes and base.peak_bytes else "-"
