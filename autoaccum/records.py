"""Every frozen record that autoaccum passes around or writes down, and the glossary. No torch here.

The words, each with one meaning everywhere:
    micro_batch         rows of one forward and backward, on one rank
    accumulation_steps  micro-batches per optimizer step, on one rank
    window              the micro-batches of one optimizer step, and that step
    target_batch        rows per optimizer step that were asked for, over all ranks
    effective_batch     rows per optimizer step that are obtained, over all ranks
    share               the rows of one optimizer step on one rank
    lever, level        a thing to turn, and its position
    candidate           what to try; trial: what happened
`None` means "not known". Units end a name. A prediction never sits in a field that says measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any, Literal, TypeVar

import msgspec

from autoaccum.errors import InvalidRequestError
from autoaccum.units import format_bytes, one_line

LARGEST = 2**62  # bytes, rows or seconds; what a signed 64-bit counter can still add up
SCHEMA_VERSION = 2  # 2: levers, timings and settings; files of version 1 are read as they are

Phase = Literal["data", "forward", "backward", "optimizer"]
LimitedBy = Literal["memory", "target", "data", "caller", "host", "other"]
Evidence = Literal["exact", "measured", "predicted"]


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all records share: frozen, slotted, keyword-only, compared by value."""


class Levers(Record, frozen=True, kw_only=True):
    """The position of every lever. `Levers()` is what the caller uses already.

    `checkpointed_blocks`: how many blocks are checkpointed, the earliest ones. `block_names`: the caller's own list of
    blocks, by their names in the model; empty where blocks are found.
    """

    checkpointing: Literal["off", "selective", "full"] = "off"
    checkpointed_blocks: int = 0
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    optimizer_impl: Literal["default", "for-loop", "foreach", "fused"] = "default"
    offload: Literal["off", "cpu"] = "off"
    block_names: tuple[str, ...] = ()


AS_IT_IS = Levers()  # none turned


class Candidate(Record, frozen=True, kw_only=True):
    """What to try: `micro_batch` rows per forward on each rank, under these levers."""

    micro_batch: int
    levers: Levers = Levers()


class Fit(Record, frozen=True, kw_only=True, tag="fit"):
    """The size ran to the end inside the budget.

    `peak_bytes` is what counts against the budget (CUDA: reserved + context; CPU: resident; virtual: live).
    `step_times_s` are optimizer steps after the first one. `offloaded_bytes`: the most that lay in host memory for it.
    """

    peak_bytes: int
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    step_times_s: tuple[float, ...] = ()
    offloaded_bytes: int | None = None

    @property
    def median_step_s(self) -> float | None:
        """Median time of one optimizer step of this trial, in seconds."""
        return median(self.step_times_s) if self.step_times_s else None


class OutOfMemory(Record, frozen=True, kw_only=True, tag="out_of_memory"):
    """The size needs more memory than the budget.

    `cause`: "allocator" an allocation failed; "budget" it ran, but its peak is above the budget; "retries" it ran, but
    only because the allocator flushed its cache; "process" the worker process died; "unclear" an error that often, not
    always, means memory, believed because a smaller size ran.
    """

    cause: Literal["allocator", "budget", "retries", "process", "unclear"]
    phase: Phase | None = None
    peak_bytes: int | None = None
    message: str = ""


class Refused(Record, frozen=True, kw_only=True, tag="refused"):
    """The size fails for a known reason that is not the device's memory.

    `bound`: "ceiling" larger sizes fail as well; "floor" smaller sizes fail as well.
    `limited_by`: what a ceiling is to be called in the plan.
    """

    bound: Literal["ceiling", "floor"]
    limited_by: Literal["host", "other"] = "other"
    phase: Phase | None = None
    message: str = ""


Outcome = Fit | OutOfMemory | Refused


class Trial(Record, frozen=True, kw_only=True):
    """One candidate that was really run, and what came of it.

    `purpose`: "probe" is two optimizer steps of two micro-batches of the size; "confirm" is optimizer steps of the plan's
    own sizes, as training runs them.
    `rows_per_step`: rows of one optimizer step of this trial, on one rank.
    """

    candidate: Candidate
    outcome: Outcome
    wall_s: float
    rows_per_step: int
    purpose: Literal["probe", "confirm"] = "probe"


class Skipped(Record, frozen=True, kw_only=True):
    """A level that was left out, and why."""

    lever: str
    level: str
    reason: str


class Timing(Record, frozen=True, kw_only=True):
    """How long one whole optimizer step takes, in seconds; `num` steps were measured after the warm-up.

    `interval_frac`: half the width of the median's 95 % interval, as a fraction of the median; None with fewer than six
    steps, which have no such interval.
    """

    median_s: float
    first_quartile_s: float
    third_quartile_s: float
    num: int
    interval_frac: float | None = None


class Setting(Record, frozen=True, kw_only=True):
    """One position of the levers and one micro-batch: a row of the trade-offs.

    `standing`: "chosen"; "measured" it ran and another one was chosen; "does not fit" it ran out of memory, or is predicted
    to; "not run" a prediction showed that it cannot be the best; "not allowed" it would change the numerics, and the levers
    that were asked for do not. `note` says why, in a sentence. `micro_batch` is the largest one used, `predicted_step_s`
    what the optimizer step was expected to take.
    """

    levers: Levers
    standing: Literal["chosen", "measured", "does not fit", "not run", "not allowed"]
    micro_batch: int
    accumulation_steps: int
    peak_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    timing: Timing | None = None
    predicted_step_s: float | None = None
    note: str = ""


class Timeline(Record, frozen=True, kw_only=True):
    """Bytes held after each allocation or free of one optimizer step, by what holds them; predicted, not measured.

    `phases`: at which event each phase begins. `limit_bytes`: what the allocator may hold, None where there is no limit.
    """

    title: str
    held_bytes: dict[str, tuple[int, ...]]
    phases: tuple[tuple[int, Phase], ...]
    limit_bytes: int | None = None

    def __hash__(self) -> int:
        return hash((self.title, frozenset(self.held_bytes.items()), self.phases, self.limit_bytes))


class Budget(Record, frozen=True, kw_only=True):
    """What this process may hold on the device, what it held at the start, and what the device has, in bytes."""

    budget_bytes: int
    held_bytes: int
    total_bytes: int


class MemoryAccount(Record, frozen=True, kw_only=True):
    """Where the memory goes that does not depend on the batch, in bytes; a tied weight counts once.

    Gradients are counted for trainable parameters only. `optimizer_state_bytes` is what the optimizer really held after
    its first step, None when no step was run.
    """

    trainable_bytes: int
    frozen_bytes: int
    buffer_bytes: int
    gradient_bytes: int
    optimizer_state_bytes: int | None = None
    trainable_parameters: int
    frozen_parameters: int


class Environment(Record, frozen=True, kw_only=True):
    """Where and on what the trials were run. `batch` says in words what the probe batch was."""

    device: str
    device_name: str
    model: str
    optimizer: str
    batch: str
    world_size: int = 1
    python_version: str
    torch_version: str
    autoaccum_version: str
    platform: str
    driver: str = ""


class Outlook(Record, frozen=True, kw_only=True):
    """What one optimizer step at the target would take on one kind of GPU, in bytes.

    Where nothing fits, `peak_bytes` is that of the smallest micro-batch and the sizes are None.
    """

    gpu: str
    total_bytes: int
    fits: bool
    peak_bytes: int
    micro_batch: int | None = None
    accumulation_steps: int | None = None
    levers: Levers = Levers()


class Prediction(Record, frozen=True, kw_only=True):
    """A peak that was computed from traces, and what it is made of, in bytes.

    `peak_bytes` is what counts against the GPU's total: what the allocator reserves, and the context. The interval from
    `low_bytes` to `high_bytes` is as wide as the predictor is known to err. `parts` says what is held when most is
    allocated; with "cached" (reserved, in no tensor's use) and "context" it sums to `peak_bytes`. `phase` is where that is.
    `flops_per_step` counts matrix products, convolutions and attention of one optimizer step on one rank.
    """

    gpu: str
    total_bytes: int
    peak_bytes: int
    low_bytes: int
    high_bytes: int
    allocated_bytes: int
    parts: tuple[tuple[str, int], ...]
    phase: Phase
    flops_per_step: int
    not_modelled: tuple[str, ...] = ()
    outlooks: tuple[Outlook, ...] = ()

    @property
    def by_kind(self) -> dict[str, int]:
        """What holds the peak: bytes by kind."""
        return dict(self.parts)


class ProbeResult(Record, frozen=True, kw_only=True, tag_field="record", tag="autoaccum.ProbeResult"):
    """How many rows fit into one micro-batch, and what that rests on.

    `max_micro_batch` was run in this search. `evidence`: "exact" when the next size ran and failed, else "measured".
    """

    schema_version: int = SCHEMA_VERSION
    max_micro_batch: int
    limited_by: LimitedBy
    evidence: Evidence
    measured_peak_bytes: int | None
    budget_bytes: int
    levers: Levers = Levers()
    trials: tuple[Trial, ...] = ()
    warnings: tuple[str, ...] = ()
    memory: MemoryAccount | None = None
    environment: Environment | None = None

    def __str__(self) -> str:
        peak = format_bytes(self.measured_peak_bytes)
        return (
            f"max_micro_batch={self.max_micro_batch}, limited by {self.limited_by} ({self.evidence}), peak {peak} of "
            f"{format_bytes(self.budget_bytes)}, {len(self.trials)} trials"
        )

    def to_json(self) -> str:
        """The record as JSON text; `from_json` gives it back."""
        return to_json(self)

    @staticmethod
    def from_json(text: str | bytes) -> ProbeResult:
        """Read what `to_json` wrote.

        Raises:
            InvalidRequestError: When the text is damaged, of a newer schema, or something else.
        """
        return from_json(text, ProbeResult)


class PlanRecord(Record, frozen=True, kw_only=True, tag_field="record", tag="autoaccum.Plan"):
    """How to take one optimizer step of `target_batch` rows, and what that rests on.

    `micro_batch_sizes` are this rank's, in the order to run them; they sum to this rank's share of the target.
    `max_micro_batch` is the largest size known to fit; it may be larger than `micro_batch`, the largest one used.
    `evidence`: as of `ProbeResult` where that size was run with these levers, else "predicted"; nothing was run at all only
    where `trials` is empty as well.
    `step_time_s` and `samples_per_s` are of one whole optimizer step at the target, over all ranks; `timing` is its spread.
    `shares`: rows of every rank, where they are in proportion to `limits`, the largest micro-batch that fits on each; empty
    where all ranks have equally many. `settings` are the trade-offs: what was measured and what was left out. `advice`: what
    more memory or another lever would bring, in sentences.
    """

    schema_version: int = SCHEMA_VERSION
    target_batch: int
    world_size: int
    rank: int = 0
    effective_batch: int
    micro_batch: int
    accumulation_steps: int
    micro_batch_sizes: tuple[int, ...]
    max_micro_batch: int
    min_micro_batch: int = 1
    limited_by: LimitedBy
    evidence: Evidence
    multiple_of: int = 1
    equal_micro_batches: bool = False
    shares: tuple[int, ...] = ()
    limits: tuple[int, ...] = ()
    objective: Literal["throughput", "memory"] = "throughput"
    levers: Levers = Levers()
    budget_bytes: int
    measured_peak_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    step_time_s: float | None = None
    samples_per_s: float | None = None
    timing: Timing | None = None
    settings: tuple[Setting, ...] = ()
    advice: tuple[str, ...] = ()
    trials: tuple[Trial, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    warnings: tuple[str, ...] = ()
    memory: MemoryAccount | None = None
    prediction: Prediction | None = None
    timeline: Timeline | None = None
    environment: Environment | None = None

    def __post_init__(self) -> None:
        """Refuse a plan that would change what is learned; a file can hold anything."""
        sizes, world_size = self.micro_batch_sizes, self.world_size
        shared = not (self.shares or self.limits) or (
            len(self.shares) == len(self.limits) == world_size
            and sum(self.shares) == self.target_batch
            and min(*self.shares, *self.limits) >= 1
        )
        sound = shared and (
            self.effective_batch == self.target_batch
            and min(self.multiple_of, self.min_micro_batch) >= 1
            and 0 <= self.rank < self.world_size
            and sum(sizes) == self._share()
            and min(sizes, default=0) >= 1
            and self.accumulation_steps == len(sizes)
            and max(sizes) == self.micro_batch <= self.max_micro_batch
        )
        if not sound:
            raise ValueError(f"micro_batch_sizes={list(sizes)[:20]} do not make up target_batch={self.target_batch}")
        measured = (
            self.budget_bytes,
            self.measured_peak_bytes,
            self.predicted_peak_bytes,
            self.step_time_s,
            self.samples_per_s,
        )
        if any(value is not None and value < 0 for value in measured):
            raise ValueError("a size, time or rate is below zero")

    def _share(self) -> int:
        """Rows of this rank."""
        if self.shares:
            return self.shares[self.rank]
        return self.target_batch // self.world_size + (self.rank < self.target_batch % self.world_size)

    @property
    def headroom_bytes(self) -> int | None:
        """Bytes between the measured peak and the budget, None where nothing was measured."""
        return None if self.measured_peak_bytes is None else self.budget_bytes - self.measured_peak_bytes


class StepResult(Record, frozen=True, kw_only=True):
    """What one window of an `Accumulator` did.

    `loss` is the mean over the window on all ranks (the sum, for a loss that is a sum); NaN where nothing had a weight.
    `weight` is what that mean is over, on all ranks. `micro_batch_sizes` are this rank's, in rows, None where they cannot be
    counted. `replays`: how often the window was begun again after running out of memory. `skipped`: no step was taken,
    because nothing had a weight or a gradient was not finite. `grad_norm`: before clipping, None where nothing is clipped.
    """

    loss: float
    weight: float
    micro_batch_sizes: tuple[int | None, ...]
    replays: int = 0
    skipped: bool = False
    grad_norm: float | None = None


class CheckResult(Record, frozen=True, kw_only=True, tag_field="record", tag="autoaccum.CheckResult"):
    """Whether the gradient of a whole batch and that of an uneven split of it are the same.

    `relative_error`: norm of the difference over the norm of the whole batch's gradient. `norm_ratio`: norm of the split's
    over the whole's. `reasons`: plain sentences: which layer, which loss, what to do. `micro_batch_sizes`: the split.
    `dtype`: in which the model was run. `notes`: what else was seen, such as a batch that did not fit whole.
    """

    schema_version: int = SCHEMA_VERSION
    exact: bool
    relative_error: float
    norm_ratio: float
    reasons: tuple[str, ...] = ()
    micro_batch_sizes: tuple[int, ...] = ()
    dtype: str = "float64"
    notes: tuple[str, ...] = ()


class _Header(msgspec.Struct):
    """The part of a file that must be understood before the rest is."""

    record: str = ""
    schema_version: int = 0


R = TypeVar("R", bound=Record)


def to_json(record: Record) -> str:
    """Any record as indented JSON text."""
    return msgspec.json.format(msgspec.json.encode(record), indent=2).decode()


def from_json(text: str | bytes, kind: type[R]) -> R:
    """The record of the given kind that the JSON text holds; nothing is ever evaluated or unpickled.

    Raises:
        InvalidRequestError: When the text is damaged, of a newer schema, or something else than this record.
    """
    expected = kind.__struct_config__.tag
    try:
        header = msgspec.json.decode(text, type=_Header)
        if header.record != expected:
            raise InvalidRequestError(
                f"the JSON is not an {expected} (its record is {header.record[:60]!r}); "
                "expected a file that autoaccum wrote."
            )
        if header.schema_version < 1:
            raise InvalidRequestError(f"the JSON has no schema_version; expected {expected} as autoaccum wrote it.")
        if header.schema_version > SCHEMA_VERSION:
            raise InvalidRequestError(
                f"schema_version={header.schema_version} is newer than this autoaccum reads ({SCHEMA_VERSION}); "
                "upgrade with: pip install --upgrade autoaccum"
            )
        record = msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError as error:
        said = one_line(str(error), 300)
        raise InvalidRequestError(f"the JSON is not a sound {expected}: {said}. Was the file edited?") from None
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        said = one_line(str(error), 300)
        raise InvalidRequestError(f"the JSON cannot be read as {expected}: {said}. Is the file complete?") from None
    if not all(abs(number) <= LARGEST for number in numbers_in(plain(record))):
        raise InvalidRequestError(
            f"the JSON is not a sound {expected}: a number in it is beyond reason. Was the file edited?"
        )
    return record


def numbers_in(value: object) -> Iterator[float]:
    """Every number in plain dicts and lists."""
    if isinstance(value, (int, float)):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from numbers_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from numbers_in(item)


def plain(record: Record) -> dict[str, Any]:
    """The record as plain dicts, lists and numbers."""
    return dict(msgspec.to_builtins(record))
