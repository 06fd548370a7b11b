"""Locks that a forked child finds open: the thread that held one in the parent is not there to let go of it."""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Lock:
    """A lock; the thread that holds it may take it again (a signal handler runs on the thread that it interrupts).

    Parameters
    ----------
    after_fork : callable, optional
        Called in a forked child, to mend what the lock guards. Held weakly where it is a method.
    """

    def __init__(self, after_fork: Callable[[], None] | None = None) -> None:
        self._lock = threading.RLock()
        self._after_fork = None if after_fork is None else weakref.WeakMethod(after_fork)
        _every.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def reopen(self) -> None:
        """Open the lock, whoever holds it; for a forked child alone."""
        self._lock = threading.RLock()
        mend = None if self._after_fork is None else self._after_fork()
        if mend is not None:
            mend()


_every: weakref.WeakSet[Lock] = weakref.WeakSet()


def _reopen_every() -> None:
    for lock in list(_every):
        lock.reopen()


os.register_at_fork(after_in_child=_reopen_every)
