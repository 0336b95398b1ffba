"""autoaccum: one optimizer step at a chosen effective batch, inside a memory budget, proved before training.

The names are listed in `__init__.pyi` and loaded when first used, so that `autoaccum --help` does not import torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
