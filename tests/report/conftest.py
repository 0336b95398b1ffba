"""Records that the reports are made from: one trial of every kind, and texts that want to be markup."""

from __future__ import annotations

import msgspec
import pytest

from autoaccum.records import (
    Candidate,
    Environment,
    Fit,
    Levers,
    MemoryAccount,
    Outcome,
    OutOfMemory,
    PlanRecord,
    ProbeResult,
    Refused,
    Setting,
    Skipped,
    Timeline,
    Trial,
)
from autoaccum.timing import timing_of

MIB = 2**20


def trial_of(size: int, outcome: Outcome, **more: object) -> Trial:
    """A trial of that size that took two seconds."""
    return Trial(
        **{"candidate": Candidate(micro_batch=size), "outcome": outcome, "wall_s": 2.0, "rows_per_step": 2 * size} | more
    )


@pytest.fixture
def trials() -> tuple[Trial, ...]:
    """One trial of every kind, in an order in which they could have been run."""
    return (
        trial_of(1, Refused(bound="floor", phase="forward", message="Expected more than 1 value per channel")),
        trial_of(2, Fit(peak_bytes=10 * MIB, step_times_s=(0.5,))),
        trial_of(4, Fit(peak_bytes=20 * MIB, step_times_s=(0.25, 0.75, 1.0))),
        trial_of(64, OutOfMemory(cause="allocator", phase="backward", message="CUDA out of memory.\nTried to allocate")),
        trial_of(32, OutOfMemory(cause="budget", peak_bytes=200 * MIB)),
        trial_of(16, OutOfMemory(cause="retries")),
        trial_of(15, OutOfMemory(cause="process", message="ended by signal 9")),
        trial_of(14, OutOfMemory(cause="unclear", phase="optimizer", message="cuDNN error")),
        trial_of(13, Refused(bound="ceiling", phase="forward", message="index too large")),
        trial_of(4, Fit(peak_bytes=22 * MIB, step_times_s=(0.5,)), purpose="confirm", rows_per_step=11),
        trial_of(3, Fit(peak_bytes=15 * MIB)),
    )


@pytest.fixture
def environment() -> Environment:
    """Where the trials were run; the model's name wants to be markup."""
    return Environment(
        device="cuda:0",
        device_name="A | B [bold]GPU[/bold]",
        model="<script>alert(1)</script>",
        optimizer="AdamW",
        batch="8 rows:\ninput_ids (8, 16)",
        python_version="3.11",
        torch_version="2.6.0",
        autoaccum_version="0.1.0",
        platform="Linux",
    )


@pytest.fixture
def memory() -> MemoryAccount:
    """Where the memory goes that does not depend on the batch."""
    return MemoryAccount(
        trainable_bytes=3 * MIB,
        frozen_bytes=MIB,
        buffer_bytes=0,
        gradient_bytes=3 * MIB,
        optimizer_state_bytes=6 * MIB,
        trainable_parameters=786432,
        frozen_parameters=262144,
    )


LEVERS = Levers(precision="bf16", checkpointing="full", checkpointed_blocks=6)
STEADY, NOISY = (0.5,) * 12, (0.8, 0.9, 1.0, 1.0, 1.1, 1.2)


@pytest.fixture
def settings() -> tuple[Setting, ...]:
    """One setting of every standing, neither in the order of speed nor in that of standing; a note wants to be markup."""
    fused, offload, loop = Levers(optimizer_impl="fused"), Levers(offload="cpu"), Levers(optimizer_impl="for-loop")
    return (
        Setting(
            levers=loop, standing="not run", micro_batch=4, accumulation_steps=3, predicted_step_s=2.0, note="a | b <i>"
        ),
        Setting(
            levers=offload, standing="does not fit", micro_batch=4, accumulation_steps=3, predicted_peak_bytes=150 * MIB
        ),
        measured(Levers(), 40, NOISY, micro_batch=2, accumulation_steps=6),
        Setting(levers=Levers(precision="fp16"), standing="not allowed", micro_batch=4, accumulation_steps=3),
        measured(fused, 44, (0.7, 0.7, 0.7), micro_batch=2, accumulation_steps=6),
        measured(LEVERS, 22, STEADY, standing="chosen", micro_batch=4, accumulation_steps=3),
    )


def measured(levers: Levers, peak_mib: int, times_s: tuple[float, ...], **more: object) -> Setting:
    """A setting that was run."""
    known = {"levers": levers, "standing": "measured", "peak_bytes": peak_mib * MIB, "timing": timing_of(times_s)}
    return Setting(**known | more)


@pytest.fixture
def timeline() -> Timeline:
    """A step of eight events with the peak at the fifth; its title and a kind want to be markup."""
    return Timeline(
        title="One step <b>here</b>",
        held_bytes={
            "weights": (4 * MIB,) * 8,
            "activations & <i>": (0, 2 * MIB, 4 * MIB, 8 * MIB, 9 * MIB, 4 * MIB, 0, 0),
            "batch": (0,) * 8,
        },
        phases=((0, "data"), (1, "forward"), (4, "backward"), (6, "optimizer")),
        limit_bytes=16 * MIB,
    )


@pytest.fixture
def plan(
    trials: tuple[Trial, ...],
    settings: tuple[Setting, ...],
    timeline: Timeline,
    environment: Environment,
    memory: MemoryAccount,
) -> PlanRecord:
    """A plan with everything in it; its trials were run under its levers, but for the first."""
    levers_of = [Levers(), *[LEVERS] * (len(trials) - 1)]
    run = [Candidate(micro_batch=t.candidate.micro_batch, levers=ls) for t, ls in zip(trials, levers_of, strict=True)]
    return PlanRecord(
        target_batch=22,
        world_size=2,
        rank=1,
        effective_batch=22,
        micro_batch=4,
        accumulation_steps=3,
        micro_batch_sizes=(4, 4, 3),
        max_micro_batch=4,
        min_micro_batch=2,
        limited_by="memory",
        evidence="measured",
        levers=LEVERS,
        budget_bytes=100 * MIB,
        measured_peak_bytes=22 * MIB,
        step_time_s=0.5,
        samples_per_s=44.0,
        timing=timing_of(STEADY),
        settings=settings,
        advice=("more <b>memory</b>\nwould | help [red]e[/red]",),
        trials=tuple(msgspec.structs.replace(t, candidate=candidate) for t, candidate in zip(trials, run, strict=True)),
        skipped=(Skipped(lever="optimizer_impl", level="foreach", reason="it is <b>used</b> already."),),
        warnings=("a | b\nc <i>d</i> [red]e[/red]",),
        memory=memory,
        timeline=timeline,
        environment=environment,
    )


@pytest.fixture
def result(trials: tuple[Trial, ...], environment: Environment, memory: MemoryAccount) -> ProbeResult:
    """A probe's result with everything in it."""
    return ProbeResult(
        max_micro_batch=4,
        limited_by="memory",
        evidence="measured",
        measured_peak_bytes=22 * MIB,
        budget_bytes=100 * MIB,
        trials=trials,
        warnings=("a | b\nc <i>d</i> [red]e[/red]",),
        memory=memory,
        environment=environment,
    )


@pytest.fixture
def bare_plan() -> PlanRecord:
    """A plan of which only the arithmetic is known."""
    return PlanRecord(
        target_batch=7,
        world_size=1,
        effective_batch=7,
        micro_batch=7,
        accumulation_steps=1,
        micro_batch_sizes=(7,),
        max_micro_batch=7,
        limited_by="target",
        evidence="predicted",
        budget_bytes=100 * MIB,
    )
