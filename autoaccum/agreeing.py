"""What the ranks were called with, compared before anything runs. What differs is named, with all its values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from autoaccum.errors import RankMismatchError
from autoaccum.fingerprint import digest
from autoaccum.meeting import Meeting
from autoaccum.request import Request
from autoaccum.workload import Workload

_MAY_DIFFER = ("budget", "storage", "cache")  # cards differ, and only the first rank touches what is kept
_PARAMETERS = "parameters"
_MOST_NAMED = 3  # parameters that differ; where one does, many may
_MOST_RANKS = 8  # listed one by one


def call_of(workload: Workload, request: Request, call: str) -> dict[str, str]:
    """What has to be the same on all ranks, as text: "autotune" or "probe", the numbers, the model, the optimizer."""
    numbers = {name: str(getattr(request, name)) for name in request.__struct_fields__ if name not in _MAY_DIFFER}
    return {
        "call": call,
        **numbers,
        "model": type(workload.module).__name__,
        "optimizer": workload.optimizer_name,
        "weight": _named(workload.weight),
        _PARAMETERS: digest(list(_described(workload.module).items())),  # in order, as gradients are reduced
    }


def refuse_differing(ranks: Meeting, call: Mapping[str, str], workload: Workload) -> None:
    """Compare what all ranks were called with.

    Raises:
        RankMismatchError: On every rank, with each argument that differs and its values.
    """
    if ranks.world_size == 1:
        return
    calls = ranks.gather(dict(call))
    found = [f"{name}: {text}" for name in calls[0] if name != _PARAMETERS and (text := _differing(name, calls))]
    if _differing(_PARAMETERS, calls):
        described = ranks.gather(_described(workload.module))  # seldom, and then on all ranks: they have heard the same
        names = dict.fromkeys(name for of_rank in described for name in of_rank)
        differing = [f"parameter {name!r}: {text}" for name in names if (text := _differing(name, described))]
        found += differing[:_MOST_NAMED] or ["the order of the parameters"]
    if found:
        raise RankMismatchError(
            f"the ranks were called with different arguments ({'; '.join(found)}); give all ranks the same ones."
        )


def _described(module: nn.Module) -> dict[str, str]:
    """Every parameter: its shape, type, and whether it is trained."""
    return {
        name: f"{list(parameter.shape)} {str(parameter.dtype).removeprefix('torch.')} "
        f"{'trained' if parameter.requires_grad else 'frozen'}"
        for name, parameter in module.named_parameters()
    }


def _named(weight: Any) -> str:
    if isinstance(weight, str):
        return weight
    name = str(getattr(weight, "__qualname__", type(weight).__name__))
    settings = {key: value for key, value in getattr(weight, "__dict__", {}).items() if isinstance(value, (str, int, bool))}
    return name + (f"({', '.join(f'{key}={value!r}' for key, value in settings.items())})" if settings else "")


def _differing(name: str, of_ranks: Sequence[Mapping[str, str]]) -> str:
    """Each value with the ranks that have it: "64 on rank 0, 32 on rank 1"; nothing where all are the same."""
    ranks_of: dict[str, list[int]] = {}
    for rank, values in enumerate(of_ranks):
        ranks_of.setdefault(values.get(name, "not there"), []).append(rank)
    if len(ranks_of) == 1:
        return ""
    return ", ".join(f"{value} on {_ranks_in_words(ranks)}" for value, ranks in ranks_of.items())


def _ranks_in_words(ranks: Sequence[int]) -> str:
    if len(ranks) > _MOST_RANKS:
        return f"{len(ranks)} ranks ({ranks[0]} and others)"
    *others, last = map(str, ranks)
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"
