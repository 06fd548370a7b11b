"""Cases and arms: the work that is measured, and the ways of doing it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from colibri_cli import _core
from colibri_cli.bench.clock import CLOCK_READS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from colibri_cli.bench.clock import Sampler, Times


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
    ns = np.empty(CLOCK_READS)
    _core.time_clock(ns)
    return float(np.median(ns))


def in_core(fill: Callable[[Times], None], n_calls: int = 1) -> Sampler:
    """Sample by a timer of the core, which makes ``n_calls`` calls between two clock reads."""

    def sample(n: int) -> Times:
        clock = core_clock_ns()
        ns = np.empty(n)
        fill(ns)
        return np.maximum(ns - clock, 0) / n_calls

    return sample
