"""The levers that may be turned on several devices at once."""

from __future__ import annotations

from typing import Any

import msgspec

from autoaccum.levers import Space, common
from autoaccum.records import Levers, Skipped

ALL = Space(
    levels={"checkpointing": ("off", "full"), "precision": ("fp32", "tf32", "bf16")},
    num_blocks=4,
    block_names=(),
    skipped=(),
    not_allowed=(Levers(precision="bf16"), Levers(precision="fp16")),
)
NO_TF32 = Skipped(lever="precision", level="tf32", reason="this GPU has none")


def some(**changes: Any) -> Space:
    """The space with some of it changed."""
    return ALL._replace(**changes)


def test_equal_devices_have_their_space_in_common() -> None:
    """Nothing is lost where nothing differs."""
    assert common([ALL, some(), some()]) == ALL


def test_a_level_that_one_device_lacks_is_left_out_with_the_reason() -> None:
    """What cannot be used on one cannot be used on any, whichever comes first."""
    older = some(levels={**ALL.levels, "precision": ("fp32", "bf16")}, skipped=(NO_TF32,), not_allowed=ALL.not_allowed[:1])
    for found in (common([ALL, older]), common([older, ALL])):
        assert found.levels == older.levels
        assert found.skipped == (NO_TF32,)
        assert found.not_allowed == (Levers(precision="bf16"),)
    assert msgspec.json.encode(common([ALL, older]).families()) == msgspec.json.encode(older.families())
