"""What ranks exchange at the end of a window. How they train together is in tests/training."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from autoaccum.errors import RankMismatchError
from autoaccum.reduction import Reducer, Standing, Status


@pytest.mark.parametrize("says", ["agree", "settle"])
def test_rank_that_is_gone_is_told_in_words(says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that breaks while ranks say how they stand is an error of ours, with the cause behind it."""

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:7055")

    reducer = Reducer()
    reducer.ranks.world_size = 2
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo")
    monkeypatch.setattr(dist, "all_reduce", broken)
    with pytest.raises(RankMismatchError, match=r"another rank cannot be reached any more.*Connection closed") as caught:
        reducer.agree(Standing(Status.DONE), []) if says == "agree" else reducer.settle(failed=False, loss=1.0)
    assert isinstance(caught.value.__cause__, RuntimeError)
