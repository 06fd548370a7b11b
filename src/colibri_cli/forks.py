"""What a forked child must mend: locks that another thread of the parent held when it forked.

Locks themselves stay the interpreter's own: their ``with`` cannot be split by a signal handler that raises, as one of a
class written in Python can.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forked(Protocol):
    """An object with something to mend."""

    def after_fork(self) -> None:
        """Replace locks, and drop what only other threads could have finished; called in a forked child."""


_every: weakref.WeakSet[Forked] = weakref.WeakSet()


def watch(owner: Forked) -> None:
    """Call ``owner.after_fork()`` in every child that is forked while the object lives."""
    _every.add(owner)


def _mend_every() -> None:
    for owner in list(_every):
        owner.after_fork()


os.register_at_fork(after_in_child=_mend_every)
