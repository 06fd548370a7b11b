"""Level 1 of the routing: hidden states to each token's experts and their weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from colibri_cli import _core
from colibri_cli.arrays import finite_float32
from colibri_cli.balance import Balancer
from colibri_cli.checks import check_float32, check_integer, check_kind
from colibri_cli.errors import InvalidInput
from colibri_cli.gate_rule import EPSILON, gate_rule
from colibri_cli.topology import check_threads

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from colibri_cli.gate_rule import GateRule


@dataclass(frozen=True, slots=True)
class Routing:
    """Where a batch of T tokens goes.

    Attributes
    ----------
    expert_ids : ndarray of int32, (T, K)
        Each token's experts by falling score, that which they are chosen by; ties go to the lower id.
    expert_weights : ndarray of float32, (T, K)
    load : ndarray of int64, (E,)
        Tokens per expert.
    """

    expert_ids: npt.NDArray[np.int32]
    expert_weights: npt.NDArray[np.float32]
    load: npt.NDArray[np.int64]


class GumbelNoise:
    """Noise for exploring: adds ``temperature * Gumbel(0, 1)`` to each logit before experts are chosen and weighed.

    With temperature 1, the experts that a softmax gate chooses by its logits alone (no correction bias, no groups)
    are a sample without replacement in proportion to the softmax.
    The generator is xorshift128+ seeded through splitmix64, drawn in the order of tokens and experts, so a seed gives
    the same choices on every machine. Not for use by several threads at once.

    Parameters
    ----------
    temperature : float
        Greater than 0.
    seed : int
        0 to 2**64 - 1.
    """

    def __init__(self, temperature: float, seed: int) -> None:
        temperature = check_float32("temperature", temperature, above=0)
        seed = check_integer("seed", seed, 0, (1 << 64) - 1)
        self.core = _core.Noise(temperature, seed)


class Router:
    """A gate's weights and its rule. Made by :meth:`from_array`; never changes, so threads may share it."""

    def __init__(self, core: _core.Gate, n_experts: int, top_k: int) -> None:
        self._core = core
        self.n_experts = n_experts
        self.top_k = top_k

    def __repr__(self) -> str:
        return f"<Router: top {self.top_k} of {self.n_experts} experts, hidden size {self.hidden_size}>"

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""
        return self._core.hidden_size

    @classmethod
    def from_array(
        cls,
        weight: npt.ArrayLike,
        bias: npt.ArrayLike | None = None,
        *,
        kind: str = "softmax-topk",
        top_k: int = 2,
        renormalize: bool = True,
        scale: float = 1.0,
        correction_bias: npt.ArrayLike | None = None,
        n_groups: int = 1,
        topk_groups: int = 1,
        group_score: str = "top2",
        masked_score: float = -math.inf,
        epsilon: float = EPSILON,
        gating: str = "exact",
        threads: int | None = None,
    ) -> Router:
        """Make a router of trained weights, which are copied.

        An expert's score is its softmax or its ``sigmoid(logit)`` or its ``sqrt(softplus(logit))``. The best
        ``top_k`` by score + correction are chosen, ties to the lower id; their weights are ``scale * score``, or
        renormalised ``scale * score / (sum of their scores + epsilon)``. docs/library.md lists published models.

        Parameters
        ----------
        weight : array of float32, (E, H)
            As PyTorch's ``nn.Linear`` stores it; 1 to 1,024 experts.
        bias : array of float32, (E,), optional
            Part of the logits.
        kind : {"softmax-topk", "topk-softmax", "sigmoid-topk", "sqrtsoftplus-topk", "topk-sigmoid"}
            Scores of all experts and then the best ``top_k``; "topk-": the best by logit, and a score of those alone.
            "softmax-topk" renormalised equals "topk-softmax" and is computed as it.
        top_k : int
            1 to E, or to the number of experts in ``topk_groups`` groups.
        renormalize : bool
            Divide the weights by their sum over the chosen; those of "topk-softmax" sum to 1 as they are.
        scale : float
            Multiplies the weights at the end; greater than 0.
        correction_bias : array of float32, (E,), optional
            Added to the scores ("topk-sigmoid": to the logits) to choose by, never to the weights. Not with
            "topk-softmax".
        n_groups, topk_groups : int
            The experts are ``n_groups`` groups of neighbours, and a token's come from its best ``topk_groups``. Not
            with kinds that choose by logits ("topk-").
        group_score : {"top2", "max"}
            A group counts for the sum of its best two scores + corrections, or for its best.
        masked_score : {-inf, 0.0}
            What experts of other groups are chosen by. With 0.0 they come before experts whose score + correction is
            negative.
        epsilon : float
            At least 0. With "topk-softmax" it would change nothing up to 1e-11 and is refused above.
        gating : {"exact", "taylor"}
            The exponential of a softmax: full precision, or a second-order polynomial (probabilities within 0.003).
        threads : int, optional
            Default: what the CPU affinity and the cgroup's quota allow.

        Raises
        ------
        InvalidInput
            A shape, dtype or value is not as above, a weight is not finite, or two options do not go together.
        """
        w = finite_float32("weight", weight, 2)
        n_experts, hidden_size = w.shape
        if not 1 <= n_experts <= _core.MAX_EXPERTS or hidden_size < 1:
            raise InvalidInput(
                expected=f"(1 to {_core.MAX_EXPERTS} experts, 1 or more inputs)",
                got=str(w.shape),
                at="weight.shape",
            )
        b, correction = _bias("bias", bias, n_experts), _bias("correction_bias", correction_bias, n_experts)
        rule = gate_rule(
            n_experts,
            kind=kind,
            top_k=top_k,
            gating=gating,
            renormalize=renormalize,
            scale=scale,
            corrected=correction is not None,
            n_groups=n_groups,
            topk_groups=topk_groups,
            group_score=group_score,
            masked_score=masked_score,
            epsilon=epsilon,
        )
        return cls._make(w, b, correction, n_experts, hidden_size, rule, threads)

    @classmethod
    def builtin(
        cls, n_experts: int, *, kind: str, top_k: int, gating: str = "exact", threads: int | None = None
    ) -> Router:
        """Use the built-in bundle's gate, which lies in the compiled core's read-only data."""
        hidden_size, width = _core.builtin_router_table().shape
        if not 1 <= n_experts <= width:
            raise InvalidInput(expected=f"1 to {width} experts", got=str(n_experts), at="n_experts")
        rule = gate_rule(n_experts, kind=kind, top_k=top_k, gating=gating)
        return cls._make(None, None, None, n_experts, hidden_size, rule, threads)

    @classmethod
    def _make(
        cls,
        weight: npt.NDArray[np.float32] | None,
        bias: npt.NDArray[np.float32] | None,
        correction: npt.NDArray[np.float32] | None,
        n_experts: int,
        hidden_size: int,
        rule: GateRule,
        threads: int | None,
    ) -> Router:
        core = _core.Gate(weight, bias, correction, n_experts, hidden_size, check_threads(threads), *rule)
        return cls(core, n_experts, rule.top_k)

    def route(
        self, hidden: npt.ArrayLike, balancer: Balancer | None = None, *, noise: GumbelNoise | None = None
    ) -> Routing:
        """Choose each token's experts.

        Parameters
        ----------
        hidden : array of float32, (T, H)
            Any strides; a buffer or a CPU DLPack tensor.
        balancer : Balancer, optional
            Its state moves on by these tokens. It works with every kind, ranking experts by what they are chosen
            by; experts that ``masked_score=-inf`` keeps out stay out.
        noise : GumbelNoise, optional
            Its state moves on likewise.

        Raises
        ------
        InvalidInput
            ``hidden`` is not as above, or a logit is NaN or infinite (the first such token is named); nothing has
            been written and no state has moved.
        """
        noise_core = None
        if noise is not None:
            check_kind("noise", noise, GumbelNoise)
            noise_core = noise.core
        if balancer is None:
            return Routing(*self._core.route(hidden, None, 0, noise_core))
        check_kind("balancer", balancer, Balancer)
        if balancer.n_experts != self.n_experts:
            raise InvalidInput(
                expected=f"a balancer of {self.n_experts} experts", got=str(balancer.n_experts), at="balancer"
            )
        candidates = balancer.candidates
        if candidates is None:
            candidates = min(self.top_k + 2, self.n_experts)
        if candidates < self.top_k:
            raise InvalidInput(
                expected=f"at least top_k = {self.top_k} candidates",
                got=str(candidates),
                at="balancer.candidates",
            )
        with balancer.lock:
            return Routing(*self._core.route(hidden, balancer.core, candidates, noise_core))


def _bias(name: str, array: npt.ArrayLike | None, n_experts: int) -> npt.NDArray[np.float32] | None:
    if array is None:
        return None
    b = finite_float32(name, array, 1)
    if b.shape != (n_experts,):
        raise InvalidInput(expected=f"({n_experts},)", got=str(b.shape), at=f"{name}.shape")
    return b
