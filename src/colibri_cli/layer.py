"""One MoE layer: hidden states in, hidden states out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from colibri_cli.checks import check_kind
from colibri_cli.errors import InvalidInput
from colibri_cli.experts import Experts
from colibri_cli.router import Router

if TYPE_CHECKING:
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

    Raises
    ------
    InvalidInput
        The hidden sizes differ.
    """

    def __init__(self, router: Router, experts: Experts) -> None:
        check_kind("router", router, Router)
        check_kind("experts", experts, Experts)
        if router.hidden_size != experts.shape.hidden_size:
            raise InvalidInput(
                expected=f"experts of hidden size {router.hidden_size}",
                got=str(experts.shape.hidden_size),
                at="experts",
            )
        self.router = router
        self.experts = experts

    def __call__(
        self,
        hidden: npt.ArrayLike,
        balancer: Balancer | None = None,
        out: npt.NDArray[np.float32] | None = None,
    ) -> npt.NDArray[np.float32]:
        """Route float32 ``(T, H)`` and run the chosen experts; see :meth:`Router.route` and :meth:`Experts.run`."""
        routing = self.router.route(hidden, balancer)
        return self.experts.run(hidden, routing.expert_ids, routing.expert_weights, out)
