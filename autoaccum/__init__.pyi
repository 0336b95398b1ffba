from .batches.weights import tokens
from .devices.virtual import VirtualDevice
from .errors import (
    AutoaccumError,
    InvalidRequestError,
    MissingExtraError,
    NothingFitsError,
    RankMismatchError,
)
from .plan import Plan
from .records import ProbeResult
from .tune import autotune, probe
from .workload import Workload

__all__ = [
    "AutoaccumError",
    "InvalidRequestError",
    "MissingExtraError",
    "NothingFitsError",
    "Plan",
    "ProbeResult",
    "RankMismatchError",
    "VirtualDevice",
    "Workload",
    "autotune",
    "probe",
    "tokens",
]
