"""PyTorch's own threads, for Colibri to work on.

After a parallel region OpenMP's threads look for the next one for milliseconds, at full speed. Threads of another pool
would have to share the cores with them; a parallel region of the same OpenMP has them at once.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch

from colibri_cli import forks


class Team:
    """Where the function is that runs another on PyTorch's threads."""

    def __init__(self) -> None:
        self._forked = False
        forks.watch(self)

    def after_fork(self) -> None:
        """In a forked child: OpenMP's threads are gone, and it does not know."""
        self._forked = True

    def address(self, threads: int) -> int:
        """Give it for calls of so many threads; 0 where they are better off with Colibri's own.

        OpenMP lets threads go, or starts more, for a region of another size than the last; so it is used where PyTorch
        itself uses as many.
        """
        return 0 if self._forked or threads == 1 or threads != torch.get_num_threads() else _parallel()


@cache
def _parallel() -> int:
    """Find libgomp's GOMP_parallel, which LLVM's and Intel's OpenMP have too, as PyTorch itself links it."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value or 0
    except (OSError, AttributeError):  # another platform's name, or a PyTorch without OpenMP
        return 0
