"""One run of the bench: which cases, on what machine, with what result."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from colibri_cli import __version__, _core
from colibri_cli.bench import machine
from colibri_cli.bench.case import core_clock_ns
from colibri_cli.bench.clock import python_clock_ns
from colibri_cli.bench.comparison import Times
from colibri_cli.bench.measure import Measured, Plan, measure
from colibri_cli.bench.suite import CASES
from colibri_cli.errors import UsageError
from colibri_cli.topology import check_threads, describe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from colibri_cli.bench.comparison import Key

_FULL, _QUICK = Plan(rounds=20, seconds=0.8), Plan(rounds=5, seconds=0.05)


@dataclass(frozen=True, slots=True)
class Result:
    """What was found about a case; see `Case` and `Measured`."""

    name: str
    about: str
    n_tokens: int
    flops: int
    weight_bytes: int
    arms: list[Measured]


@dataclass(frozen=True, slots=True)
class Run:
    """Everything that one run found.

    Attributes
    ----------
    results : list of Result
    environment : dict
        `topology.describe`, the instruction set and this package's version.
    clock_ns : dict of str to float
        What reading the clock costs in the core and from Python.
    read_gb_s : dict of int to float
        By number of threads, the best rate at which so many or fewer read ``read_bytes`` of memory.
    read_bytes : int
    peak_memory_bytes : int
        Of this process when all cases were done, all that it imported included.
    quick : bool
    """

    results: list[Result]
    environment: dict[str, Any]
    clock_ns: dict[str, float]
    read_gb_s: dict[int, float]
    read_bytes: int
    peak_memory_bytes: int
    quick: bool

    def times(self) -> dict[Key, Times]:
        """Give what `comparison` compares: every arm's."""
        return {
            (result.name, arm.name, arm.threads): Times(arm.p50_ns, arm.low_ns, arm.high_ns)
            for result in self.results
            for arm in result.arms
        }

    def to_dict(self) -> dict[str, Any]:
        """Give the run as ``schema/bench.schema.json`` has it, but for the key "schema"."""
        return {
            "quick": self.quick,
            "environment": self.environment,
            "clock_ns": self.clock_ns,
            "read_gb_s": {str(threads): rate for threads, rate in self.read_gb_s.items()},
            "read_bytes": self.read_bytes,
            "peak_memory_bytes": self.peak_memory_bytes,
            "cases": [asdict(result, dict_factory=_without_none) for result in self.results],
        }


def _without_none(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: value for key, value in items if value is not None}


def environment() -> dict[str, Any]:
    """Describe this machine, and what of Colibri runs on it."""
    return {"colibri": __version__, "isa": _core.isa(), **describe()}


def chosen(names: Sequence[str]) -> list[str]:
    """Give the cases that the names mean: one by its name, several by what their names begin with.

    Raises
    ------
    UsageError
        A name means none.
    """
    for name in names:
        if not any(_means(name, case) for case in CASES):
            raise UsageError(expected=f"one of {', '.join(CASES)}", got=repr(name), at="--case")
    return [case for case in CASES if not names or any(_means(name, case) for name in names)]


def _means(name: str, case: str) -> bool:
    return case == name or case.startswith(f"{name}-")


def run(
    names: Sequence[str] = (),
    *,
    threads: int | None = None,
    quick: bool = False,
    steps: Callable[[int, str], Iterable[int]] = lambda total, _: range(total),
) -> Run:
    """Measure.

    Parameters
    ----------
    names : sequence of str
        See `chosen`; none: all cases.
    threads : int, optional
        For the arms with several threads. Default: what the CPU affinity and the cgroup's quota allow.
    quick : bool
        A tenth of the time, with a wider spread.
    steps : callable
        From a count and a label to the steps one by one; shows progress.

    Raises
    ------
    UsageError
        A name means no case.
    ColibriError
        An arm's answer is wrong.
    """
    cases, width = chosen(names), check_threads(threads)
    plan = _QUICK if quick else _FULL
    results = []
    for i in steps(len(cases), "bench"):
        case = CASES[cases[i]](width)
        arms = measure(case, plan)
        results.append(Result(case.name, case.about, case.n_tokens, case.flops, case.weight_bytes, arms))
    peak = machine.peak_memory()  # before the memory that is only there to be read
    found = environment()
    n_bytes = machine.bytes_beyond_caches(describe())
    counts = sorted({arm.threads for result in results if result.weight_bytes for arm in result.arms})
    rates = [machine.read_gb_s(n_bytes, count, quick=quick) for count in counts]  # more threads can do what fewer do
    return Run(
        results=_with_common_peaks(results),
        environment=found,
        clock_ns={"core": core_clock_ns(), "python": python_clock_ns()},
        read_gb_s=dict(zip(counts, accumulate(rates, max), strict=True)),
        read_bytes=n_bytes,
        peak_memory_bytes=peak,
        quick=quick,
    )


def _with_common_peaks(results: list[Result]) -> list[Result]:
    """Give all arms of a number of threads the best peak that the run saw of so many threads or fewer."""
    peaks = [(arm.threads, arm.peak_gflops) for result in results for arm in result.arms if arm.peak_gflops]

    def common(arm: Measured) -> Measured:
        reached = [peak for threads, peak in peaks if threads <= arm.threads]
        return arm if arm.peak_gflops is None else replace(arm, peak_gflops=max(reached))

    return [replace(result, arms=[common(arm) for arm in result.arms]) for result in results]
