"""What the MoE layers of a model have in common beside their experts, in a checkpoint as in a bundle."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerRouter:
    """How experts are chosen and weighed: the options of ``Router.from_array``.

    Attributes
    ----------
    bias, correction_bias : bool
        Whether each layer has one.
    masked_score : float
        0.0 or -inf.
    """

    kind: str
    renormalize: bool
    scale: float
    bias: bool
    correction_bias: bool
    n_groups: int
    topk_groups: int
    group_score: str
    masked_score: float
    epsilon: float


@dataclass(frozen=True, slots=True)
class LayerShared:
    """The expert that every token goes through: an FFN of the experts' kind, never with biases.

    Attributes
    ----------
    intermediate_size : int
        Several shared experts count as one of their joint size.
    gated : bool
        Whether ``sigmoid(gate @ x)`` multiplies its output.
    """

    intermediate_size: int
    gated: bool
