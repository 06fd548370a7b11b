"""One cell: every arm's answer is checked, then the arms take turns."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from itertools import pairwise
from math import isfinite
from typing import TYPE_CHECKING, Any

import numpy as np

from colibri_cli.bench.against.limits import Limit
from colibri_cli.bench.against.results import ArmResult, Cell
from colibri_cli.bench.against.workers import WorkerLost
from colibri_cli.bench.clock import Times, percentile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from colibri_cli.bench.against.answers import Answers, Error
    from colibri_cli.bench.against.request import Entrant
    from colibri_cli.bench.against.workers import Worker
    from colibri_cli.bench.shapes import Shape

_FEWEST_ROUNDS = 3
_MOST_SAMPLES = 2_000  # of an arm in one round
_QUICKEST = 1e-9  # seconds of a call, which the clock's own cost may eat
_PATIENCE = 60.0  # seconds for an answer, and more for large work:
_SLOWEST = 5e7  # operations a second, which no arm is slower than


@dataclass(frozen=True, slots=True)
class Plan:
    """How long to measure.

    Attributes
    ----------
    rounds : int
        Turns of an arm.
    seconds : float
        For each arm of a cell; one too slow for that has twice as long, in fewer turns, but in 3 at least.
    """

    rounds: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Work:
    """What the arms of a cell do; see `Cell`."""

    shape: Shape
    dtype: str
    n_tokens: int
    threads: int
    active_experts: int

    @property
    def flops(self) -> int:
        """Operations of a call."""
        return self.shape.flops(self.n_tokens)

    @property
    def patience(self) -> float:
        """Seconds after which an arm hangs."""
        return _PATIENCE + self.flops / _SLOWEST

    def __str__(self) -> str:
        plurals = "s" * (self.n_tokens != 1), "s" * (self.threads != 1)
        return f"{self.n_tokens} token{plurals[0]} and {self.threads} thread{plurals[1]}"


@dataclass(slots=True)
class Racer:
    """An arm with its process, for as long as it has one.

    Attributes
    ----------
    entrant : Entrant
    worker : Worker, optional
    reason : str
        Why there is none.
    unreported : bool
        Whether it was lost since the last result.
    """

    entrant: Entrant
    worker: Worker | None
    reason: str = ""
    unreported: bool = False

    def tell(self, request: str, *arguments: object) -> None:
        """Ask the process, if there is one."""
        if self.worker is not None:
            with self._minding():
                self.worker.send(request, *arguments)

    def hear(self, seconds: float) -> Any:
        """Give its answer; None: there is no process, or none any more."""
        if self.worker is not None:
            with self._minding():
                return self.worker.receive(seconds)
        return None

    def ask(self, seconds: float, request: str, *arguments: object) -> Any:
        """Tell and hear."""
        self.tell(request, *arguments)
        return self.hear(seconds)

    @contextmanager
    def _minding(self) -> Iterator[None]:
        try:
            yield
        except WorkerLost as lost:
            self.worker, self.reason, self.unreported = None, str(lost), True

    def absent(self, work: Work) -> ArmResult:
        """Report the loss once; later cells are not run because of it."""
        if not self.unreported:
            return self.out("not run", self.reason)
        result = self.out("failed", self.reason)
        self.reason, self.unreported = f"it had failed at {work}", False
        return result

    def out(self, status: str, reason: str, error: Error | None = None) -> ArmResult:
        """Say why there are no times."""
        largest, rms = (None, None) if error is None else (e if isfinite(e) else None for e in error)
        entrant = self.entrant
        return ArmResult(entrant.name, entrant.peer.name, entrant.ours, status, reason, largest, rms)


@dataclass(slots=True)
class Turns:
    """An arm that answered right, and the times of its rounds by their numbers."""

    racer: Racer
    error: Error
    n_rounds: int
    n_calls: int
    rounds: dict[int, Times] = field(default_factory=dict)

    def medians(self) -> dict[int, float]:
        """Nanoseconds of a call, by round."""
        return {i: float(np.median(times)) for i, times in self.rounds.items()}

    def takes_part(self, i: int, n_rounds: int) -> bool:
        """Whether it has a turn in a round: its own are spread evenly over all."""
        return i * self.n_rounds % n_rounds < self.n_rounds


def measure(racers: Sequence[Racer], work: Work, answers: Answers, look: Callable[[int], Limit], plan: Plan) -> Cell:
    """Check and time every arm that has a process, which has been told the number of threads.

    ``look`` measures the machine with so many threads.
    """
    entered = [_enter(racer, work, answers, plan) for racer in racers]
    turns = [arm for arm in entered if isinstance(arm, Turns)]
    looks = [look(work.threads)]
    n_rounds = max((arm.n_rounds for arm in turns), default=0)
    for i in range(n_rounds):
        for arm in turns:
            if arm.takes_part(i, n_rounds):
                times = arm.racer.ask(work.patience * arm.n_calls, "sample", arm.n_calls)
                if times is not None:
                    arm.rounds[i] = times
        looks.append(look(work.threads))
    limits = [before.or_better(after) for before, after in pairwise(looks)]
    ours = next((arm for arm in turns if arm.racer.entrant.ours and arm.racer.worker is not None), None)
    arms = [arm if isinstance(arm, ArmResult) else _result(arm, work, limits, ours) for arm in entered]
    best = reduce(Limit.or_better, looks)
    return Cell(work.shape, work.dtype, work.n_tokens, work.threads, work.active_experts, best, arms)


def _enter(racer: Racer, work: Work, answers: Answers, plan: Plan) -> Turns | ArmResult:
    """Check an arm's answer, and plan its turns by what a call takes."""
    answer = racer.ask(work.patience, "answer", work.n_tokens)
    if racer.worker is None:
        return racer.absent(work)
    found, seconds = answer[0], max(answer[1], _QUICKEST)
    error = answers.error(work.n_tokens, found)
    if not error.excusable(work.dtype):
        off = f"off by {error.rms:.2g} (root mean square), {error.largest:.2g} at most"
        return racer.out("wrong", f"its outputs are {off}", error)
    n_rounds = max(_FEWEST_ROUNDS, min(int(2 * plan.seconds / seconds), plan.rounds))
    n_calls = max(1, min(int(plan.seconds / plan.rounds / seconds), _MOST_SAMPLES))
    return Turns(racer, error, n_rounds, n_calls)


def _result(arm: Turns, work: Work, limits: Sequence[Limit], ours: Turns | None) -> ArmResult:
    entrant = arm.racer.entrant
    if arm.racer.worker is None:
        return arm.racer.absent(work)
    times, medians = np.concatenate(list(arm.rounds.values())), arm.medians()
    low, p50, high = np.maximum(np.percentile(list(medians.values()), [25, 50, 75]), _QUICKEST * 1e9)
    n_bytes = entrant.kind.n_bytes(work.active_experts * work.shape.expert_weights)
    return ArmResult(
        name=entrant.name,
        peer=entrant.peer.name,
        ours=entrant.ours,
        status="timed",
        error=arm.error.largest,
        rms_error=arm.error.rms,
        n_rounds=len(medians),
        n_samples=len(times),
        p50_ns=float(p50),
        low_ns=float(low),
        high_ns=float(high),
        p99_ns=percentile(times, 990) if len(times) >= 100 else None,
        gflops=float(work.flops / p50),
        gb_s=float(n_bytes / p50),
        of_peak=_share(work.flops, medians, [limit.peak_gflops for limit in limits]),
        of_read=_share(n_bytes, medians, [limit.read_gb_s for limit in limits]),
        ratio=None if ours is None or arm is ours else _ratio(medians, ours.medians()),
    )


def _share(amount: float, medians: dict[int, float], rates: Sequence[float]) -> float:
    """Rate by the machine's: the median over an arm's rounds, each by the best just before or after it."""
    return float(np.median([amount / max(time, _QUICKEST * 1e9) / rates[i] for i, time in medians.items()]))


def _ratio(rival: dict[int, float], ours: dict[int, float]) -> float:
    """Time by Colibri's: the median over the rounds that both took part in."""
    both = rival.keys() & ours.keys()
    return float(np.median([rival[i] / max(ours[i], _QUICKEST * 1e9) for i in both]))
