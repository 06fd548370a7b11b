"""The expert of an MoE layer that every token goes through."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from colibri_cli.arrays import as_array, finite_float32
from colibri_cli.checks import check_kind
from colibri_cli.errors import InvalidInput
from colibri_cli.experts import Experts
from colibri_cli.router import Router

if TYPE_CHECKING:
    import numpy.typing as npt


class SharedExpert:
    """An expert that every token goes through, for :class:`MoELayer`.

    Parameters
    ----------
    expert : Experts
        Of one expert. Several shared experts are published, and run, as one of their joint intermediate size.
    gate : array of float32, (H,) or (1, H), optional
        Multiplies the output by ``sigmoid(gate @ x)``; default: by 1.

    Raises
    ------
    InvalidInput
        There is more than one expert, or the gate is not as above or not finite.
    """

    def __init__(self, expert: Experts, gate: npt.ArrayLike | None = None) -> None:
        check_kind("expert", expert, Experts)
        if len(expert) != 1:
            raise InvalidInput(expected="one expert", got=str(len(expert)), at="expert")
        self.expert = expert
        self.gate: Router | None = None
        if gate is not None:
            hidden = expert.shape.hidden_size
            weight = as_array("gate", gate)
            if weight.shape not in {(hidden,), (1, hidden)}:
                raise InvalidInput(expected=f"({hidden},) or (1, {hidden})", got=str(weight.shape), at="gate.shape")
            row = finite_float32("gate", weight, weight.ndim).reshape(1, hidden)
            self.gate = Router.from_array(row, kind="sigmoid-topk", top_k=1, renormalize=False, threads=expert.threads)

    def __repr__(self) -> str:
        return f"<SharedExpert: {'gated ' if self.gate else ''}{self.expert.shape}>"

    def run(self, hidden: npt.ArrayLike, n_tokens: int) -> npt.NDArray[np.float32]:
        """Run the expert on float32 ``(T, H)``, T being ``n_tokens``; see :meth:`Experts.run`.

        Raises
        ------
        InvalidInput
            ``hidden`` is not float32 of the expert's hidden size, or a logit of the gate is NaN or infinite.
        """
        if self.gate is None:
            return self.expert.run(hidden, np.zeros((n_tokens, 1), np.int32), np.ones((n_tokens, 1), np.float32))
        routing = self.gate.route(hidden)
        return self.expert.run(hidden, routing.expert_ids, routing.expert_weights)
