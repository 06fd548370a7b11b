"""One run held against an earlier one."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from colibri_cli.errors import InvalidInput
from colibri_cli.formats.inputs import read_input

if TYPE_CHECKING:
    import os

    from colibri_cli.bench.runner import Run

SCHEMA = "colibri.bench/1"
_LARGEST = 16 << 20  # bytes; a run has about 10 KB
_DRIFT = 0.05  # clocks differ that much from one quiet minute to the next
_MACHINE = ("cpu", "isa", "logical_cpus", "governor")  # what makes times of two runs comparable


@dataclass(frozen=True, slots=True)
class Times:
    """P50 of one arm and its spread, in nanoseconds."""

    p50_ns: float
    low_ns: float
    high_ns: float


@dataclass(frozen=True, slots=True)
class Change:
    """One arm then and now.

    Attributes
    ----------
    case, arm : str
    threads : int
    before_ns, now_ns : float
        P50.
    verdict : {"slower", "faster", "same"}
        Beyond both runs' spread and the drift of clocks, or not.
    """

    case: str
    arm: str
    threads: int
    before_ns: float
    now_ns: float
    verdict: str


@dataclass(frozen=True, slots=True)
class Baseline:
    """An earlier run.

    Attributes
    ----------
    times : dict
        By case, arm and number of threads.
    environment : dict
    """

    times: dict[tuple[str, str, int], Times]
    environment: dict[str, Any]

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Baseline:
        """Read what ``colibri bench --format json`` wrote.

        Raises
        ------
        UsageError
            The file is missing or cannot be read.
        InvalidInput
            It is something else.
        """
        data = read_input(path, limit=_LARGEST)
        try:
            return cls(*_parsed(json.loads(data)))
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise InvalidInput(
                expected=f"JSON of {SCHEMA} with cases",
                got=f"none for {error}" if isinstance(error, KeyError) else str(error),
                at=str(path),
                hint="colibri bench --format json --output FILE writes one",
            ) from error


def _parsed(document: dict[str, Any]) -> tuple[dict[tuple[str, str, int], Times], dict[str, Any]]:
    if document["schema"] != SCHEMA:
        raise ValueError(f"the schema {document['schema']!r}")
    times = {
        (str(case["name"]), str(arm["name"]), int(arm["threads"])): _times(arm)
        for case in document["cases"]
        for arm in case["arms"]
    }
    return times, dict(document["environment"])


def _times(arm: dict[str, Any]) -> Times:
    times = Times(float(arm["p50_ns"]), float(arm["low_ns"]), float(arm["high_ns"]))
    if not (0 <= times.low_ns <= times.high_ns < math.inf and 0 <= times.p50_ns < math.inf):
        raise ValueError(f"the times {times}")
    return times


def compare(before: Baseline, now: Run) -> list[Change]:
    """Judge every arm that both runs have."""
    changes = []
    for result in now.results:
        for arm in result.arms:
            earlier = before.times.get((result.name, arm.name, arm.threads))
            if earlier is not None:
                verdict = _verdict(earlier, Times(arm.p50_ns, arm.low_ns, arm.high_ns))
                changes.append(Change(result.name, arm.name, arm.threads, earlier.p50_ns, arm.p50_ns, verdict))
    return changes


def _verdict(before: Times, now: Times) -> str:
    if now.low_ns > before.high_ns * (1 + _DRIFT):
        return "slower"
    return "faster" if now.high_ns * (1 + _DRIFT) < before.low_ns else "same"


def differences(before: Baseline, now: Run) -> list[str]:
    """Say what about the two machines makes their times no fair comparison."""
    return [
        f"{key} was {before.environment.get(key)!r} and is {now.environment[key]!r}"
        for key in _MACHINE
        if before.environment.get(key) != now.environment[key]
    ]
