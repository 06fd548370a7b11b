"""What this machine can do, and what a call takes of its memory."""

from __future__ import annotations

import ctypes
import resource
import tracemalloc
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from colibri_cli import _core

if TYPE_CHECKING:
    from collections.abc import Callable

    from colibri_cli.topology import Topology

_MIB = 1 << 20
MOST_CALLS = 20  # between two looks at the C heap
_PEAK_TRIES = 5  # the first may meet sleeping threads, any a busy neighbour
_TILE = 64, 64, 16  # rows, columns and outputs of a product that stays in the first cache


def bytes_beyond_caches(machine: Topology) -> int:
    """Bytes to read for a rate that is the memory's: four times the largest cache, if that much is to be had."""
    wanted = 4 * (machine["last_level_cache"] or 64 * _MIB)
    free = min(size for size in (machine["memory_available"], machine["memory_limit"], 1 << 40) if size is not None)
    return max(min(wanted, free // 4, 1 << 30), _MIB)


def read_gb_s(n_bytes: int, threads: int, *, quick: bool) -> float:
    """Bytes that threads read together from memory, in 10^9 a second: the median of the best loop."""
    return _core.read_bandwidth(n_bytes, threads, 3 if quick else 7)


def peak_gflops(threads: int) -> float:
    """Give the most that threads do together, in 10^9 operations a second: the best of several short loops.

    Fused multiply-adds in registers, and for a single thread the linear kernel on data in the first cache, too.
    """
    tile = [_tile_gflops()] if threads == 1 else []
    return max(tile + [_core.peak_gflops(threads) for _ in range(_PEAK_TRIES)])


def _tile_gflops() -> float:
    n_rows, n_columns, n_outputs = _TILE
    head = _core.Head(np.ones((n_outputs, n_columns), np.float32), np.zeros(n_outputs, np.float32), 1)
    rows = np.ones((n_rows, n_columns), np.float32)
    ns = min(_core.metered(lambda: head.run(rows))[1] for _ in range(100))
    return 2 * n_rows * n_columns * n_outputs / max(ns, 1)


def peak_memory() -> int:
    """Bytes of memory that this process has held at most, all that it imported included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def allocated_bytes(call: Callable[[], object]) -> int:
    """Bytes that Python and NumPy hold at most during one warmed call, its result included.

    What C code takes from the C heap by itself is not among them; see `heap_growth`.
    """
    result = call()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        result = call()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    del result
    return peak - before


def heap_growth(call: Callable[[], object], n_calls: int = MOST_CALLS) -> int | None:
    """Bytes that the C heap has in use after ``n_calls`` warmed calls and had not before them.

    The median of three looks: a leak shows in each, a lump that the allocator moved in one. It sees what is kept, not
    what is taken and given back within a call. None: this C library does not tell.
    """
    if _heap_in_use() is None:
        return None
    looks = []
    for _ in range(4):
        for _ in range(n_calls):
            call()
        looks.append(_heap_in_use() or 0)
    return sorted(after - before for before, after in pairwise(looks))[1]


class _Mallinfo2(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    )


@cache  # each CDLL makes a class of its own, which would be found as growth
def _mallinfo2() -> Callable[[], _Mallinfo2] | None:
    # A sanitizer brings an allocator of its own.
    function = None if _core.sanitized() else getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is not None:
        function.restype = _Mallinfo2
    return function


def _heap_in_use() -> int | None:
    function = _mallinfo2()
    if function is None:
        return None
    heap = function()
    return int(heap.uordblks + heap.hblkhd)
