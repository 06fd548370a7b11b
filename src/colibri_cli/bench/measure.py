"""A case's arms, checked and then timed in turns."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from colibri_cli.bench import machine
from colibri_cli.bench.clock import percentile
from colibri_cli.errors import ColibriError

if TYPE_CHECKING:
    from colibri_cli.bench.case import Arm, Case
    from colibri_cli.bench.clock import Times

_FEWEST_SAMPLES, _MOST_SAMPLES = 5, 5_000  # of an arm in one round
_SLOW = 0.02  # seconds a call, from which on one sample a round is enough
_FEWEST_ROUNDS = 3
_LOOK_NS = 2e8  # for the calls between two looks at the C heap
_PATIENCE = 4  # times the planned seconds, after which no further round begins


@dataclass(frozen=True, slots=True)
class Plan:
    """How long to measure.

    Attributes
    ----------
    rounds : int
        Turns of each arm; fewer on a machine much too slow for the time.
    seconds : float
        For each arm of a case.
    """

    rounds: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Measured:
    """What was found about one arm; nanoseconds are those of one call.

    Attributes
    ----------
    name : str
    threads : int
    error : float
        Of its answer, against float64.
    n_samples : int
    p50_ns, p99_ns, p999_ns : float
        Percentiles by nearest rank; None with fewer than 100, or 1,000, samples.
    low_ns, high_ns : float
        Quartiles of the rounds' medians: the spread of P50.
    ratio : float, optional
        Time of this arm by that of the first, the median of the rounds.
    gflops, peak_gflops : float, optional
        Rate of the case's operations at P50, and the most that these threads did; see `machine.peak_gflops`.
    weights_gb_s : float, optional
        Rate at which the weights that a call needs went by at P50, from wherever they lay.
    outside_share : float, optional
        Share of a call outside the linear layers of mixer, gate, experts and head.
    unpacking_share : float, optional
        Share of a call spent turning mapped rows into panels; part of ``outside_share``.
    allocated_bytes, heap_growth_bytes : int, optional
        See `machine.allocated_bytes` and `machine.heap_growth`.
    """

    name: str
    threads: int
    error: float
    n_samples: int
    p50_ns: float
    p99_ns: float | None
    p999_ns: float | None
    low_ns: float
    high_ns: float
    ratio: float | None = None
    gflops: float | None = None
    peak_gflops: float | None = None
    weights_gb_s: float | None = None
    outside_share: float | None = None
    unpacking_share: float | None = None
    allocated_bytes: int | None = None
    heap_growth_bytes: int | None = None


def measure(case: Case, plan: Plan) -> list[Measured]:
    """Check every arm's answer, then time the arms in turns.

    Raises
    ------
    ColibriError
        An arm's answer is wrong; nothing has been timed.
    """
    errors = [_checked(case, arm) for arm in case.arms]
    bursts = [_burst(arm, plan.seconds / plan.rounds) for arm in case.arms]
    rounds: list[list[Times]] = [[] for _ in case.arms]
    probes: list[dict[str, list[float]]] = [{} for _ in case.arms]
    deadline = perf_counter() + _PATIENCE * plan.seconds * len(case.arms)
    for done in range(plan.rounds):
        if done >= _FEWEST_ROUNDS and perf_counter() > deadline:
            break
        for arm, burst, times, probed in zip(case.arms, bursts, rounds, probes, strict=True):
            times.append(arm.sample(burst))
            for name, value in ({} if arm.probe is None else arm.probe()).items():
                probed.setdefault(name, []).append(value)
    first = np.array([np.median(times) for times in rounds[0]])
    return [
        _measured(case, arm, error, times, probed, None if arm is case.arms[0] else first)
        for arm, error, times, probed in zip(case.arms, errors, rounds, probes, strict=True)
    ]


def _checked(case: Case, arm: Arm) -> float:
    error = arm.error()
    if not error <= arm.tolerance:  # nor NaN
        raise ColibriError(
            expected=f"an answer within {arm.tolerance:g} of float64's",
            got=f"an error of {error:.3g}",
            at=f"{case.name}, {arm.name}",
            hint="a wrong answer is not worth timing; `colibri bench --self-test` may tell more",
        )
    return error


def _burst(arm: Arm, seconds: float) -> int:
    """How many samples fill a round, from a few that also warm the arm up."""
    arm.sample(1)
    n, used = 1, _seconds(arm, 1)
    while used < seconds / 10 and n < _MOST_SAMPLES:
        n *= 2
        used = _seconds(arm, n)
    quickest = min(used, *(_seconds(arm, n) for _ in range(2)))  # a pause must not make all rounds short
    fewest = _FEWEST_SAMPLES if quickest < _SLOW * n else 1
    return max(fewest, min(int(n * seconds / quickest), _MOST_SAMPLES))


def _seconds(arm: Arm, n: int) -> float:
    start = perf_counter()
    arm.sample(n)
    return perf_counter() - start


def _measured(
    case: Case, arm: Arm, error: float, rounds: list[Times], probed: dict[str, list[float]], first: Times | None
) -> Measured:
    times = np.concatenate(rounds)
    medians = np.array([np.median(round_times) for round_times in rounds])
    p50 = percentile(times, 500)
    low, high = np.percentile(medians, [25, 75])
    n_calls = max(1, min(machine.MOST_CALLS, int(_LOOK_NS / max(p50, 1))))
    matrices, unpacking = (np.array(probed.get(name, [])) for name in ("matrix_ns", "unpacking_ns"))
    return Measured(
        name=arm.name,
        threads=arm.threads,
        error=error,
        n_samples=len(times),
        p50_ns=p50,
        p99_ns=percentile(times, 990) if len(times) >= 100 else None,
        p999_ns=percentile(times, 999) if len(times) >= 1000 else None,
        low_ns=float(low),
        high_ns=float(high),
        ratio=None if first is None else float(np.median(medians / np.maximum(first, 1e-3))),
        gflops=case.flops / p50 if case.flops else None,
        peak_gflops=max(probed["peak_gflops"]) if "peak_gflops" in probed else None,
        weights_gb_s=case.weight_bytes / p50 if case.weight_bytes else None,
        outside_share=float(np.median(1 - matrices / medians)) if matrices.size else None,
        unpacking_share=float(np.median(unpacking / medians)) if unpacking.size else None,
        allocated_bytes=None if arm.call is None else machine.allocated_bytes(arm.call),
        heap_growth_bytes=None if arm.call is None else machine.heap_growth(arm.call, n_calls),
    )
