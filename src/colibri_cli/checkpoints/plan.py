"""What a checkpoint holds: the facts that hold for every MoE layer of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from colibri_cli.formats.layers import LayerRouter, LayerShared


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """A model's MoE layers.

    Attributes
    ----------
    family : str
        The ``model_type`` of config.json; that of the text model where there are several.
    activation, gated, alpha, beta, limit
        As :meth:`colibri_cli.Experts.from_arrays` takes them.
    biased : bool
        Whether experts have biases, up and down.
    layers : tuple of int
        The layers that are MoE, ascending.
    """

    family: str
    hidden_size: int
    intermediate_size: int
    n_experts: int
    top_k: int
    activation: str
    gated: bool
    alpha: float
    beta: float
    limit: float | None
    biased: bool
    router: LayerRouter
    shared: LayerShared | None
    layers: tuple[int, ...]
