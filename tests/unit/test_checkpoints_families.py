"""Every family of `colibri_cli.checkpoints`: what transformers saves is read, and runs as its own MoE block does."""

import numpy as np
import pytest
from published import layer_of

from colibri_cli import MoELayer
from colibri_cli.checkpoints.checkpoint import open_model
from colibri_cli.checkpoints.config import plan_of
from colibri_cli.checkpoints.families import FAMILIES
from colibri_cli.checkpoints.fp8 import decode as decode_fp8
from colibri_cli.checkpoints.mxfp4 import decode as decode_mxfp4
from colibri_cli.checkpoints.settings import Settings
from colibri_cli.pack import pack

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # others' warnings

E, H, INTER, K, T = 8, 32, 24, 3, 33

# What a config takes of these, by its fields.
SIZES = {
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"], E),
    **dict.fromkeys(["num_experts_per_tok", "moe_topk"], K),
    **dict.fromkeys(["intermediate_size", "moe_intermediate_size"], INTER),
    **dict.fromkeys(["moe_shared_expert_intermediate_size", "shared_expert_intermediate_size"], 40),
    **dict.fromkeys(["n_shared_experts", "num_shared_experts", "moe_num_shared_experts"], 2),
    **dict.fromkeys(["q_lora_rank", "kv_lora_rank", "mamba_d_head"], 16),
    **dict.fromkeys(["qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "head_dim", "mamba_d_state"], 8),
    **dict.fromkeys(["linear_key_head_dim", "linear_value_head_dim", "index_head_dim"], 8),
    **dict.fromkeys(["num_attention_heads", "mamba_n_heads", "mamba_num_heads"], 4),
    **dict.fromkeys(["linear_num_key_heads", "linear_num_value_heads", "topk_group"], 2),
    **dict.fromkeys(["bos_token_id", "num_dense_layers", "first_k_dense_replace"], 1),
    **dict.fromkeys(["vocab_size", "max_position_embeddings"], 64),
    "num_key_value_heads": 4,
    "hidden_size": H,
    "num_hidden_layers": 3,
    "n_group": 4,
    "pad_token_id": 0,
    "eos_token_id": 2,
}

# (model_type, what differs, names of modules that make the MoE block)
CASES = [
    ("afmoe", {"route_scale": 1.7}, ["mlp"]),
    ("aria_text", {}, ["mlp"]),
    ("axk2", {}, ["mlp"]),
    ("bailing_hybrid", {"n_group": 4}, ["mlp"]),
    ("beam", {"mlp_layer_types": ["dense", "sparse", "sparse"]}, ["mlp"]),
    ("cohere2_moe", {"shared_expert_combination_strategy": "sum"}, ["mlp"]),
    ("cohere2_moe", {"num_shared_experts": 0, "expert_selection_fn": "sigmoid"}, ["mlp"]),
    ("deepseek_v2", {"routed_scaling_factor": 1.5}, ["mlp"]),
    ("deepseek_v2", {"topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0}, ["mlp"]),
    ("deepseek_v3", {}, ["mlp"]),
    ("deepseek_v3", {"norm_topk_prob": False, "n_group": 1, "topk_group": 1}, ["mlp"]),
    ("deepseek_v32", {}, ["mlp"]),
    ("dots1", {"norm_topk_prob": True}, ["mlp"]),
    ("dots3_note_text", {"shared_experts_intermediate_size": 20, "head_dim": 16}, ["mlp"]),
    ("exaone_moe", {}, ["mlp"]),
    ("flex_olmo", {}, ["mlp"]),
    ("flint", {}, ["mlp"]),
    ("glm4_moe", {"n_group": 1, "topk_group": 1}, ["mlp"]),
    ("glm4_moe_lite", {}, ["mlp"]),
    ("glm4v_moe_text", {}, ["mlp"]),
    ("glm5_next_text", {"qk_rope_head_dim": 0, "mlp_layer_types": ["sparse"] * 3, "swiglu_limit": 0.5}, ["mlp"]),
    ("glm_moe_dsa", {}, ["mlp"]),
    ("gpt_oss", {"swiglu_limit": 0.5}, ["mlp"]),
    ("granitemoe", {}, ["block_sparse_moe"]),
    ("granitemoe_swa", {"shared_intermediate_size": 40}, ["block_sparse_moe", "shared_mlp"]),
    ("granitemoehybrid", {"shared_intermediate_size": 40}, ["block_sparse_moe", "shared_mlp"]),
    ("granitemoeshared", {}, ["block_sparse_moe"]),
    ("granitemoeshared", {"shared_intermediate_size": 40}, ["block_sparse_moe", "shared_mlp"]),
    ("hunyuan_v1_moe", {}, ["mlp"]),
    ("hy_v3", {}, ["mlp"]),
    ("jamba", {"num_hidden_layers": 4}, ["feed_forward"]),
    ("kimi_linear", {}, ["mlp"]),
    ("kolibri1", {"norm_topk_prob": True}, ["mlp"]),
    ("lara_mini", {}, ["mlp"]),
    ("lfm2_moe", {"layer_types": ["conv", "full_attention", "conv"]}, ["feed_forward"]),
    ("lfm2_moe", {"layer_types": ["conv", "full_attention", "conv"], "use_expert_bias": False}, ["feed_forward"]),
    ("mellum", {"mlp_layer_types": ["sparse", "dense", "sparse"]}, ["mlp"]),
    ("mimo_v2_flash", {}, ["mlp"]),
    ("minimax", {}, ["mlp"]),
    ("minimax_m2", {}, ["mlp"]),
    ("mistral4", {"routed_scaling_factor": 1.5}, ["mlp"]),
    ("mixtral", {}, ["mlp"]),
    ("nemotron_h", {"layers_block_type": ["moe", "mamba", "moe", "attention"]}, ["mixer"]),
    ("olmoe", {}, ["mlp"]),
    ("olmoe", {"norm_topk_prob": True}, ["mlp"]),
    ("openai_privacy_filter", {"swiglu_limit": 0.5}, ["mlp"]),
    ("qwen2_moe", {}, ["mlp"]),
    ("qwen4_exp_text", {}, ["mlp"]),
    ("qwen3_5_moe_text", {}, ["mlp"]),
    ("qwen3_moe", {"mlp_only_layers": [1], "norm_topk_prob": True}, ["mlp"]),
    ("qwen3_moe", {"decoder_sparse_step": 2}, ["mlp"]),
    ("qwen3_next", {}, ["mlp"]),
    ("qwen3_vl_moe_text", {}, ["mlp"]),
    ("sarvam_mla", {}, ["mlp"]),
    ("sarvam_moe", {}, ["mlp"]),
    ("solar_open", {}, ["mlp"]),
]
VISION = {
    "aria": {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    },
    "qwen3_vl_moe": {"hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2, "out_hidden_size": H},
}


def config_of(model_type, options):
    kind = transformers.models.auto.configuration_auto.CONFIG_MAPPING[model_type]
    fields = kind.__dataclass_fields__
    return kind(**{name: value for name, value in SIZES.items() if name in fields} | options)


def model_of(config):
    """Give a model with random weights; large enough that tokens choose different experts."""
    torch.manual_seed(0)
    try:
        model = transformers.AutoModelForCausalLM.from_config(config)
    except ValueError:
        model = transformers.AutoModel.from_config(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.is_floating_point():  # a correction beyond the scores' spread would choose the same for all
                spread = 0.05 if name.endswith(("e_score_correction_bias", "expert_bias")) else 0.3
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * spread)
    return model.float().eval()


def decoder_layers(model):
    return next(module for name, module in model.named_modules() if name.rsplit(".", 1)[-1] == "layers")


def theirs(layer, modules, hidden):
    """Run the MoE block of transformers: what it gives, and the experts that its router chose."""
    chosen = []
    block = getattr(layer, modules[0])
    router = block.router if hasattr(block, "router") else block.gate
    handle = router.register_forward_hook(lambda _module, _given, found: chosen.append(found[2]))
    with torch.no_grad():
        outputs = [getattr(layer, name)(hidden[None]) for name in modules]
        y = sum(each[0] if isinstance(each, tuple) else each for each in outputs)[0]
    handle.remove()
    return y.numpy(), np.sort(chosen[0].reshape(len(hidden), -1).numpy(), axis=1)


def check_layers(directory, model, modules):
    hidden = np.random.default_rng(2).standard_normal((T, H)).astype(np.float32)
    layers = decoder_layers(model)
    bundle = directory.with_name("bundle")
    pack(directory, bundle, dtype="float32", verify=True)
    with open_model(directory) as checkpoint:
        assert checkpoint.plan.layers
        for number in checkpoint.plan.layers:
            ours = layer_of(checkpoint, number)
            expected, chosen = theirs(layers[number], modules, torch.from_numpy(hidden))
            ids = np.sort(ours.router.route(hidden).expert_ids, axis=1)
            np.testing.assert_array_equal(ids, chosen)
            assert len(np.unique(ids)) == E
            found = ours(hidden)
            np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * np.abs(expected).max())
            np.testing.assert_array_equal(MoELayer.open(bundle, number)(hidden), found)
        return checkpoint.plan


def ids_of(case):
    return "-".join([case[0], *(f"{name}={value}" for name, value in case[1].items())])


@pytest.mark.parametrize(("model_type", "options", "modules"), CASES, ids=map(ids_of, CASES))
def test_layers_are_those_of_transformers(model_type, options, modules, tmp_path):
    config = config_of(model_type, options)
    config._experts_implementation = "eager"
    model = model_of(config)
    model.save_pretrained(tmp_path / "checkpoint")
    plan = check_layers(tmp_path / "checkpoint", model, modules)
    assert (plan.family, plan.n_experts, plan.top_k) == (model_type.removesuffix("_text"), E, K)


@pytest.mark.parametrize("model_type", ["aria", "qwen3_vl_moe"])
def test_the_text_model_of_several(model_type, tmp_path):
    kind = transformers.models.auto.configuration_auto.CONFIG_MAPPING[model_type]
    text = config_of(f"{model_type}_text", {})
    config = kind(text_config=text.to_dict(), vision_config=VISION[model_type])
    config._experts_implementation = config.text_config._experts_implementation = "eager"
    model = model_of(config)
    model.save_pretrained(tmp_path / "checkpoint")
    assert check_layers(tmp_path / "checkpoint", model.language_model, ["mlp"]).family == model_type


@pytest.mark.parametrize("model_type", ["olmoe", "gpt_oss"])
def test_sharded_checkpoints(model_type, tmp_path):
    config = config_of(model_type, {})
    config._experts_implementation = "eager"
    model = model_of(config)
    model.save_pretrained(tmp_path / "checkpoint", max_shard_size="40KB")
    assert len(list((tmp_path / "checkpoint").glob("*.safetensors"))) > 3
    check_layers(tmp_path / "checkpoint", model, ["mlp"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_weights_are_widened_exactly(dtype, tmp_path):
    model = model_of(config_of("granitemoe", {})).to(getattr(torch, dtype))
    model.save_pretrained(tmp_path)
    block = decoder_layers(model)[1].block_sparse_moe
    with open_model(tmp_path) as checkpoint:
        layer = checkpoint.layer(1)
        weights = layer.expert(5)
        np.testing.assert_array_equal(weights.up, block.experts.gate_up_proj[5].detach().float().numpy())
        np.testing.assert_array_equal(weights.down, block.experts.down_proj[5].detach().float().numpy())
        np.testing.assert_array_equal(layer.router_weight(), block.router.weight.detach().float().numpy())


@pytest.mark.parametrize("model_type", sorted({case[0] for case in CASES}))
def test_what_a_config_leaves_out_is_as_in_transformers(model_type):
    """A published config.json may be older than a setting: its default is the family's in transformers."""
    kind = transformers.models.auto.configuration_auto.CONFIG_MAPPING[model_type]
    many = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    further = {name: 64 for name in many if name in kind.__dataclass_fields__}  # groups of several by default
    if model_type != "nemotron_h":  # which counts its blocks
        further["num_hidden_layers"] = 5
    if model_type == "glm5_next_text":
        further["qk_rope_head_dim"] = 0
    if model_type == "lfm2_moe":
        further["layer_types"] = ["conv", "full_attention", "conv", "conv", "conv"]
    stated, names = config_of(model_type, further).to_dict(), kind.attribute_map
    optional = {
        *("norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group", "first_k_dense_replace", "hidden_act"),
        *("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_dense_layers", "route_scale"),
        *("mlp_layer_types", "mlp_only_layers", "decoder_sparse_step", "expert_layer_period", "expert_layer_offset"),
        *("topk_method", "use_expert_bias", "swiglu_alpha", "swiglu_limit", "router_scaling_factor"),
        *("shared_intermediate_size", "expert_selection_fn", "mlp_hidden_act", "moe_latent_size"),
    }
    if model_type == "dots1":
        optional.remove("n_shared_experts")  # transformers cannot do without, either
    optional |= {names.get(name, name) for name in optional}
    bare = {name: value for name, value in stated.items() if name not in optional}
    full = kind(**{name: value for name, value in bare.items() if name not in {"model_type", "transformers_version"}})
    family = FAMILIES[model_type.removesuffix("_text")]
    left_out, said = (plan_of("", family, Settings(each, "$")) for each in (bare, full.to_dict()))
    assert left_out == said


def test_mxfp4_is_that_of_transformers():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (2, 6, 5, 16)).astype(np.uint8)
    scales = random.integers(0, 250, (2, 6, 5)).astype(np.uint8)
    expected = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32)
    found = np.empty((2, 6, 160), np.float32)
    for e in range(2):
        decode_mxfp4(blocks[e], scales[e], found[e], "scales")
    np.testing.assert_array_equal(found, expected.transpose(1, 2).numpy())


def test_fp8_is_that_of_transformers():
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    random = np.random.default_rng(0)
    codes = random.integers(0, 256, (96, 64)).astype(np.uint8)
    scales = np.exp(random.standard_normal((3, 2))).astype(np.float32)
    given = {
        "weight": torch.from_numpy(codes).view(torch.float8_e4m3fn),
        "weight_scale_inv": torch.from_numpy(scales),
    }
    found = np.empty(codes.shape, np.float32)
    decode_fp8(codes, scales, (32, 32), found)
    np.testing.assert_array_equal(found, Fp8Dequantize(None).convert(given)["weight"].numpy())  # NaN where it is NaN


def test_every_family_is_compared():
    assert {case[0].removesuffix("_text") for case in CASES} == FAMILIES.keys()
