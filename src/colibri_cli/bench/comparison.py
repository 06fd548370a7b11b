"""One run held against an earlier one."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from colibri_cli.errors import InvalidInput
from colibri_cli.formats.inputs import read_input

if TYPE_CHECKING:
    import os
    from collections.abc import Collection

Key: TypeAlias = tuple[str, str, int]  # case, arm, number of threads

SCHEMA = "colibri.bench/1"
_LARGEST = 16 << 20  # bytes; a run has about 10 KB, one against peers 500
_DRIFT = 0.05  # clocks differ that much from one quiet minute to the next
_MACHINE = ("cpu", "isa", "logical_cpus", "governor")  # what makes times of two runs comparable


@dataclass(frozen=True, slots=True)
class Times:
    """P50 of one arm and its spread, in nanoseconds."""

    p50_ns: float
    low_ns: float
    high_ns: float


class Comparable(Protocol):
    """A run that can be held against an earlier one."""

    @property
    def environment(self) -> dict[str, Any]:
        """What `runner.environment` found."""

    def times(self) -> dict[Key, Times]:
        """Give the times that are judged."""


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
        Those that are judged, by case, arm and number of threads: not those of Colibri's peers.
    environment : dict
    """

    times: dict[Key, Times]
    environment: dict[str, Any]

    @classmethod
    def read(cls, path: str | os.PathLike[str], wanted: Collection[Key] | None = None) -> Baseline:
        """Read what ``colibri bench --format json`` wrote.

        Parameters
        ----------
        wanted : collection of keys, optional
            What a long run is about to find, to be sure beforehand that something will be compared.

        Raises
        ------
        UsageError
            The file is missing or cannot be read.
        InvalidInput
            It is something else, or has nothing that is wanted.
        """
        data = read_input(path, limit=_LARGEST)
        try:
            found = cls(*_parsed(json.loads(data)))
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise InvalidInput(
                expected=f"JSON of {SCHEMA} with cases",
                got=f"none for {error}" if isinstance(error, KeyError) else str(error),
                at=str(path),
                hint="colibri bench --format json --output FILE writes one",
            ) from error
        if wanted is not None and found.times.keys().isdisjoint(wanted):
            raise _nothing_in_common(found.times, wanted)
        return found


def _parsed(document: dict[str, Any]) -> tuple[dict[Key, Times], dict[str, Any]]:
    if document["schema"] != SCHEMA:
        raise ValueError(f"the schema {document['schema']!r}")
    times = {
        (str(case["name"]), str(arm["name"]), int(arm["threads"])): _times(arm)
        for case in document["cases"]
        for arm in case["arms"]
        if arm.get("ours", True) and arm.get("status", "timed") == "timed"
    }
    return times, dict(document["environment"])


def _times(arm: dict[str, Any]) -> Times:
    times = Times(float(arm["p50_ns"]), float(arm["low_ns"]), float(arm["high_ns"]))
    if not (0 <= times.low_ns <= times.high_ns < math.inf and 0 <= times.p50_ns < math.inf):
        raise ValueError(f"the times {times}")
    return times


def compare(before: Baseline, now: Comparable) -> list[Change]:
    """Judge every arm that both runs have.

    Raises
    ------
    InvalidInput
        There is none.
    """
    changes = [
        Change(*key, before.times[key].p50_ns, times.p50_ns, _verdict(before.times[key], times))
        for key, times in now.times().items()
        if key in before.times
    ]
    if not changes:
        raise _nothing_in_common(before.times, now.times())
    return changes


def _nothing_in_common(before: Collection[Key], now: Collection[Key]) -> InvalidInput:
    return InvalidInput(
        expected="an earlier run that has an arm of this one",
        got="; ".join(_unmatched(before, now)),
        at="--compare",
        hint="the same cases or shapes, and --threads, as for the earlier run",
    )


def unmatched(before: Baseline, now: Comparable) -> list[str]:
    """Say which arms only one of the runs has, a line for each run that has any."""
    return _unmatched(before.times, now.times())


def _unmatched(before: Collection[Key], now: Collection[Key]) -> list[str]:
    sides = {"only in the earlier run": set(before) - set(now), "only in this run": set(now) - set(before)}
    return [f"{side}: {', '.join(map(_named, sorted(arms)))}" for side, arms in sides.items() if arms]


def _named(key: Key) -> str:
    case, arm, threads = key
    return f"{case} {arm} with {threads} thread{'s' * (threads != 1)}"


def _verdict(before: Times, now: Times) -> str:
    if now.low_ns > before.high_ns * (1 + _DRIFT):
        return "slower"
    return "faster" if now.high_ns * (1 + _DRIFT) < before.low_ns else "same"


def differences(before: Baseline, now: Comparable) -> list[str]:
    """Say what about the two machines makes their times no fair comparison."""
    return [
        f"{key} was {before.environment.get(key)!r} and is {now.environment[key]!r}"
        for key in _MACHINE
        if before.environment.get(key) != now.environment[key]
    ]
