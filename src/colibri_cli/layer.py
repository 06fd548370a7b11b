"""One MoE layer: hidden states in, hidden states out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from colibri_cli import _core
from colibri_cli.arrays import as_array
from colibri_cli.checks import check_kind
from colibri_cli.errors import InvalidInput
from colibri_cli.experts import Experts
from colibri_cli.open_layer import open_layer
from colibri_cli.router import Router
from colibri_cli.shared_expert import SharedExpert

if TYPE_CHECKING:
    import os

    import numpy as np
    import numpy.typing as npt

    from colibri_cli.balance import Balancer


class MoELayer:
    """A router and its experts.

    Parameters
    ----------
    router : Router
    experts : Experts
        Of the router's hidden size.
    shared : SharedExpert, optional
        Likewise.

    Raises
    ------
    InvalidInput
        The hidden sizes differ.
    """

    def __init__(self, router: Router, experts: Experts, *, shared: SharedExpert | None = None) -> None:
        check_kind("router", router, Router)
        check_kind("experts", experts, Experts)
        _check_hidden_size("experts", experts, router.hidden_size)
        if shared is not None:
            check_kind("shared", shared, SharedExpert)
            _check_hidden_size("shared", shared.expert, router.hidden_size)
        self.router = router
        self.experts = experts
        self.shared = shared

    @classmethod
    def open(
        cls,
        bundle: str | os.PathLike[str],
        layer: int = 0,
        *,
        loading: str = "mmap",
        cache_experts: int = 4,
        threads: int | None = None,
        max_tokens: int = 512,
        intermediate_dtype: str = "float32",
    ) -> Self:
        """Open one layer of a bundle of layers, as ``colibri pack`` writes it.

        Parameters
        ----------
        bundle : path
            A token classifier's bundle has one layer, 0.
        layer : int
            The layer's number in the model.
        loading, cache_experts, threads, max_tokens, intermediate_dtype
            As in :meth:`Experts.open`; the shared expert is loaded likewise, and on demand it stays.

        Raises
        ------
        UsageError
            A file is missing or cannot be read.
        InvalidInput
            The config is not valid, the bundle does not have that layer, or a file does not fit the config. The sizes
            of all files of the layer are checked before anything is mapped.
        """
        parts = open_layer(bundle, layer, loading, cache_experts, threads, max_tokens, intermediate_dtype)
        return cls(parts.router, parts.experts, shared=parts.shared)

    def __repr__(self) -> str:
        return f"<MoELayer: {self.router!r}, {self.experts!r}{', shared' if self.shared else ''}>"

    def __call__(
        self,
        hidden: npt.ArrayLike,
        balancer: Balancer | None = None,
        out: npt.NDArray[np.float32] | None = None,
    ) -> npt.NDArray[np.float32]:
        """Route float32 ``(T, H)`` and run the chosen experts; see :meth:`Router.route` and :meth:`Experts.run`.

        The shared expert's output, times its gate, is added last: one addition to the sum over the chosen.
        """
        routing = self.router.route(hidden, balancer)
        if self.shared is None:
            return self.experts.run(hidden, routing.expert_ids, routing.expert_weights, out)
        shared = self.shared.run(hidden, len(routing.expert_ids))
        y = self.experts.run(hidden, routing.expert_ids, routing.expert_weights, out)
        view = as_array("out", y)  # it may be anything that exports a buffer
        _core.add(view, shared)
        return y


def _check_hidden_size(name: str, experts: Experts, hidden_size: int) -> None:
    if experts.shape.hidden_size != hidden_size:
        raise InvalidInput(
            expected=f"experts of hidden size {hidden_size}", got=str(experts.shape.hidden_size), at=name
        )
