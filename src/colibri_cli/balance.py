"""Level 2 of the routing: the load balancer's rule and its memory, owned by the caller."""

from __future__ import annotations

import threading
from typing import TypedDict

import numpy as np
import numpy.typing as npt

from colibri_cli import _core, forks
from colibri_cli.checks import check_choice, check_float, check_integer, shown
from colibri_cli.errors import InvalidInput

PREFERENCES = ("score", "emptiest")


class BalancerState(TypedDict):
    """What a balancer remembers; plain arrays and integers, so that any format can hold it."""

    window: int
    position: int
    ring: npt.NDArray[np.int32]


class Balancer:
    """Keeps any expert from running hot over a window of recent tokens.

    Every expert has a ring over the last ``window`` tokens. A token pushes its routing weight (renormalised over
    the chosen, as the integer ``round(weight * 2**24)``) into the ring of each expert it chose and 0 into the
    others. A candidate whose ring sum is above ``threshold`` times the mean is passed over; when fewer than
    ``top_k`` are left, the next best experts that are not overloaded fill up, then the least loaded.

    Pass it to :meth:`Router.route` or a :class:`MoELayer`; tokens are taken in order and the state moves on. Calls
    that share a balancer take turns. A refused batch leaves the state as it was.

    Parameters
    ----------
    n_experts : int
        1 to 1,024.
    window : int
        Tokens remembered, 1 to 65,536.
    threshold : float
        Overloaded means a ring sum above this times the mean; at least 1.
    candidates : int, optional
        Experts considered for a token, best first; default ``top_k + 2``. At least ``top_k``.
    prefer : {"score", "emptiest"}
        Which of the candidates left are taken: the best by gate score, or those with the smallest ring sum.

    Raises
    ------
    InvalidInput
        A parameter is out of range.
    """

    def __init__(
        self,
        n_experts: int,
        *,
        window: int = 64,
        threshold: float = 1.8,
        candidates: int | None = None,
        prefer: str = "score",
    ) -> None:
        check_integer("n_experts", n_experts, 1, _core.MAX_EXPERTS)
        check_integer("window", window, 1, 1 << 16)
        if candidates is not None:
            check_integer("candidates", candidates, 1, n_experts)
        threshold = check_float("threshold", threshold, least=1)
        check_choice("prefer", prefer, PREFERENCES)
        self.n_experts = n_experts
        self.window = window
        self.threshold = threshold
        self.candidates = candidates
        self.prefer = prefer
        self.lock = threading.RLock()  # held by a router while a batch passes
        self.core = _core.Balance(n_experts, window, threshold, prefer == "emptiest")
        forks.watch(self)

    def after_fork(self) -> None:
        """In a forked child: nobody holds the lock."""
        self.lock = threading.RLock()

    @property
    def sums(self) -> npt.NDArray[np.int64]:
        """Each expert's ring sum, int64 ``(n_experts,)``, in units of 2**-24."""
        with self.lock:
            return self.core.sums

    def state(self) -> BalancerState:
        """Copy what the balancer remembers; :meth:`restore` goes on from there exactly."""
        with self.lock:
            ring, position = self.core.save()
        return BalancerState(window=self.window, position=position, ring=ring)

    def restore(self, state: BalancerState) -> None:
        """Take over a state of the same ``n_experts`` and ``window``.

        Raises
        ------
        InvalidInput
            The state has another shape, or an entry is not a routing weight; the present state stays.
        """
        try:
            ring, position = np.asarray(state["ring"]), state["position"]
        except (TypeError, IndexError, KeyError, ValueError) as error:
            raise InvalidInput(expected="what state() gave", got=shown(state), at="state") from error
        if ring.shape != (self.window, self.n_experts) or ring.dtype != np.int32:
            raise InvalidInput(
                expected=f"int32 ({self.window}, {self.n_experts})",
                got=f"{ring.dtype} {ring.shape}",
                at="state['ring']",
            )
        if ring.size and not (ring.min() >= 0 and ring.max() <= 1 << 24):
            raise InvalidInput(expected="entries in 0..2^24", got="others", at="state['ring']")
        check_integer("state['position']", position, 0, self.window - 1)
        with self.lock:
            self.core.load(np.ascontiguousarray(ring), position)

    def reset(self) -> None:
        """Forget every token."""
        with self.lock:
            self.core.load(np.zeros((self.window, self.n_experts), np.int32), 0)
