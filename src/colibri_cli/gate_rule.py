"""A gate's options: which go together, and how the core takes them."""

from __future__ import annotations

import math
from typing import NamedTuple

from colibri_cli import _core
from colibri_cli.checks import check_choice, check_float, check_float32, check_integer, shown
from colibri_cli.errors import InvalidInput

EPSILON = 1e-20  # what most models add to the sum that renormalises
GROUP_SCORES = ("top2", "max")
_SOFTMAXES = ("softmax-topk", "topk-softmax")
_BY_LOGITS = ("topk-softmax", "topk-sigmoid")
_NO_EPSILON = 1e-11  # up to here it is lost beside the share that the best of 1,024 have of a softmax


class GateRule(NamedTuple):
    """The last arguments of the core's Gate."""

    top_k: int
    kind: int
    gating: int
    renormalize: bool
    scale: float
    by_score: bool
    epsilon: float
    n_groups: int
    topk_groups: int
    group_sums: bool
    masked_score: float


def gate_rule(
    n_experts: int,
    *,
    kind: str,
    top_k: int,
    gating: str,
    renormalize: bool = True,
    scale: float = 1.0,
    corrected: bool = False,
    n_groups: int = 1,
    topk_groups: int = 1,
    group_score: str = "top2",
    masked_score: float = -math.inf,
    epsilon: float = EPSILON,
) -> GateRule:
    """Check the options of :meth:`Router.from_array`; ``corrected`` says whether it has a correction bias.

    Raises
    ------
    InvalidInput
        An option is out of range, or does not go with another.
    """
    check_choice("kind", kind, _core.GATE_KINDS)
    check_choice("gating", gating, _core.GATINGS)
    check_choice("group_score", group_score, GROUP_SCORES)
    top_k = check_integer("top_k", top_k, 1, n_experts)
    scale = check_float32("scale", scale, above=0)
    epsilon = check_float32("epsilon", check_float("epsilon", epsilon, least=0))
    n_groups = check_integer("n_groups", n_groups, 1, n_experts)
    topk_groups = check_integer("topk_groups", topk_groups, 1, n_groups)
    if not isinstance(masked_score, float | int) or masked_score not in {0.0, -math.inf}:
        raise InvalidInput(expected="0.0 or -inf", got=shown(masked_score), at="masked_score")
    if gating != "exact" and kind not in _SOFTMAXES:
        raise InvalidInput(expected=f"exact with kind {kind}", got=gating, at="gating")
    if kind == "topk-softmax" and corrected:
        raise InvalidInput(expected=f"None with kind {kind}", got="an array", at="correction_bias")
    if kind == "topk-softmax" and epsilon > _NO_EPSILON:
        raise InvalidInput(expected=f"at most {_NO_EPSILON:g} with kind {kind}", got=f"{epsilon:g}", at="epsilon")
    masks = topk_groups < n_groups
    _check_groups(n_experts, n_groups, topk_groups, kind=kind, top_k=top_k, least=2 if group_score == "top2" else 1)
    by_score = kind not in _SOFTMAXES or corrected or masks
    return GateRule(
        top_k,
        _core.GATE_KINDS[kind],
        _core.GATINGS[gating],
        bool(renormalize),
        scale,
        by_score or (renormalize and epsilon > _NO_EPSILON),
        epsilon,
        n_groups,
        topk_groups,
        group_score == "top2",
        float(masked_score),
    )


def _check_groups(n_experts: int, n_groups: int, topk_groups: int, *, kind: str, top_k: int, least: int) -> None:
    if n_groups == 1:
        return
    if kind in _BY_LOGITS:
        raise InvalidInput(expected=f"1 with kind {kind}", got=str(n_groups), at="n_groups")
    if n_experts % n_groups:
        raise InvalidInput(expected=f"a divisor of {n_experts} experts", got=str(n_groups), at="n_groups")
    size = n_experts // n_groups
    if topk_groups < n_groups and size < least:
        raise InvalidInput(expected=f"groups of at least {least} experts", got=str(size), at="n_groups")
    if top_k > topk_groups * size:
        raise InvalidInput(
            expected=f"at most the {topk_groups * size} experts of {topk_groups} groups", got=str(top_k), at="top_k"
        )
