"""What a checkpoint holds: the facts that hold for every MoE layer of a model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RouterPlan:
    """The gate's options, in the words of :meth:`colibri_cli.Router.from_array`.

    Attributes
    ----------
    bias, correction_bias : bool
        Whether each layer has one.
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
class SharedPlan:
    """The shared expert: an FFN of the experts' kind, never with biases.

    Attributes
    ----------
    intermediate_size : int
        Several shared experts count as one of their joint size.
    gated : bool
        Whether ``sigmoid(gate @ x)`` multiplies its output.
    """

    intermediate_size: int
    gated: bool


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
    router: RouterPlan
    shared: SharedPlan | None
    layers: tuple[int, ...]
