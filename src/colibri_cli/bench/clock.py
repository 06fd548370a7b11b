"""Times of calls from Python, without what reading the clock costs. Loads nothing but NumPy: every worker uses it."""

from __future__ import annotations

import gc
from time import perf_counter_ns
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Callable

Times: TypeAlias = npt.NDArray[np.float64]
Sampler: TypeAlias = "Callable[[int], Times]"

CLOCK_READS = 256  # before each burst of samples


def python_clock_ns() -> float:
    """Nanoseconds of one clock read and an empty call from Python, the median of many."""
    return float(np.median(_times(lambda: None, CLOCK_READS)))


def from_python(call: Callable[[], object]) -> Sampler:
    """Sample a call as a caller sees it; the garbage collector waits meanwhile."""

    def sample(n: int) -> Times:
        clock = python_clock_ns()
        collects = gc.isenabled()
        gc.disable()
        try:
            return np.maximum(_times(call, n) - clock, 0)
        finally:
            if collects:
                gc.enable()

    return sample


def percentile(times: Times, per_mille: int) -> float:
    """Give the nearest-rank percentile, a time that was measured."""
    rank = -(-len(times) * per_mille // 1000)
    return float(np.partition(times, rank - 1)[rank - 1])


def _times(call: Callable[[], object], n: int) -> Times:
    ns = np.empty(n)
    for i in range(n):
        start = perf_counter_ns()
        call()
        ns[i] = perf_counter_ns() - start
    return ns
