"""The families of models that can be read, a row each, and those that cannot, with the reason.

To add one, give its row here and its config to the test that compares every row with transformers' own MoE block
(tests/unit/test_checkpoints_families.py); docs/checkpoints.md walks through it.
"""

from __future__ import annotations

from dataclasses import replace

from colibri_cli.checkpoints import gates, layers
from colibri_cli.checkpoints.family import MOE_SIZE, SIZE, Family, Shared
from colibri_cli.checkpoints.ffn import Layout
from colibri_cli.checkpoints.gates import ByWord, Gate, deepseek_v3
from colibri_cli.checkpoints.settings import Key


def _projections(module: str) -> Layout:
    return Layout(gate=f"{module}.gate_proj.weight", up=f"{module}.up_proj.weight", down=f"{module}.down_proj.weight")


def _numbered(module: str) -> Layout:
    return Layout(gate=f"{module}.w1.weight", up=f"{module}.w3.weight", down=f"{module}.w2.weight")


def _fused(module: str, transposed: bool | None = False) -> Layout:
    return Layout(up=f"{module}.gate_up_proj", down=f"{module}.down_proj", transposed=transposed)


def _linears(module: str) -> Layout:
    return Layout(up=f"{module}.input_linear.weight", down=f"{module}.output_linear.weight")


EXPERTS = _projections("mlp.experts.{e}")
QWEN = (EXPERTS, _fused("mlp.experts"))  # as published; as transformers holds and, for some, saves them
MIXTRAL = (_numbered("block_sparse_moe.experts.{e}"),)
SPARSE_BLOCK = ("block_sparse_moe.",)


def _sized(module: str, size: Key = MOE_SIZE, n: int | None = None) -> Shared:
    """Give shared experts that are stored as one; ``n``: how many where config.json is silent."""
    count = Key(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), n)
    return Shared(layout=_projections(module), size=size, count=count)


_SHARED_EXPERTS = "mlp.shared_experts"
_QWEN_SHARED = Shared(
    layout=_projections("mlp.shared_expert"),
    size=Key("shared_expert_intermediate_size"),
    gate="mlp.shared_expert_gate.weight",
)

_OLMOE = Family(gate=gates.RENORMALIZED_BY_CONFIG, layouts=QWEN, size=SIZE)
_QWEN2 = Family(gate=gates.RENORMALIZED_BY_CONFIG, layouts=QWEN, layers=layers.by_step(), shared=_QWEN_SHARED)
_RENORMALIZED = replace(gates.RENORMALIZED_BY_CONFIG, renormalize=Key("norm_topk_prob", True))
_MIXTRAL = Family(
    gate=gates.SOFTMAX, layouts=MIXTRAL, router="block_sparse_moe.gate.weight", size=SIZE, modules=SPARSE_BLOCK
)
_GRANITE = Family(
    gate=gates.TOPK_SOFTMAX,
    layouts=(_linears("block_sparse_moe"),),
    router="block_sparse_moe.router.layer.weight",
    size=SIZE,
    modules=("block_sparse_moe.", "shared_mlp."),
)
_GRANITE_SHARED = Shared(layout=_linears("shared_mlp"), size=Key("shared_intermediate_size", 0))
_SCALE = Key("routed_scaling_factor", 1.0)
_FIRST = Key("first_k_dense_replace", 1)


def _deepseek_v3(
    *, dense: int = 1, types: bool = False, n_shared: int | None = 1, layouts: tuple[Layout, ...] = QWEN, **gate: float
) -> Family:
    """Give a family of DeepSeek-V3's kind; the arguments are what transformers takes where config.json is silent."""
    rule = layers.after(Key("first_k_dense_replace", dense))
    return Family(
        gate=deepseek_v3(**gate),  # type: ignore[arg-type]  # the words are that function's
        layouts=layouts,
        layers=layers.by_type(rule) if types else rule,
        shared=_sized(_SHARED_EXPERTS, n=n_shared),
    )


_DEEPSEEK_V3 = _deepseek_v3(dense=3, scale=2.5, n_groups=8, topk_groups=4)
_GLM4 = _deepseek_v3()
_HUNYUAN_V3_GATE = Gate(kind="sigmoid-topk", scale=Key("router_scaling_factor", 2.826), correction="mlp.expert_bias")

_GPT_OSS_EXPERTS = Layout(
    up="mlp.experts.gate_up_proj",
    down="mlp.experts.down_proj",
    up_bias="mlp.experts.gate_up_proj_bias",
    down_bias="mlp.experts.down_proj_bias",
    transposed=True,
    interleaved=True,
)
_GPT_OSS = Family(
    gate=replace(gates.TOPK_SOFTMAX, bias="mlp.router.bias"),
    layouts=(_GPT_OSS_EXPERTS,),
    router="mlp.router.weight",
    size=SIZE,
    alpha=Key("swiglu_alpha", 1.702),
    beta=1.0,
    limit=Key("swiglu_limit", 7.0),
)

FAMILIES: dict[str, Family] = {
    "afmoe": Family(
        gate=Gate(kind="sigmoid-topk", scale=Key("route_scale", 1.0), correction="mlp.expert_bias"),
        layouts=QWEN,
        router="mlp.router.gate.weight",
        layers=layers.after(Key("num_dense_layers", 1)),
        shared=_sized(_SHARED_EXPERTS, n=2),
        only=(("score_func", ("sigmoid", None)), ("route_norm", (True, None)), ("n_group", (1, None))),
    ),
    "aria": Family(
        gate=gates.TOPK_SOFTMAX,
        layouts=(Layout(up="mlp.experts.fc1.weight", down="mlp.experts.fc2.weight", transposed=True),),
        router="mlp.router.weight",
        size=SIZE,
        shared=_sized(_SHARED_EXPERTS, SIZE, 2),
    ),
    "axk2": replace(_deepseek_v3(scale=2.5, masked_score=0.0), layers=layers.by_type(layers.by_frequency)),
    "bailing_hybrid": replace(
        _deepseek_v3(dense=2, types=True, n_shared=1),
        gate=deepseek_v3(scale=2.5, n_groups=8, topk_groups=4, correction="mlp.gate.expert_bias"),
    ),
    "beam": replace(_deepseek_v3(dense=3, types=True, scale=2.5, n_groups=8, topk_groups=4), shared=None),
    "cohere2_moe": Family(
        gate=ByWord(
            Key("expert_selection_fn", "softmax"),
            {
                "softmax": gates.TOPK_SOFTMAX,
                "sigmoid": Gate(kind="topk-sigmoid", renormalize=Key("norm_topk_prob", True), epsilon=0.0),
            },
        ),
        layouts=QWEN,
        size=SIZE,
        layers=layers.by_type(layers.after(Key("first_k_dense_replace", 0))),
        shared=replace(_sized(_SHARED_EXPERTS, SIZE, 0), only=(("shared_expert_combination_strategy", ("sum",)),)),
    ),
    "deepseek_v2": Family(
        gate=ByWord(
            Key("topk_method", "greedy"),
            {"greedy": gates.DEEPSEEK_V2, "group_limited_greedy": gates.DEEPSEEK_V2_GROUPS},
        ),
        layouts=QWEN,
        layers=layers.after(Key("first_k_dense_replace", 0)),
        shared=_sized(_SHARED_EXPERTS, n=2),
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v32": _deepseek_v3(dense=3, types=True, scale=2.5, n_groups=8, topk_groups=4),
    "dots1": _deepseek_v3(dense=0, n_shared=None, renormalize=False),
    "dots3_note": replace(
        _deepseek_v3(types=True), shared=_sized(_SHARED_EXPERTS, Key("shared_experts_intermediate_size", 1536), 1)
    ),
    "exaone_moe": replace(
        _deepseek_v3(types=True), gate=deepseek_v3(scale=2.5, correction="mlp.e_score_correction_bias")
    ),
    "flex_olmo": _OLMOE,
    "flint": Family(
        gate=Gate(kind="sigmoid-topk", renormalize=Key("norm_topk_prob", True), epsilon=0.0),
        layouts=QWEN,
        layers=layers.by_step((0, 1)),
        shared=replace(_QWEN_SHARED, gate=None),
    ),
    "glm4_moe": _GLM4,
    "glm4_moe_lite": _deepseek_v3(types=True, scale=1.8),
    "glm4v_moe": _GLM4,
    "glm5_next": replace(_deepseek_v3(dense=3, types=True, scale=2.5), limit=Key("swiglu_limit", 10.0)),
    "glm_moe_dsa": _deepseek_v3(dense=3, types=True, scale=2.5),
    "gpt_oss": _GPT_OSS,
    "granitemoe": _GRANITE,
    "granitemoe_swa": replace(
        _GRANITE,
        layouts=(_fused("block_sparse_moe.experts"),),
        router="block_sparse_moe.router.weight",
        shared=_GRANITE_SHARED,
    ),
    "granitemoehybrid": replace(_GRANITE, shared=replace(_GRANITE_SHARED, size=Key("shared_intermediate_size", 1024))),
    "granitemoeshared": replace(_GRANITE, shared=_GRANITE_SHARED),
    "hunyuan_v1_moe": Family(
        gate=gates.SOFTMAX,
        layouts=QWEN,
        router="mlp.gate.wg.weight",
        size=SIZE,
        shared=Shared(layout=_projections("mlp.shared_mlp"), size=SIZE),
    ),
    "hy_v3": Family(
        gate=_HUNYUAN_V3_GATE,
        layouts=QWEN,
        router="mlp.router.gate.weight",
        layers=layers.by_type(layers.after(_FIRST)),
        shared=_sized("mlp.shared_mlp", n=1),
    ),
    "jamba": Family(
        gate=replace(gates.SOFTMAX, renormalize=False),
        layouts=(_projections("feed_forward.experts.{e}"),),
        router="feed_forward.router.weight",
        size=SIZE,
        layers=layers.by_period,
        modules=("feed_forward.",),
    ),
    "kimi_linear": Family(
        gate=deepseek_v3(scale=2.446, correction="block_sparse_moe.gate.e_score_correction_bias"),
        layouts=MIXTRAL,
        router="block_sparse_moe.gate.weight",
        layers=layers.by_type(layers.after(_FIRST)),
        shared=_sized("block_sparse_moe.shared_experts", n=1),
        modules=SPARSE_BLOCK,
        only=(("moe_router_activation_func", ("sigmoid", None)),),
    ),
    "kolibri1": Family(
        gate=Gate(
            kind="topk-sigmoid",
            renormalize=Key("norm_topk_prob", False),
            correction="moe.router.expert_bias",
            epsilon=0.0,
        ),
        layouts=QWEN,
        shared=Shared(layout=_projections(_SHARED_EXPERTS), size=Key("shared_expert_intermediate_size")),
        modules=("mlp.", "moe."),
    ),
    "lara_mini": Family(gate=_RENORMALIZED, layouts=QWEN, shared=replace(_QWEN_SHARED, gate=None)),
    "lfm2_moe": Family(
        gate=Gate(
            kind="sigmoid-topk",
            renormalize=Key("norm_topk_prob", True),
            scale=_SCALE,
            correction="feed_forward.expert_bias",
            corrected=Key("use_expert_bias", True),
            epsilon=1e-6,
        ),
        layouts=(_numbered("feed_forward.experts.{e}"),),
        router="feed_forward.gate.weight",
        layers=layers.after(Key("num_dense_layers", 2)),
        modules=("feed_forward.",),
    ),
    "mellum": Family(gate=_RENORMALIZED, layouts=QWEN, layers=layers.by_type(layers.every)),
    "mimo_v2_flash": replace(_deepseek_v3(types=True), shared=None),
    "minimax": _MIXTRAL,
    "minimax_m2": replace(
        _MIXTRAL,
        gate=Gate(
            kind="sigmoid-topk",
            correction="block_sparse_moe.e_score_correction_bias",
            epsilon=0.0,
            scoring=("sigmoid",),
        ),
        only=(("use_routing_bias", (True, None)),),
    ),
    "mistral4": Family(
        gate=replace(
            _RENORMALIZED,
            n_groups=Key("n_group", 1, null=1),
            topk_groups=Key("topk_group", 1, null=1),
            scale=_SCALE,
        ),
        layouts=QWEN,
        layers=layers.after(Key("first_k_dense_replace", 0)),
        shared=_sized(_SHARED_EXPERTS, n=1),
    ),
    "mixtral": _MIXTRAL,
    "nemotron_h": Family(
        gate=deepseek_v3(correction="mixer.gate.e_score_correction_bias"),
        layouts=(Layout(up="mixer.experts.{e}.up_proj.weight", down="mixer.experts.{e}.down_proj.weight"),),
        router="mixer.gate.weight",
        layers=layers.by_block,
        shared=Shared(
            layout=Layout(up="mixer.shared_experts.up_proj.weight", down="mixer.shared_experts.down_proj.weight"),
            size=Key("moe_shared_expert_intermediate_size", 7688),
        ),
        activation=Key("mlp_hidden_act", "relu2"),
        gated=False,
        modules=("mixer.",),
        only=(("moe_latent_size", (None,)),),
    ),
    "olmoe": _OLMOE,
    # Its router divides the weights by top_k, and its block multiplies by it.
    "openai_privacy_filter": replace(_GPT_OSS, layouts=(replace(_GPT_OSS_EXPERTS, interleaved=False),)),
    "qwen2_moe": _QWEN2,
    "qwen3_5_moe": replace(_QWEN2, gate=gates.SOFTMAX, layers=layers.every),
    "qwen3_moe": replace(_QWEN2, shared=None),
    "qwen3_next": replace(_QWEN2, gate=_RENORMALIZED),
    "qwen3_vl_moe": replace(_QWEN2, gate=gates.SOFTMAX, shared=None, layouts=(_fused("mlp.experts", None), EXPERTS)),
    "qwen4_exp": replace(_QWEN2, gate=_RENORMALIZED, layers=layers.every),
    "sarvam_mla": _deepseek_v3(scale=2.5),
    "sarvam_moe": replace(_deepseek_v3(), gate=deepseek_v3(scale=2.5, correction="mlp.gate.expert_bias")),
    "solar_open": replace(_deepseek_v3(), layers=layers.every),
}

REFUSED: dict[str, str] = {
    "hy_v4": "its experts are clamped and its shared expert is not",
    "axk1": "its MoE block ends in a norm",
    "dbrx": "its weights are divided by a norm of the chosen scores",
    "deepseek_v4": "its first layers are routed by a table of token ids",
    "diffusion_gemma": "its gate normalises and scales the hidden state first",
    "doge": "its experts are found by product keys",
    "ernie4_5_moe": "the sum that renormalises its weights has a floor",
    "ernie4_5_vl_moe": "text and vision tokens have experts of their own",
    "gemma4": "its gate normalises and scales the hidden state first",
    "inkling": "its weights are normalised over the shared experts too",
    "inkling2": "its experts have a soft-capped activation",
    "jetmoe": "its attention is a mixture of experts as well",
    "laguna": "its gate's logits are soft-capped",
    "llama4": "its gate scales the experts' input and not their output",
    "longcat_flash": "some of its experts are the identity",
    "muse_spark": "each expert's output is normalised",
    "nllb_moe": "its experts have a capacity",
    "phimoe": "its gate is the sparsemixer",
    "switch_transformers": "its experts have a capacity",
    "zaya": "its router keeps a state between layers",
}
"""Why a family that is known is not read."""
