"""What a family of models is: everything in which its MoE layers differ from another's, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from colibri_cli.checkpoints import layers
from colibri_cli.checkpoints.settings import Key

if TYPE_CHECKING:
    from colibri_cli.checkpoints.ffn import Layout
    from colibri_cli.checkpoints.gates import ByWord, Gate
    from colibri_cli.checkpoints.layers import LayerRule

    Only = tuple[tuple[str, tuple[object, ...]], ...]

ACTIVATIONS = {
    **{name: name for name in ("silu", "gelu", "relu", "relu2")},
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""What config.json calls an activation -> what :meth:`Experts.from_arrays` does."""

SIZE = Key("intermediate_size")
MOE_SIZE = Key("moe_intermediate_size")
_ACTIVATION = Key("hidden_act", "silu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """A family's shared expert: plain, or times ``sigmoid(gate @ x)``.

    Attributes
    ----------
    layout : Layout
    size : Key
        Its intermediate size; 0: there is none.
    count : Key, optional
        How many of that size are stored as one; 0: none.
    gate : str, optional
        The gate's name, ``[1, H]``.
    only : tuple
        As `Family`, where there is one.
    """

    layout: Layout
    size: Key
    count: Key | None = None
    gate: str | None = None
    only: Only = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One ``model_type``; names of tensors are below ``<prefix>layers.<l>.``.

    Attributes
    ----------
    gate : Gate or ByWord
    layouts : tuple of Layout
        Of the experts; the first whose tensors are there counts.
    router : str
        The gate's weights, ``[E, H]``.
    size : Key
        The experts' intermediate size.
    layers : LayerRule
    shared : Shared, optional
    activation : Key
        One of `ACTIVATIONS`.
    gated : bool
    alpha, beta, limit : float or Key
        As `Experts.from_arrays`; limit None: no clamp.
    modules : tuple of str
        Where every tensor must be one that is read: another would change the answer.
    only : tuple of (str, tuple)
        Settings that must have one of these values, None being none at all, since others change the formula.
    """

    gate: Gate | ByWord
    layouts: tuple[Layout, ...]
    router: str = "mlp.gate.weight"
    size: Key = MOE_SIZE
    layers: LayerRule = layers.every
    shared: Shared | None = None
    activation: Key = _ACTIVATION
    gated: bool = True
    alpha: float | Key = 1.0
    beta: float = 0.0
    limit: Key | None = None
    modules: tuple[str, ...] = ("mlp.",)
    only: Only = ()
