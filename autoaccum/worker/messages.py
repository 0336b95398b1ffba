"""What the parent and the worker process say to each other: JSON, one message a line."""

from __future__ import annotations

import msgspec

from autoaccum.records import Candidate, PlanRecord, ProbeResult, Record, Trial


class Job(Record, frozen=True, kw_only=True):
    """What the worker is to do. `request` is a `request.Request` as JSON, which the parent need not understand.

    `log` holds the trials of workers that died, so that the search goes on instead of starting again.
    """

    target: str
    device: str | None
    request: msgspec.Raw
    log: tuple[Trial, ...] = ()


class Bounded(Record, frozen=True, kw_only=True, tag="bounded"):
    """No size above `top` will be tried."""

    top: int


class Started(Record, frozen=True, kw_only=True, tag="started"):
    """A trial begins."""

    candidate: Candidate
    purpose: str


class Finished(Record, frozen=True, kw_only=True, tag="finished"):
    """A trial is over."""

    trial: Trial


class Planned(Record, frozen=True, kw_only=True, tag="planned"):
    """The search with a target is over."""

    plan: PlanRecord


class Probed(Record, frozen=True, kw_only=True, tag="probed"):
    """The search without a target is over."""

    result: ProbeResult


class Failed(Record, frozen=True, kw_only=True, tag="failed"):
    """The search ended with an error.

    `kind`: "nothing fits" and "refused" come with autoaccum's own message, "user" with a traceback of the user's code.
    """

    kind: str
    text: str


Message = Bounded | Started | Finished | Planned | Probed | Failed
