"""Writing patterns into caches, by the blocks of a plan."""

from decodebench.fill.common import Selection
from decodebench.fill.filler import Filler

__all__ = ["Filler", "Selection"]
