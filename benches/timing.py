"""Timing that holds on a noisy machine: what is compared takes turns."""

import statistics
import time
from collections.abc import Callable


def medians(rounds: int, *functions: Callable[[], object]) -> list[float]:
    """Return the median seconds of each function, called in turn."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for function, taken in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in times]
