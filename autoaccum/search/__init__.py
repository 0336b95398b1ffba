"""Which micro-batch to try next. A pure function of the trials so far; the log is the whole state.

Knows nothing of devices, levers or time.
"""

from autoaccum.search.guide import Forecast
from autoaccum.search.line import line_through, next_to_measure
from autoaccum.search.proposing import NOISE_FRAC, is_closed_by_convexity, probe_ceiling, propose
from autoaccum.search.standing import Standing, standing

__all__ = [
    "NOISE_FRAC",
    "Forecast",
    "Standing",
    "is_closed_by_convexity",
    "line_through",
    "next_to_measure",
    "probe_ceiling",
    "propose",
    "standing",
]
