"""A family's gate: which of its options are fixed, and which config.json gives."""

from __future__ import annotations

import math
from dataclasses import dataclass

from colibri_cli.checkpoints.settings import Key, Settings
from colibri_cli.errors import InvalidInput
from colibri_cli.formats.layers import LayerRouter
from colibri_cli.gate_rule import EPSILON, gate_rule

N_EXPERTS = Key(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"))
TOP_K = Key(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"))
_MOST = 1 << 20  # of anything that is counted; what is too many for a gate, `gate_rule` says


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """Options of :meth:`colibri_cli.Router.from_array`, each fixed or a `Key` of config.json.

    Attributes
    ----------
    bias, correction : str, optional
        Names of tensors below the layer.
    corrected : bool or Key
        Whether there is a correction bias.
    scoring : tuple of str
        What ``scoring_func`` may say where it is there; empty: anything.
    """

    kind: str
    renormalize: bool | Key = True
    scale: float | Key = 1.0
    bias: str | None = None
    correction: str | None = None
    corrected: bool | Key = True
    n_groups: int | Key = 1
    topk_groups: int | Key = 1
    group_score: str = "top2"
    masked_score: float = -math.inf
    epsilon: float = EPSILON
    scoring: tuple[str, ...] = ()

    def plan(self, settings: Settings, n_experts: int, top_k: int) -> LayerRouter:
        """Fill in the config's values.

        Raises
        ------
        InvalidInput
            One is missing or out of range, two do not go together, or the formula is another.
        """
        if self.scoring:
            _check_word(settings, Key("scoring_func", self.scoring[0]), self.scoring)
        corrected = self.correction is not None and _boolean(settings, self.corrected)
        plan = LayerRouter(
            kind=self.kind,
            renormalize=_boolean(settings, self.renormalize),
            scale=settings.number(self.scale) if isinstance(self.scale, Key) else self.scale,
            bias=self.bias is not None,
            correction_bias=corrected,
            n_groups=_integer(settings, self.n_groups),
            topk_groups=_integer(settings, self.topk_groups),
            group_score=self.group_score,
            masked_score=self.masked_score,
            epsilon=self.epsilon,
        )
        try:
            gate_rule(
                n_experts,
                kind=plan.kind,
                top_k=top_k,
                gating="exact",
                renormalize=plan.renormalize,
                scale=plan.scale,
                corrected=corrected,
                n_groups=plan.n_groups,
                topk_groups=plan.topk_groups,
                group_score=plan.group_score,
                masked_score=plan.masked_score,
                epsilon=plan.epsilon,
            )
        except InvalidInput as error:  # it names the option, not the file
            raise InvalidInput(
                expected=error.expected, got=error.got, at=f"{settings.at} ({error.at})", hint=error.hint
            ) from error
        return plan


@dataclass(frozen=True, slots=True)
class ByWord:
    """One of several gates, chosen by a word of config.json."""

    key: Key
    gates: dict[str, Gate]

    def choose(self, settings: Settings) -> Gate:
        """Return the gate that the config names.

        Raises
        ------
        InvalidInput
            It names another.
        """
        return self.gates[_check_word(settings, self.key, tuple(self.gates))]


def _check_word(settings: Settings, key: Key, words: tuple[str, ...]) -> str:
    word = settings.word(key)
    if word not in words:
        raise InvalidInput(expected=" or ".join(words), got=word, at=settings.where(key.all_names[0]))
    return word


def _boolean(settings: Settings, value: bool | Key) -> bool:
    return settings.boolean(value) if isinstance(value, Key) else value


def _integer(settings: Settings, value: int | Key) -> int:
    return settings.integer(value, 1, _MOST) if isinstance(value, Key) else value


SOFTMAX = Gate(kind="softmax-topk")
RENORMALIZED_BY_CONFIG = Gate(kind="softmax-topk", renormalize=Key("norm_topk_prob", False))
TOPK_SOFTMAX = Gate(kind="topk-softmax")
DEEPSEEK_V2 = Gate(
    kind="softmax-topk", renormalize=False, scale=Key("routed_scaling_factor", 1.0), scoring=("softmax",)
)
DEEPSEEK_V2_GROUPS = Gate(
    kind="softmax-topk",
    renormalize=False,
    scale=Key("routed_scaling_factor", 1.0),
    n_groups=Key("n_group"),
    topk_groups=Key("topk_group"),
    group_score="max",
    scoring=("softmax",),
)


def deepseek_v3(
    *,
    renormalize: bool = True,
    scale: float = 1.0,
    n_groups: int = 1,
    topk_groups: int = 1,
    correction: str = "mlp.gate.e_score_correction_bias",
    masked_score: float = -math.inf,
) -> Gate:
    """Give the gate of DeepSeek-V3 and its kin; the numbers are what transformers takes where config.json is silent."""
    return Gate(
        kind="sigmoid-topk",
        renormalize=Key(("norm_topk_prob", "moe_renormalize"), renormalize),
        scale=Key("routed_scaling_factor", scale, null=1.0),
        correction=correction,
        n_groups=Key(("n_group", "num_expert_group"), n_groups, null=1),
        topk_groups=Key("topk_group", topk_groups, null=1),
        masked_score=masked_score,
        scoring=("sigmoid", "noaux_tc"),  # the second is the name of the whole rule
    )
