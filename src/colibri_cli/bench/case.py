"""Cases and arms: the work that is measured, and the ways of doing it."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from time import perf_counter_ns
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from colibri_cli import _core

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Times: TypeAlias = npt.NDArray[np.float64]
Sampler: TypeAlias = "Callable[[int], Times]"

_CLOCK_READS = 256  # before each burst of samples


@dataclass(frozen=True, slots=True)
class Arm:
    """One way of doing a case's work.

    Attributes
    ----------
    name : str
    sample : callable
        From n to n times of one call, float64 nanoseconds, without the clock's own cost.
    error : callable
        Do the work and give the answer's distance from float64's.
    tolerance : float
        The largest error of a right answer.
    threads : int
    call : callable, optional
        The same work as one call from Python, of which allocations are counted.
    probe : callable, optional
        Further figures, taken once a round.
    """

    name: str
    sample: Sampler
    error: Callable[[], float]
    tolerance: float
    threads: int = 1
    call: Callable[[], object] | None = None
    probe: Callable[[], Mapping[str, float]] | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """One piece of work.

    Attributes
    ----------
    name : str
    about : str
        What one call does, and how it is timed.
    n_tokens : int
        Of one call; 0 where it has none.
    arms : list of Arm
        The others are compared with the first.
    flops : int
        Floating-point operations of one call; 0: not what the case is about.
    weight_bytes : int
        Weights that one call reads.
    """

    name: str
    about: str
    n_tokens: int
    arms: list[Arm]
    flops: int = 0
    weight_bytes: int = 0


def core_clock_ns() -> float:
    """Nanoseconds of one clock read inside the compiled core, the median of many."""
    ns = np.empty(_CLOCK_READS)
    _core.time_clock(ns)
    return float(np.median(ns))


def python_clock_ns() -> float:
    """Nanoseconds of one clock read and an empty call from Python, the median of many."""
    return float(np.median(_times(lambda: None, _CLOCK_READS)))


def in_core(fill: Callable[[Times], None], n_calls: int = 1) -> Sampler:
    """Sample by a timer of the core, which makes ``n_calls`` calls between two clock reads."""

    def sample(n: int) -> Times:
        clock = core_clock_ns()
        ns = np.empty(n)
        fill(ns)
        return np.maximum(ns - clock, 0) / n_calls

    return sample


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


def _times(call: Callable[[], object], n: int) -> Times:
    ns = np.empty(n)
    for i in range(n):
        start = perf_counter_ns()
        call()
        ns[i] = perf_counter_ns() - start
    return ns
