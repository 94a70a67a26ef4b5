"""Replaying a request trace through a simulated engine, with every fill planned and checked."""

import time
from collections.abc import Callable
from typing import Any

from decodebench._core import FillStep, Replay, Trace
from decodebench.replay.memory import Geometry, Memory, MemoryReport

__all__ = ["FillStep", "Geometry", "Memory", "MemoryReport", "Replay", "Trace", "run"]

# Seconds between two looks at the progress and at Ctrl-C. An engine step may take a microsecond or,
# with very many requests, much longer.
_STRETCH = 0.05


def run(
    replay: Replay, memory: Memory | None, progress: Callable[[int], None] | None = None
) -> dict[str, Any]:
    """Run a replay to its end.

    Args:
        replay: A replay at its start, recording memory if ``memory`` is given.
        memory: Where its fills are written and checked; ``None`` for planning alone.
        progress: Called now and then with the number of requests that have finished or were
            rejected.

    Returns:
        The statistics of the replay.
    """
    steps = 1
    while not replay.done:
        start = time.perf_counter()
        step = replay.advance(steps)
        taken = time.perf_counter() - start
        steps = max(1, steps // 2) if taken > _STRETCH else min(2 * steps, 1 << 20)
        if step is not None and memory is not None:
            memory.apply(step)
        if progress is not None:
            stats = replay.stats()
            progress(stats["finished"] + stats["rejected"])
    if memory is not None:
        memory.finish()
    return replay.stats()
