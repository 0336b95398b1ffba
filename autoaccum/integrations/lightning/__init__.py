"""Lightning: a callback that tunes when `fit` starts and makes every window's gradient that of its rows; plain keywords."""

from autoaccum.integrations.lightning.callback import AutoAccum
from autoaccum.integrations.lightning.settings import trainer_kwargs

__all__ = ["AutoAccum", "trainer_kwargs"]
