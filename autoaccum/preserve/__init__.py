"""Puts everything back, bit for bit: the user's model, optimizer, random generators and modes."""

from autoaccum.preserve.ambient import keep_random_states, random_states_kept
from autoaccum.preserve.attributes import generators_in, keep_generator
from autoaccum.preserve.snapshot import Snapshot, preserved
from autoaccum.preserve.tensors import without_repeats

__all__ = [
    "Snapshot",
    "generators_in",
    "keep_generator",
    "keep_random_states",
    "preserved",
    "random_states_kept",
    "without_repeats",
]
