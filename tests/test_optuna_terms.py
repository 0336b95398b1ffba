"""Trials of ours in Optuna's terms, and back."""

from __future__ import annotations

import optuna
import pytest

from autoaccum.levers import LEVERS
from autoaccum.optuna_terms import CHOICES, claim_of, distributions, params_of, point_in, space_of
from autoaccum.records import Candidate, Levers
from autoaccum.tradeoffs.points import Point


def test_every_lever_is_a_parameter() -> None:
    """The parameters are the levers with all their levels, so that a new lever is one as well."""
    assert {lever.name: lever.levels for lever in LEVERS} == CHOICES


@pytest.mark.parametrize(
    "point",
    [Point(Levers(), 1), Point(Levers(checkpointing="full", checkpointed_blocks=3, precision="bf16", offload="cpu"), 10**6)],
)
def test_every_setting_is_within_the_distributions(point: Point) -> None:
    """Parameters of a setting are what the distributions may give."""
    parameters = params_of(point)
    assert parameters.keys() == distributions().keys()
    for name, distribution in distributions().items():
        assert distribution._contains(distribution.to_internal_repr(parameters[name]))


def test_space_is_as_large_as_its_points() -> None:
    """Sizes are sampled between the smallest and the largest that is left."""
    sampled = space_of([Point(Levers(), 4), Point(Levers(), 32)])["micro_batch"]
    assert isinstance(sampled, optuna.distributions.IntDistribution) and (sampled.low, sampled.high) == (4, 32)


def test_claimed_setting_comes_back() -> None:
    """What one process claims, another one reads; a trial of somebody else is no setting."""
    candidate = Candidate(micro_batch=8, levers=Levers(offload="cpu"))
    ours = optuna.trial.create_trial(value=0.0, user_attrs=claim_of(candidate))
    assert point_in(ours) == Point(candidate.levers, 8)
    assert point_in(optuna.trial.create_trial(value=0.0)) is None


def test_two_claims_are_never_the_same() -> None:
    """Each claim is one of its kind, also of the same candidate by the same process."""
    candidate = Candidate(micro_batch=8)
    assert claim_of(candidate)["claim"] != claim_of(candidate)["claim"]
