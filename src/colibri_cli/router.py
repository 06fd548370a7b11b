"""Level 1 of the routing: hidden states to each token's experts and their weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from colibri_cli import _core
from colibri_cli.arrays import as_array
from colibri_cli.balance import Balancer
from colibri_cli.checks import check_choice, check_float32, check_integer, check_kind
from colibri_cli.errors import InvalidInput
from colibri_cli.topology import check_threads


@dataclass(frozen=True, slots=True)
class Routing:
    """Where a batch of T tokens goes.

    Attributes
    ----------
    expert_ids : ndarray of int32, (T, K)
        Each token's experts by falling score; ties go to the lower id.
    expert_weights : ndarray of float32, (T, K)
    load : ndarray of int64, (E,)
        Tokens per expert.
    """

    expert_ids: npt.NDArray[np.int32]
    expert_weights: npt.NDArray[np.float32]
    load: npt.NDArray[np.int64]


class GumbelNoise:
    """Noise for exploring: adds ``temperature * Gumbel(0, 1)`` to each logit before experts are chosen and weighed.

    With temperature 1, the chosen experts are a sample without replacement in proportion to the gate's softmax.
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
        gating: str = "exact",
        threads: int | None = None,
    ) -> Router:
        """Make a router of trained weights, which are copied.

        Parameters
        ----------
        weight : array of float32, (E, H)
            As PyTorch's ``nn.Linear`` stores it; 1 to 1,024 experts.
        bias : array of float32, (E,), optional
        kind : {"softmax-topk", "topk-softmax"}
            Softmax over all experts and then the best ``top_k``, or softmax over the logits of the best alone.
            Renormalised, the first equals the second and is computed as it.
        top_k : int
            1 to E.
        renormalize : bool
            Divide the weights of "softmax-topk" by their sum over the chosen.
        gating : {"exact", "taylor"}
            The exponential: full precision, or a second-order polynomial (probabilities within 0.003).
        threads : int, optional
            Default: what the CPU affinity and the cgroup's quota allow.

        Raises
        ------
        InvalidInput
            A shape, dtype or value is not as above, or a weight is not finite.
        """
        w = _float32("weight", weight, 2)
        n_experts, hidden_size = w.shape
        b = None if bias is None else _float32("bias", bias, 1)
        if not 1 <= n_experts <= _core.MAX_EXPERTS or hidden_size < 1:
            raise InvalidInput(
                expected=f"(1 to {_core.MAX_EXPERTS} experts, 1 or more inputs)",
                got=str(w.shape),
                at="weight.shape",
            )
        if b is not None and b.shape != (n_experts,):
            raise InvalidInput(expected=f"({n_experts},)", got=str(b.shape), at="bias.shape")
        return cls._make(w, b, n_experts, hidden_size, kind, top_k, gating, renormalize, threads)

    @classmethod
    def builtin(
        cls, n_experts: int, *, kind: str, top_k: int, gating: str = "exact", threads: int | None = None
    ) -> Router:
        """Use the built-in bundle's gate, which lies in the compiled core's read-only data."""
        hidden_size, width = _core.builtin_router_table().shape
        if not 1 <= n_experts <= width:
            raise InvalidInput(expected=f"1 to {width} experts", got=str(n_experts), at="n_experts")
        return cls._make(None, None, n_experts, hidden_size, kind, top_k, gating, True, threads)

    @classmethod
    def _make(
        cls,
        weight: npt.NDArray[np.float32] | None,
        bias: npt.NDArray[np.float32] | None,
        n_experts: int,
        hidden_size: int,
        kind: str,
        top_k: int,
        gating: str,
        renormalize: bool,
        threads: int | None,
    ) -> Router:
        check_choice("kind", kind, _core.GATE_KINDS)
        check_choice("gating", gating, _core.GATINGS)
        top_k = check_integer("top_k", top_k, 1, n_experts)
        core = _core.Gate(
            weight,
            bias,
            n_experts,
            hidden_size,
            top_k,
            _core.GATE_KINDS[kind],
            _core.GATINGS[gating],
            renormalize,
            check_threads(threads),
        )
        return cls(core, n_experts, top_k)

    def route(
        self, hidden: npt.ArrayLike, balancer: Balancer | None = None, *, noise: GumbelNoise | None = None
    ) -> Routing:
        """Choose each token's experts.

        Parameters
        ----------
        hidden : array of float32, (T, H)
            Any strides; a buffer or a CPU DLPack tensor.
        balancer : Balancer, optional
            Its state moves on by these tokens.
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


def _float32(name: str, array: npt.ArrayLike, ndim: int) -> npt.NDArray[np.float32]:
    a = as_array(name, array)
    if a.dtype != np.float32 or a.ndim != ndim:
        raise InvalidInput(
            expected=f"float32 with {ndim} dimension{'s' * (ndim > 1)}", got=f"{a.dtype} {a.shape}", at=name
        )
    if not np.isfinite(a).all():
        where = np.argwhere(~np.isfinite(a))[0].tolist()
        raise InvalidInput(expected="finite weights", got=str(a[tuple(where)]), at=f"{name}{where}")
    return np.ascontiguousarray(a)
