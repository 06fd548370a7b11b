"""A whole run: shape by shape, weight type by weight type, and then every batch with every number of threads."""

from __future__ import annotations

import logging
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path
from signal import SIG_DFL, SIGHUP, SIGTERM, getsignal, signal
from threading import current_thread, main_thread
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from colibri_cli.bench.against.answers import Answers
from colibri_cli.bench.against.limits import Limits
from colibri_cli.bench.against.measure import Plan, Racer, Work, measure
from colibri_cli.bench.against.results import ArmResult, Cell, Contest
from colibri_cli.bench.against.room import check_room
from colibri_cli.bench.against.work import map_weights, tokens, write_weights
from colibri_cli.bench.against.workers import Worker
from colibri_cli.bench.peers import MODULES
from colibri_cli.bench.runner import environment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from colibri_cli.bench.against.request import Request
    from colibri_cli.bench.shapes import Shape

_log = logging.getLogger(__name__)

_FULL, _QUICK = Plan(rounds=7, seconds=1.0), Plan(rounds=3, seconds=0.1)
_START = 120.0  # seconds to import a peer and take the weights, and
_PACKED = 2e6  # weights a second, which no arm packs slower than


def contest(
    request: Request,
    *,
    quick: bool = False,
    steps: Callable[[int, str], Iterable[int]] = lambda total, _: range(total),
) -> Contest:
    """Measure everything that was asked for.

    Parameters
    ----------
    quick : bool
        A tenth of the time, with a wider spread.
    steps : callable
        From a count and a label to the steps one by one; shows progress.

    Raises
    ------
    UsageError
        It does not fit this machine.
    """
    begun = perf_counter()
    versions: dict[str, str] = {}
    with _cleaning_up(), tempfile.TemporaryDirectory(prefix="colibri-bench-") as name:
        folder = Path(name)
        check_room(request, folder)
        limits = Limits(request.threads)
        n_cells = len(request.shapes) * len(request.dtypes) * len(request.threads) * len(request.tokens)
        cells = _cells(request, folder, limits, _QUICK if quick else _FULL, versions)
        found = [next(cells) for _ in steps(n_cells, "bench")]
    return Contest(
        cells=found,
        against=request.against,
        versions=versions,
        environment=environment(),
        rounds=(_QUICK if quick else _FULL).rounds,
        seconds=perf_counter() - begun,
        quick=quick,
    )


@contextmanager
def _cleaning_up() -> Iterator[None]:
    """Let what asks the program to end do so through the way out: weights of gigabytes are not left behind."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    if current_thread() is not main_thread():
        yield
        return
    fatal = [number for number in (SIGTERM, SIGHUP) if getsignal(number) is SIG_DFL]
    for number in fatal:
        signal(number, end)
    try:
        yield
    finally:
        for number in fatal:
            signal(number, SIG_DFL)


def _cells(request: Request, folder: Path, limits: Limits, plan: Plan, versions: dict[str, str]) -> Iterator[Cell]:
    """Measure a cell at a time; a shape's weights lie in the folder while its cells last."""
    for shape in request.shapes:
        begun = perf_counter()
        write_weights(folder, shape)
        batch = tokens(shape, max(request.tokens))
        answers = Answers(shape, map_weights(folder, shape), batch, request.tokens)
        _log.debug("%s: weights and right answers made in %.0f seconds", shape.name, perf_counter() - begun)
        for dtype in request.dtypes:
            with _racers(request, shape, dtype, folder, versions) as racers:
                for threads in request.threads:
                    for racer in racers:
                        racer.ask(_START + shape.n_weights / _PACKED, "prepare", threads)
                    for n_tokens in request.tokens:
                        active = len(np.unique(batch.ids[:n_tokens]))
                        work = Work(shape, dtype, n_tokens, threads, active)
                        cell = measure(racers, work, answers, limits.look, plan)
                        cell.arms.extend(
                            ArmResult(peer, peer, False, "not run", reason)
                            for peer, reason in request.lacking(dtype).items()
                        )
                        yield cell


@contextmanager
def _racers(
    request: Request, shape: Shape, dtype: str, folder: Path, versions: dict[str, str]
) -> Iterator[list[Racer]]:
    """Start the arms of a weight type, let them take the weights side by side, and end them."""
    racers, begun = [], perf_counter()
    with ExitStack() as stack:
        for entrant in request.entrants(dtype):
            refusal = entrant.kind.refusal(shape)
            if refusal is not None:
                racers.append(Racer(entrant, None, refusal))
                continue
            own = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
            worker = Worker(own)
            stack.callback(worker.close)
            racers.append(Racer(entrant, worker))
            module, n_tokens = MODULES[entrant.peer.name], max(request.tokens)
            racers[-1].tell("load", module, entrant.kind, shape, folder, n_tokens, own)
        for racer in racers:
            versions.update(racer.hear(_START + shape.n_weights / _PACKED) or {})
        _log.debug("%s, %s: weights taken in %.0f seconds", shape.name, dtype, perf_counter() - begun)
        yield racers
