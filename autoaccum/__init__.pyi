from .accumulate.accumulator import Accumulator
from .batches.pieces import Window
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
from .records import CheckResult, ProbeResult, StepResult
from .tune import autotune, predict, probe
from .workload import Workload

__all__ = [
    "Accumulator",
    "AutoaccumError",
    "CheckResult",
    "InvalidRequestError",
    "MissingExtraError",
    "NothingFitsError",
    "Plan",
    "ProbeResult",
    "RankMismatchError",
    "StepResult",
    "VirtualDevice",
    "Window",
    "Workload",
    "autotune",
    "predict",
    "probe",
    "tokens",
]
