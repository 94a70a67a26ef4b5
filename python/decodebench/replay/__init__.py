"""Replaying a request trace through a simulated engine, with every fill planned and checked."""

from collections.abc import Callable
from typing import Any

from decodebench._core import FillStep, Replay, Trace
from decodebench.replay.memory import Geometry, Memory, MemoryReport

__all__ = ["FillStep", "Geometry", "Memory", "MemoryReport", "Replay", "Trace", "run"]

# Engine steps between two looks at the progress and at Ctrl-C: some milliseconds.
_CHUNK = 4096


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
    while not replay.done:
        step = replay.advance(_CHUNK)
        if step is not None and memory is not None:
            memory.apply(step)
        if progress is not None:
            stats = replay.stats()
            progress(stats["finished"] + stats["rejected"])
    if memory is not None:
        memory.finish()
    return replay.stats()
