"""What the machine can do at a moment: peak arithmetic, and the best rate of several loops that read memory."""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from colibri_cli.bench import machine
from colibri_cli.bench.peers import OURS, find
from colibri_cli.bench.peers.colibri import ColibriEngine
from colibri_cli.bench.peers.peer import Batch, Weights
from colibri_cli.topology import describe

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_SIZE = 1024  # hidden and intermediate, of the experts that are streamed
_STREAMED = ("float32", "bfloat16", "int8")  # int4 takes more arithmetic a byte, and is never the fastest
_CALLS = 3  # of a stream, at a look


class Limit(NamedTuple):
    """The best that was seen.

    Attributes
    ----------
    peak_gflops : float
    read_gb_s : float
    """

    peak_gflops: float
    read_gb_s: float

    def or_better(self, other: Limit) -> Limit:
        """Take the better of each."""
        return Limit(max(self.peak_gflops, other.peak_gflops), max(self.read_gb_s, other.read_gb_s))


class Limits:
    """Loops over more memory than the caches hold: plain reads, and the kernels' own stream in several types.

    A kernel's stream is a call for one token that needs every expert. It is among the loops so that no kernel can read
    faster than what is called the machine's rate. A loop's rate is the median of its tries, as an arm's time is that of
    its calls: the best of many tries is what the machine does not keep up.
    """

    def __init__(self, threads: Sequence[int], n_bytes: int | None = None) -> None:
        """Make ready for each number of threads; ``n_bytes`` of memory a loop, default: enough."""
        self._n_bytes = machine.bytes_beyond_caches(describe()) if n_bytes is None else n_bytes
        self._streams: dict[int, list[tuple[Callable[[], object], int]]] = {n: [] for n in threads}
        for kind in find(OURS).kinds:
            if kind.dtype in _STREAMED:
                n_experts = -(-self._n_bytes // kind.n_bytes(3 * _SIZE * _SIZE))
                engine, batch = ColibriEngine(kind, _repeated(n_experts)), _one_token(n_experts)
                for n in threads:
                    engine.prepare(n)
                    self._streams[n].append((engine.bind(batch).call, kind.n_bytes(n_experts * 3 * _SIZE * _SIZE)))

    @staticmethod
    def memory(n_bytes: int | None = None) -> int:
        """Bytes that this takes in all."""
        return (1 + len(_STREAMED)) * (machine.bytes_beyond_caches(describe()) if n_bytes is None else n_bytes)

    def look(self, threads: int) -> Limit:
        """Measure now; a tenth of a second or so."""
        rates = [machine.read_gb_s(self._n_bytes, threads, quick=True)]
        for stream, n_bytes in self._streams[threads]:
            stream()
            rates.append(n_bytes / median(_nanoseconds(stream) for _ in range(_CALLS)))
        return Limit(machine.peak_gflops(threads), max(rates))


def _repeated(n_experts: int) -> Weights:
    """Experts whose weights are copies of one's until they are packed."""
    rng = np.random.default_rng(1)
    gate_up, down = (rng.standard_normal(size, np.float32) for size in ((2 * _SIZE, _SIZE), (_SIZE, _SIZE)))
    return Weights(*(np.broadcast_to(part, (n_experts, *part.shape)) for part in (gate_up, down)))


def _one_token(n_experts: int) -> Batch:
    ids = np.arange(n_experts, dtype=np.int32)[np.newaxis]
    weights = np.full((1, n_experts), 1 / n_experts, np.float32)
    return Batch(np.full((1, _SIZE), 0.5, np.float32), ids, weights, weights)


def _nanoseconds(call: Callable[[], object]) -> float:
    start = perf_counter()
    call()
    return (perf_counter() - start) * 1e9
