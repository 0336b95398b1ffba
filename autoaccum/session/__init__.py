"""One search: its log of trials, its predictions, its clock, and what all ranks agree on."""

from autoaccum.session.search import Search

__all__ = ["Search"]
