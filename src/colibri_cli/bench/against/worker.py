"""One arm, in a process of its own: ``python -m colibri_cli.bench.against.worker FD``.

It answers the parent's requests until the parent goes. Whatever a peer raises ends the process: the exit code and the
last line on standard error are the report.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from multiprocessing.connection import Connection
from time import perf_counter, process_time, sleep
from typing import TYPE_CHECKING

from colibri_cli.bench.against.work import checked_tokens, map_weights, tokens
from colibri_cli.bench.clock import from_python

if TYPE_CHECKING:
    from pathlib import Path

    from colibri_cli.bench.clock import Times
    from colibri_cli.bench.peers.peer import Batch, Bound, Engine, Floats, Kind, Load
    from colibri_cli.bench.shapes import Shape

_BRIEF = 0.02  # seconds a call, up to which a turn begins with one that is not timed: others had the caches
_AGAIN = 1.0  # seconds a call, up to which a second one tells better how long it takes
_LOOK, _ASLEEP, _PATIENCE = 3e-3, 0.1, 0.5  # seconds, share of them, seconds


class Arm:
    """What the parent asks for, by the name of the request."""

    def __init__(self) -> None:
        self._engine: Engine
        self._shape: Shape
        self._batch: Batch
        self._bound: Bound
        self._call_seconds = 0.0

    def load(self, module: str, kind: Kind, shape: Shape, weights: Path, n_tokens: int, folder: Path) -> dict[str, str]:
        """Take the weights; give the versions of what runs."""
        load: Load = import_module(module).load
        self._shape, self._batch = shape, tokens(shape, n_tokens)
        self._engine = load(kind, shape, map_weights(weights, shape), folder)
        return self._engine.versions()

    def prepare(self, threads: int) -> None:
        """Use so many threads from now on."""
        self._engine.prepare(threads)

    def answer(self, n_tokens: int) -> tuple[Floats, float]:
        """Run the first tokens; give the outputs that are checked and the seconds of a call."""
        self._bound = self._engine.bind(self._batch.first(n_tokens))
        start = perf_counter()
        self._bound.call()
        found = self._bound.answer()[checked_tokens(self._shape, n_tokens)]
        self._call_seconds = perf_counter() - start
        if self._call_seconds < _AGAIN:
            self._call_seconds = float(from_python(self._bound.call)(1)[0]) / 1e9
        _rest()
        return found, self._call_seconds

    def sample(self, n: int) -> Times:
        """Time so many calls, nanoseconds each."""
        if self._call_seconds < _BRIEF:
            self._bound.call()
        times = from_python(self._bound.call)(n)
        _rest()
        return times


def _rest() -> None:
    """Wait until this process's threads have stopped looking for work, so that the next arm has the machine."""
    deadline = perf_counter() + _PATIENCE
    while perf_counter() < deadline:
        before = process_time()
        sleep(_LOOK)
        if process_time() - before < _ASLEEP * _LOOK:
            return


def serve(connection: Connection) -> None:
    """Answer until the other end closes."""
    arm = Arm()
    while True:
        try:
            request, *arguments = connection.recv()
        except EOFError:
            return
        connection.send(getattr(arm, request)(*arguments))


if __name__ == "__main__":
    os.dup2(2, 1)  # a peer that prints must not reach the parent's output
    serve(Connection(int(sys.argv[1])))
