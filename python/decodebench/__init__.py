"""Fill exactly the KV-cache blocks that a decode benchmark pretends to have received."""

from decodebench._core import Group, GroupFill, Ledger, Planner, StepPlan, __version__
from decodebench.errors import (
    BackendError,
    DecodeBenchError,
    LayoutError,
    PatternError,
    PlanError,
    TraceError,
)

__all__ = [
    "BackendError",
    "DecodeBenchError",
    "Group",
    "GroupFill",
    "LayoutError",
    "Ledger",
    "PatternError",
    "PlanError",
    "Planner",
    "StepPlan",
    "TraceError",
    "__version__",
]
