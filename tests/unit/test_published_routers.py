"""The routers and shared experts of published models, as transformers computes them in float32."""

import importlib
from types import SimpleNamespace

import numpy as np
import pytest
from reference import integers

from colibri_cli import Experts, MoELayer, Router, SharedExpert

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # others' warnings

E, H, K, T = 24, 32, 6, 400
CONFIG = {
    **dict.fromkeys(["num_experts", "num_local_experts", "moe_num_experts", "n_routed_experts"], E),
    **dict.fromkeys(["num_experts_per_tok", "moe_topk"], K),
    **dict.fromkeys(["routed_scaling_factor", "router_scaling_factor"], 2.5),
    **dict.fromkeys(["norm_topk_prob", "use_expert_bias"], True),
    "hidden_size": H,
    "n_group": 4,
    "topk_group": 2,
    "scoring_func": "sqrtsoftplus",
    "moe_norm_min": 1e-12,
    "zero_expert_num": 0,
    "expert_selection_fn": "sigmoid",
}
GROUPS = {"n_groups": 4, "topk_groups": 2}
DEEPSEEK_V3 = {"kind": "sigmoid-topk", "scale": 2.5, **GROUPS}
QWEN = {"kind": "softmax-topk"}

# (module, class, what differs from CONFIG, options of Router.from_array)
ROUTERS = [
    ("olmoe", "OlmoeTopKRouter", {}, QWEN),
    ("olmoe", "OlmoeTopKRouter", {"norm_topk_prob": False}, {**QWEN, "renormalize": False}),
    ("qwen2_moe", "Qwen2MoeTopKRouter", {"norm_topk_prob": False}, {**QWEN, "renormalize": False}),
    ("qwen3_moe", "Qwen3MoeTopKRouter", {}, QWEN),
    ("qwen3_next", "Qwen3NextTopKRouter", {}, QWEN),
    ("qwen3_5_moe", "Qwen3_5MoeTopKRouter", {}, QWEN),
    ("mixtral", "MixtralTopKRouter", {}, QWEN),
    ("minimax", "MiniMaxTopKRouter", {}, QWEN),
    ("jamba", "JambaTopKRouter", {}, {**QWEN, "renormalize": False}),
    ("deepseek_v2", "DeepseekV2TopkRouter", {"topk_method": "greedy"}, {**QWEN, "renormalize": False, "scale": 2.5}),
    (
        *("deepseek_v2", "DeepseekV2TopkRouter", {"topk_method": "group_limited_greedy"}),
        {**QWEN, "renormalize": False, "scale": 2.5, "group_score": "max", **GROUPS},
    ),
    ("granitemoe", "GraniteMoeTopKRouter", {}, {"kind": "topk-softmax"}),
    ("gpt_oss", "GptOssTopKRouter", {}, {"kind": "topk-softmax"}),
    ("aria", "AriaTextTopKRouter", {}, {"kind": "topk-softmax"}),
    ("openai_privacy_filter", "OpenAIPrivacyFilterTopKRouter", {}, {"kind": "topk-softmax", "scale": 1 / K}),
    ("deepseek_v3", "DeepseekV3TopkRouter", {}, DEEPSEEK_V3),
    ("deepseek_v3", "DeepseekV3TopkRouter", {"norm_topk_prob": False}, {**DEEPSEEK_V3, "renormalize": False}),
    ("deepseek_v32", "DeepseekV32TopkRouter", {}, DEEPSEEK_V3),
    (
        *("glm4_moe", "Glm4MoeTopkRouter", {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}),
        {"kind": "sigmoid-topk"},
    ),
    ("glm4v_moe", "Glm4vMoeTextTopkRouter", {}, DEEPSEEK_V3),
    ("dots1", "Dots1TopkRouter", {}, DEEPSEEK_V3),
    ("kimi_linear", "KimiLinearTopkRouter", {}, DEEPSEEK_V3),
    ("exaone_moe", "ExaoneMoeTopkRouter", {}, DEEPSEEK_V3),
    ("nemotron_h", "NemotronHTopkRouter", {}, DEEPSEEK_V3),
    ("axk2", "AXK2TopkRouter", {}, {**DEEPSEEK_V3, "masked_score": 0.0}),
    ("mistral4", "Mistral4TopkRouter", {}, {**QWEN, "scale": 2.5, **GROUPS}),
    ("minimax_m2", "MiniMaxM2TopKRouter", {}, {"kind": "sigmoid-topk", "epsilon": 0.0}),
    ("hy_v3", "HYV3TopKRouter", {}, {"kind": "sigmoid-topk", "scale": 2.5}),
    ("lfm2_moe", "Lfm2MoeTopKRouter", {}, {"kind": "sigmoid-topk", "scale": 2.5, "epsilon": 1e-6}),
    (
        *("lfm2_moe", "Lfm2MoeTopKRouter", {"use_expert_bias": False}),
        {"kind": "sigmoid-topk", "scale": 2.5, "epsilon": 1e-6},
    ),
    ("flint", "FlintTopKRouter", {}, {"kind": "sigmoid-topk", "epsilon": 0.0}),
    ("deepseek_v4", "DeepseekV4TopKRouter", {}, {"kind": "sqrtsoftplus-topk", "scale": 2.5}),
    ("ernie4_5_moe", "Ernie4_5_MoeTopKRouter", {}, {**QWEN, "epsilon": 0.0}),
    ("longcat_flash", "LongcatFlashTopkRouter", {}, {**QWEN, "renormalize": False, "scale": 2.5}),
    ("cohere2_moe", "Cohere2MoeTopKRouter", {}, {"kind": "topk-sigmoid", "epsilon": 0.0}),
    ("kolibri1", "Kolibri1TopKRouter", {}, {"kind": "topk-sigmoid", "epsilon": 0.0}),
]


def exact(seed, *shape):
    """Multiples of 2^-8: with 32 of them the logits are exact in float32, in any order of summing."""
    return integers(seed, -256, 257, *shape).astype(np.float32) / 256


def router_of(module, name, options):
    """Give a router of transformers with random weights: (the module, its correction, what its forward wants)."""
    source = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    router = getattr(source, name)(SimpleNamespace(**CONFIG | options)).eval()
    correction, arguments = None, ()
    with torch.no_grad():
        for seed, (_, weight) in enumerate(router.named_parameters()):
            weight.copy_(torch.from_numpy(exact(seed, *weight.shape)))
        bias = torch.from_numpy(exact(9, E) / 2)
        statics = getattr(router, "moe_statics", router)
        if hasattr(statics, "e_score_correction_bias"):
            statics.e_score_correction_bias.copy_(bias)
            correction = bias.numpy()
        elif module in {"minimax_m2", "hy_v3"} or (module == "lfm2_moe" and router.use_expert_bias):
            correction, arguments = bias.numpy(), (bias,)
    return router, correction, arguments


@pytest.mark.parametrize(("module", "name", "config", "options"), ROUTERS)
def test_routers(module, name, config, options):
    router, correction, arguments = router_of(module, name, config)
    hidden = exact(100, T, H)
    with torch.no_grad():
        _, weights, ids = router(torch.from_numpy(hidden), *arguments)
    linear = getattr(router, "classifier", router)
    bias = getattr(linear, "bias", None)
    found = Router.from_array(
        linear.weight.detach(),
        None if bias is None else bias.detach(),
        top_k=K,
        correction_bias=correction,
        **options,
    ).route(hidden)
    order, theirs = np.argsort(found.expert_ids, axis=1), np.argsort(ids.numpy(), axis=1)
    sort = np.take_along_axis
    np.testing.assert_array_equal(sort(found.expert_ids, order, 1), sort(ids.numpy(), theirs, 1))
    np.testing.assert_allclose(sort(found.expert_weights, order, 1), sort(weights.numpy(), theirs, 1), rtol=2e-6)


def block_of(module, name, config_name, options):
    source = importlib.import_module(f"transformers.models.{module}")
    config = getattr(source, config_name)(hidden_size=H, num_experts_per_tok=4, norm_topk_prob=True, **options)
    config._experts_implementation = "eager"
    modeling = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    block = getattr(modeling, name)(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in (*block.parameters(), *block.buffers()):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.2)
    return block


def mlp(module):
    """A dense MLP of transformers as one expert."""
    gate_up = torch.cat([module.gate_proj.weight, module.up_proj.weight]).detach()
    return Experts.from_arrays(gate_up[None], module.down_proj.weight.detach()[None])


@pytest.mark.parametrize(
    ("module", "name", "config_name", "config", "options"),
    [
        (
            *("qwen2_moe", "Qwen2MoeSparseMoeBlock", "Qwen2MoeConfig"),
            {"num_experts": 8, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
            QWEN,
        ),
        (
            *("qwen3_next", "Qwen3NextSparseMoeBlock", "Qwen3NextConfig"),
            {"num_experts": 8, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
            QWEN,
        ),
        (
            *("deepseek_v3", "DeepseekV3MoE", "DeepseekV3Config"),
            {"n_routed_experts": 16, "moe_intermediate_size": 24, "n_group": 4, "topk_group": 2},
            DEEPSEEK_V3,
        ),
        (
            *("glm4_moe", "Glm4MoeMoE", "Glm4MoeConfig"),
            {"n_routed_experts": 16, "moe_intermediate_size": 24, "n_shared_experts": 2},
            {"kind": "sigmoid-topk"},
        ),
    ],
)
def test_layers_with_a_shared_expert(module, name, config_name, config, options):
    block = block_of(module, name, config_name, config)
    correction = getattr(block.gate, "e_score_correction_bias", None)
    router = Router.from_array(block.gate.weight.detach(), top_k=4, correction_bias=correction, **options)
    experts = Experts.from_arrays(block.experts.gate_up_proj.detach(), block.experts.down_proj.detach())
    if hasattr(block, "shared_expert"):
        shared = SharedExpert(mlp(block.shared_expert), block.shared_expert_gate.weight.detach())
    else:
        shared = SharedExpert(mlp(block.shared_experts))
    hidden = exact(3, 60, H)
    with torch.no_grad():
        expected = block(torch.from_numpy(hidden)[None])[0].numpy()
    found = MoELayer(router, experts, shared=shared)(hidden)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * np.abs(expected).max())
