"""Layers of a checkpoint as the library runs them."""

import numpy as np

from colibri_cli import Experts, MoELayer, Router, SharedExpert


def router_of(layer, plan):
    """Make the router that the plan and the layer describe."""
    gate = plan.router
    bias, correction = layer.router_bias(), layer.correction_bias()
    assert (bias is not None) == gate.bias
    assert (correction is not None) == gate.correction_bias
    return Router.from_array(
        layer.router_weight(),
        bias,
        kind=gate.kind,
        top_k=plan.top_k,
        renormalize=gate.renormalize,
        scale=gate.scale,
        correction_bias=correction,
        n_groups=gate.n_groups,
        topk_groups=gate.topk_groups,
        group_score=gate.group_score,
        masked_score=gate.masked_score,
        epsilon=gate.epsilon,
    )


def experts_of(weights, plan):
    """Make experts of a list of `ExpertWeights`."""
    biased = weights[0].up_bias is not None
    return Experts.from_arrays(
        np.stack([each.up for each in weights]),
        np.stack([each.down for each in weights]),
        gate_up_bias=np.stack([each.up_bias for each in weights]) if biased else None,
        down_bias=np.stack([each.down_bias for each in weights]) if biased else None,
        activation=plan.activation,
        gated=plan.gated,
        alpha=plan.alpha,
        beta=plan.beta,
        limit=plan.limit,
    )


def layer_of(model, number):
    """Make the MoE layer of that number."""
    plan, layer = model.plan, model.layer(number)
    weights = [layer.expert(e) for e in range(plan.n_experts)]
    assert plan.biased == (weights[0].up_bias is not None)
    assert weights[0].up.shape == ((2 if plan.gated else 1) * plan.intermediate_size, plan.hidden_size)
    shared, gate = layer.shared(), layer.shared_gate()
    assert (shared is not None) == (plan.shared is not None)
    assert (gate is not None) == (plan.shared is not None and plan.shared.gated)
    if shared is not None:
        assert shared.down.shape == (plan.hidden_size, plan.shared.intermediate_size)
        shared = SharedExpert(experts_of([shared], plan), gate)
    return MoELayer(router_of(layer, plan), experts_of(weights, plan), shared=shared)
