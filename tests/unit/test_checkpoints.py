"""Published checkpoints, made by hand: each layout, each way to be damaged."""

import gc
import json
import os
from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import bfloat16, fp8, write, write_index
from published import layer_of

from colibri_cli.checkpoints.checkpoint import open_model
from colibri_cli.checkpoints.config import plan_of
from colibri_cli.checkpoints.families import FAMILIES, REFUSED
from colibri_cli.checkpoints.fp8 import decode as decode_fp8
from colibri_cli.checkpoints.mxfp4 import decode as decode_mxfp4
from colibri_cli.checkpoints.settings import Settings
from colibri_cli.errors import InvalidInput, UsageError

E, H, INTER = 4, 32, 64

SIZES = {"hidden_size": H, "num_hidden_layers": 2, "num_experts_per_tok": 2}
OLMOE = {"model_type": "olmoe", "num_experts": E, "intermediate_size": INTER, "norm_topk_prob": True, **SIZES}
GPT_OSS = {"model_type": "gpt_oss", "num_local_experts": E, "intermediate_size": INTER, **SIZES}
GRANITE = {"model_type": "granitemoeshared", "num_local_experts": E, "intermediate_size": INTER, **SIZES}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "scoring_func": "sigmoid",
    **dict.fromkeys(["n_shared_experts", "first_k_dense_replace", "n_group", "topk_group"], 1),
    "n_routed_experts": E,
    "moe_intermediate_size": INTER,
    "norm_topk_prob": True,
    **SIZES,
}
FP8 = {"quant_method": "fp8", "weight_block_size": [16, 24], "fmt": "e4m3"}


def floats(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def codes(seed, *shape):
    """Bytes of FP8, NaN left out."""
    found = np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)
    return np.where(found & 127 == 127, found - 1, found).astype(np.uint8)


def olmoe(dtype=lambda array: array, layers=(0, 1)):
    tensors = {"model.embed_tokens.weight": floats(9, 3, H), "model.layers.0.self_attn.q_proj.weight": floats(8, 2, H)}
    for number in layers:
        prefix = f"model.layers.{number}.mlp"
        tensors[f"{prefix}.gate.weight"] = dtype(floats(number, E, H))
        for e in range(E):
            tensors[f"{prefix}.experts.{e}.gate_proj.weight"] = dtype(floats([number, e, 0], INTER, H))
            tensors[f"{prefix}.experts.{e}.up_proj.weight"] = dtype(floats([number, e, 1], INTER, H))
            tensors[f"{prefix}.experts.{e}.down_proj.weight"] = dtype(floats([number, e, 2], H, INTER))
    return tensors


def gpt_oss():
    tensors = {}
    for number in range(2):
        prefix = f"model.layers.{number}.mlp"
        tensors[f"{prefix}.router.weight"] = bfloat16(floats(number, E, H))
        tensors[f"{prefix}.router.bias"] = bfloat16(floats(number, E))
        tensors[f"{prefix}.experts.gate_up_proj_bias"] = bfloat16(floats([number, 1], E, 2 * INTER))
        tensors[f"{prefix}.experts.down_proj_bias"] = bfloat16(floats([number, 2], E, H))
        for name, rows, columns in (("gate_up_proj", 2 * INTER, H), ("down_proj", H, INTER)):
            random = np.random.default_rng([number, rows])
            blocks = random.integers(0, 256, (E, rows, columns // 32, 16)).astype(np.uint8)
            scales = random.integers(120, 130, (E, rows, columns // 32)).astype(np.uint8)
            tensors |= {f"{prefix}.experts.{name}_blocks": blocks, f"{prefix}.experts.{name}_scales": scales}
    return tensors


def deepseek():
    tensors = {"model.layers.0.mlp.gate_proj.weight": floats(1, 3, H)}  # dense
    prefix = "model.layers.1.mlp"
    tensors[f"{prefix}.gate.weight"] = bfloat16(floats(2, E, H))
    tensors[f"{prefix}.gate.e_score_correction_bias"] = floats(3, E) / 10
    for module in ("shared_experts", *(f"experts.{e}" for e in range(E))):
        for i, (name, rows, columns) in enumerate([("gate", INTER, H), ("up", INTER, H), ("down", H, INTER)]):
            weight = f"{prefix}.{module}.{name}_proj.weight"
            tensors[weight] = fp8(codes([4, i], rows, columns))
            tensors[f"{weight}_scale_inv"] = np.abs(floats([5, i], -(-rows // 16), -(-columns // 24)))
    tensors["model.layers.2.mlp.gate.weight"] = floats(6, 1, 1)  # predicts a further token: of no concern
    return tensors


# Independent formulas, in float64.


def e4m3(code):
    sign, exponent, mantissa = (-1.0) ** (code >> 7), code >> 3 & 15, code & 7
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def e2m1(code):
    sign, exponent, mantissa = (-1.0) ** (code >> 3), code >> 1 & 3, code & 1
    return sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


def test_fp8_is_the_product_of_value_and_scale():
    every = codes(0, 40, 50)
    every.flat[:254] = [code for code in range(256) if code & 127 != 127]
    scales = np.abs(floats(1, 3, 3)) + np.float32(1e-3)
    out = np.empty(every.shape, np.float32)
    decode_fp8(every, scales, (16, 24), out)
    for (i, j), code in np.ndenumerate(every):
        assert out[i, j] == np.float32(e4m3(int(code)) * float(scales[i // 16, j // 24]))
    decode_fp8(np.full((1, 1), 0x7F, np.uint8), np.ones((1, 1), np.float32), (1, 1), out[:1, :1])
    assert np.isnan(out[0, 0])


def test_mxfp4_is_the_product_of_value_and_scale():
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (51, 5, 16)).astype(np.uint8)
    scales = np.arange(255, dtype=np.uint8).reshape(51, 5)
    out = np.empty((51, 160), np.float32)
    decode_mxfp4(blocks, scales, out, "scales")
    with np.errstate(over="ignore"):
        for (i, j), value in np.ndenumerate(out):
            byte = int(blocks[i, j // 32, j % 32 // 2])
            exact = e2m1(byte >> 4 if j % 2 else byte & 15) * 2.0 ** (int(scales[i, j // 32]) - 127)
            assert value == np.float32(exact)
    assert np.isinf(out).any()  # 6 * 2 ** 127
    with pytest.raises(InvalidInput, match=r"Expected scales of 0 to 254, got 255 \(not a number\) - at s\[0, 1\]"):
        decode_mxfp4(blocks[:1], np.full((1, 5), [7, 255, 7, 7, 7], np.uint8), out[:1], "s")


@pytest.mark.parametrize("narrow", [None, bfloat16, lambda array: array.astype(np.float16)])
def test_experts_of_their_own(tmp_path, narrow):
    write(tmp_path, OLMOE, olmoe(narrow or (lambda array: array)))
    with open_model(tmp_path) as model:
        plan = model.plan
        assert (plan.family, plan.layers, plan.n_experts, plan.top_k) == ("olmoe", (0, 1), E, 2)
        assert (plan.hidden_size, plan.intermediate_size, plan.activation, plan.gated) == (H, INTER, "silu", True)
        assert plan.router.renormalize
        assert plan.shared is None
        layer = model.layer(1)
        assert layer.router_bias() is layer.correction_bias() is layer.shared() is layer.shared_gate() is None
        assert layer.source_bytes == (4 if narrow is None else 2) * (E * H + 3 * E * H * INTER)
        for e in range(E):
            gate, up, down = (floats([1, e, i], *shape) for i, shape in enumerate([(INTER, H), (INTER, H), (H, INTER)]))
            if narrow is bfloat16:
                gate, up, down = ((a.view(np.uint32) & 0xFFFF0000).view(np.float32) for a in (gate, up, down))
            elif narrow is not None:
                gate, up, down = (a.astype(np.float16).astype(np.float32) for a in (gate, up, down))
            weights = layer.expert(e)
            np.testing.assert_array_equal(weights.up, np.concatenate([gate, up]))
            np.testing.assert_array_equal(weights.down, down)
            assert weights.down.dtype == np.float32
            layer.forget(e)
            np.testing.assert_array_equal(weights.down, down)  # read again
        layer.forget()


def test_sharded_is_the_same(tmp_path):
    tensors = list(olmoe().items())
    write(tmp_path, OLMOE, dict(tensors[::2]), dict(tensors[1::2]))
    with open_model(tmp_path) as model:
        np.testing.assert_array_equal(model.layer(0).expert(3).down, floats([0, 3, 2], H, INTER))
        layer_of(model, 1)


@pytest.mark.parametrize("aligned", [True, False])
def test_float32_is_copied_only_where_it_is_not_aligned(tmp_path, aligned):
    tensors = {}
    for number in range(2):
        prefix = f"model.layers.{number}"
        tensors[f"{prefix}.block_sparse_moe.router.layer.weight"] = floats(0, E, H)
        tensors[f"{prefix}.block_sparse_moe.input_linear.weight"] = floats([number, 1], E, 2 * INTER, H)
        tensors[f"{prefix}.block_sparse_moe.output_linear.weight"] = floats([number, 2], E, H, INTER)
        tensors[f"{prefix}.shared_mlp.input_linear.weight"] = floats([number, 3], 10, H)
        tensors[f"{prefix}.shared_mlp.output_linear.weight"] = floats([number, 4], H, 5)
    write(tmp_path, GRANITE | {"shared_intermediate_size": 5}, tensors, aligned=aligned)
    with open_model(tmp_path) as model:
        weights = model.layer(1).expert(2)
        np.testing.assert_array_equal(weights.up, floats([1, 1], E, 2 * INTER, H)[2])
        np.testing.assert_array_equal(weights.down, floats([1, 2], E, H, INTER)[2])
        for array in (weights.up, weights.down):
            assert array.flags.aligned
            assert array.flags.owndata != aligned
            assert array.flags.writeable != aligned
        shared = model.layer(1).shared()
        np.testing.assert_array_equal(shared.up, floats([1, 3], 10, H))
        layer_of(model, 0)


@pytest.mark.parametrize("transposed", [False, True])
def test_fused_experts_either_way_round(tmp_path, transposed):
    config = {"model_type": "qwen3_vl_moe", "text_config": OLMOE | {"model_type": "qwen3_vl_moe_text"}}
    config["text_config"]["moe_intermediate_size"] = H // 2  # 2I = H: the gate and up weights alone do not tell
    tensors = {}
    for number in range(2):
        prefix = f"model.language_model.layers.{number}.mlp"
        up, down = floats([number, 1], E, H, H), floats([number, 2], E, H, H // 2)
        tensors[f"{prefix}.gate.weight"] = floats(0, E, H)
        tensors[f"{prefix}.experts.gate_up_proj"] = up.transpose(0, 2, 1) if transposed else up
        tensors[f"{prefix}.experts.down_proj"] = down.transpose(0, 2, 1) if transposed else down
    write(tmp_path, config, tensors)
    with open_model(tmp_path) as model:
        assert model.plan.family == "qwen3_vl_moe"
        weights = model.layer(0).expert(1)
        np.testing.assert_array_equal(weights.up, floats([0, 1], E, H, H)[1])
        np.testing.assert_array_equal(weights.down, floats([0, 2], E, H, H // 2)[1])


def test_mxfp4_with_interleaved_rows_and_biases(tmp_path):
    tensors = gpt_oss()
    write(tmp_path, GPT_OSS | {"quantization_config": {"quant_method": "mxfp4"}}, tensors)
    with open_model(tmp_path) as model:
        plan = model.plan
        assert (plan.alpha, plan.beta, plan.limit, plan.biased) == (1.702, 1.0, 7.0, True)
        assert plan.router.bias
        weights = model.layer(1).expert(3)
        for name, found in (("gate_up_proj", weights.up), ("down_proj", weights.down)):
            blocks = tensors[f"model.layers.1.mlp.experts.{name}_blocks"][3]
            scales = tensors[f"model.layers.1.mlp.experts.{name}_scales"][3]
            nibbles = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, 32)
            exact = np.vectorize(e2m1)(nibbles) * 2.0 ** (scales[..., None].astype(int) - 127)
            rows = exact.reshape(len(blocks), -1)
            order = [*range(0, len(rows), 2), *range(1, len(rows), 2)] if name == "gate_up_proj" else range(len(rows))
            np.testing.assert_array_equal(found, rows[list(order)])
        bias = floats([1, 1], E, 2 * INTER)[3]
        bias = (bias.view(np.uint32) & 0xFFFF0000).view(np.float32)
        np.testing.assert_array_equal(weights.up_bias, np.concatenate([bias[::2], bias[1::2]]))
        layer_of(model, 0)


def test_block_fp8_with_a_shared_expert(tmp_path):
    tensors = deepseek()
    write(tmp_path, DEEPSEEK | {"quantization_config": FP8}, tensors)
    with open_model(tmp_path) as model:
        plan = model.plan
        assert plan.layers == (1,)
        assert plan.router.correction_bias
        assert plan.shared.intermediate_size == INTER
        for found in (model.layer(1).expert(2), model.layer(1).shared()):
            code, scale = codes([4, 2], H, INTER), np.abs(floats([5, 2], 2, 3))
            exact = [[e4m3(int(code[i, j])) * float(scale[i // 16, j // 24]) for j in range(INTER)] for i in range(H)]
            np.testing.assert_array_equal(found.down, np.array(exact).astype(np.float32))
        layer_of(model, 1)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_fp8_with_one_scale(tmp_path, shape):
    tensors = deepseek()
    for name in tensors:
        if name.endswith("_scale_inv"):
            tensors[name] = np.full(shape, 0.5, np.float32)
    write(tmp_path, DEEPSEEK | {"quantization_config": FP8 | {"weight_block_size": None}}, tensors)
    with open_model(tmp_path) as model:
        exact = np.vectorize(e4m3)(codes([4, 2], H, INTER).astype(int)) / 2
        np.testing.assert_array_equal(model.layer(1).expert(0).down, exact)


# What is refused, by name and before a weight is read.

EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"
DAMAGED = {
    "missing expert": ({EXPERT: None}, rf"Expected the tensor {EXPERT}, got none - at "),
    "missing router": ({"model.layers.1.mlp.gate.weight": None}, r"Expected the tensor model.layers.1.mlp.gate.weight"),
    "missing first router": ({"model.layers.0.mlp.gate.weight": None}, r"the tensor model.layers.0.mlp.gate.weight"),
    "misshapen": ({EXPERT: floats(0, INTER, H + 1)}, rf"Expected \[64, 32\], got \[64, 33\] - at .*{EXPERT}"),
    "transposed": ({EXPERT: floats(0, H, INTER)}, rf"Expected \[64, 32\], got \[32, 64\] - at .*{EXPERT}"),
    "one dimension": ({EXPERT: floats(0, INTER * H)}, rf"Expected \[64, 32\], got \[2048\] - at .*{EXPERT}"),
    "integers": ({EXPERT: np.zeros((INTER, H), np.int64)}, rf"F32 or BF16 or F16 or F8_E4M3, got I64 - at .*{EXPERT}"),
    "float64": ({EXPERT: np.zeros((INTER, H))}, rf"F32 or BF16 or F16 or F8_E4M3, got F64 - at .*{EXPERT}"),
    "fp8 unannounced": ({EXPERT: fp8(codes(0, INTER, H))}, rf"with quantization_config .* got F8_E4M3 - at .*{EXPERT}"),
    "an expert too many": (
        {"model.layers.1.mlp.experts.4.up_proj.weight": floats(0, INTER, H)},
        r"a tensor of olmoe's MoE layers, got one that would be left out - at .*experts\.4\.up_proj",
    ),
    "a bias": (
        {"model.layers.0.mlp.experts.0.up_proj.bias": floats(0, INTER)},
        r"got one that would be left out - at .*experts\.0\.up_proj\.bias",
    ),
    "two text models": (
        {"model.language_model.layers.0.mlp.gate.weight": floats(0, E, H)},
        r"Expected one router in a layer, got model.layers.0.mlp.gate.weight and model.language_model",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_tensors_that_do_not_fit(tmp_path, case):
    changes, message = DAMAGED[case]
    tensors = {name: tensor for name, tensor in (olmoe() | changes).items() if tensor is not None}
    write(tmp_path, OLMOE, tensors)
    with pytest.raises(InvalidInput, match=message):
        open_model(tmp_path)


def test_a_dense_layer_has_no_router(tmp_path):
    tensors = deepseek()
    tensors["model.layers.0.mlp.gate.weight"] = floats(0, E, H)
    write(tmp_path, DEEPSEEK | {"quantization_config": FP8}, tensors)
    with pytest.raises(InvalidInput, match=r"no router in layer 0, which is dense by config.json, got model.layers.0"):
        open_model(tmp_path)


SCALE = "model.layers.1.mlp.experts.0.up_proj.weight_scale_inv"
BLOCKS = "model.layers.0.mlp.experts.gate_up_proj_blocks"
SCALES = "model.layers.0.mlp.experts.down_proj_scales"


@pytest.mark.parametrize(
    ("base", "config", "changes", "message"),
    [
        (deepseek, DEEPSEEK | {"quantization_config": FP8}, {SCALE: None}, rf"the tensor {SCALE}, got none"),
        (
            *(deepseek, DEEPSEEK | {"quantization_config": FP8}, {SCALE: floats(0, 4, 3)}),
            rf"Expected \[4, 2\], got \[4, 3\] - at .*{SCALE}",
        ),
        (
            *(deepseek, DEEPSEEK | {"quantization_config": FP8}, {SCALE: np.zeros((4, 2), np.uint8)}),
            rf"Expected F32 or BF16 or F16, got U8 - at .*{SCALE}",
        ),
        (
            *(deepseek, DEEPSEEK | {"quantization_config": FP8 | {"weight_block_size": [0, 128]}}, {}),
            r"two positive sizes, got others - at .*quantization_config.weight_block_size",
        ),
        (gpt_oss, GPT_OSS, {SCALES: None}, rf"the tensor {SCALES}, got none"),
        (gpt_oss, GPT_OSS, {BLOCKS: np.zeros((E, 2 * INTER, 1, 15), np.uint8)}, rf"\[4, 128, 1, 15\] - at .*{BLOCKS}"),
        (gpt_oss, GPT_OSS, {BLOCKS: floats(0, E, 2 * INTER, 1, 16)}, rf"Expected U8, got F32 - at .*{BLOCKS}"),
    ],
)
def test_quantised_tensors_that_do_not_fit(tmp_path, base, config, changes, message):
    write(tmp_path, config, {name: tensor for name, tensor in (base() | changes).items() if tensor is not None})
    with pytest.raises(InvalidInput, match=message):
        open_model(tmp_path)


def test_a_tensor_in_two_shards(tmp_path):
    tensors = olmoe()
    write(tmp_path, OLMOE, tensors, {EXPERT: tensors[EXPERT]})
    with pytest.raises(InvalidInput, match=rf"Expected each tensor in one file, got it in .*: {EXPERT}"):
        open_model(tmp_path)


INDEXES = {
    "elsewhere": (
        lambda places: places | {EXPERT: "../model-00001-of-00002.safetensors"},
        r"beside the index, got \.\.",
    ),
    "not a name": (lambda places: places | {EXPERT: 3}, r"beside the index, got something else - at .*up_proj.weight"),
    "another shard": (
        lambda places: places | {EXPERT: places[EXPERT].translate({ord("1"): "2"}).replace("of-00002", "of-00002")},
        r"Expected it in model-00002-of-00002.safetensors, got it in model-00001-of-00002.safetensors - at .*up_proj",
    ),
    "no such tensor": (lambda places: places | {"x": places[EXPERT]}, r"got no such tensor there - at .*weight_map\.x"),
    "empty": (lambda _: {}, r"Expected an object of file names, got something else - at .*weight_map"),
    "unlisted": (
        lambda places: {name: place for name, place in places.items() if name != EXPERT},
        rf"Expected the tensor {EXPERT}, got none",
    ),
}


@pytest.mark.parametrize("case", INDEXES)
def test_an_index_that_does_not_fit(tmp_path, case):
    change, message = INDEXES[case]
    tensors = list(olmoe().items())
    half = len(tensors) - 3
    write(tmp_path, OLMOE, dict(tensors[:half]), dict(tensors[half:]))
    index = tmp_path / "model.safetensors.index.json"
    write_index(tmp_path, change(json.loads(index.read_text())["weight_map"]))
    with pytest.raises(InvalidInput, match=message):
        open_model(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"weight_map": 3}', '{"weight_map": {"a": 1, "a": 2}}', "\xff", "[" * 9**6]
)
def test_an_index_that_is_none(tmp_path, text):
    write(tmp_path, OLMOE, olmoe(), {})
    (tmp_path / "model.safetensors.index.json").write_text(text, encoding="latin-1")
    with pytest.raises(InvalidInput, match=r"model\.safetensors\.index\.json"):
        open_model(tmp_path)


def test_a_shard_that_is_missing_or_cut_short(tmp_path):
    tensors = list(olmoe().items())
    write(tmp_path, OLMOE, dict(tensors[:5]), dict(tensors[5:]))
    shard = tmp_path / "model-00002-of-00002.safetensors"
    data = shard.read_bytes()
    shard.write_bytes(data[:-4])
    with pytest.raises(InvalidInput, match=r"Expected a file of \d+ bytes, got \d+ bytes - at .*model-00002"):
        open_model(tmp_path)
    shard.unlink()
    with pytest.raises(UsageError, match=r"Expected a readable file, got no such file .* - at .*model-00002"):
        open_model(tmp_path)


def test_a_file_cut_short_while_it_is_read(tmp_path):
    write(tmp_path, OLMOE, olmoe())
    path = tmp_path / "model.safetensors"

    def cut_and_read(forget):
        write(tmp_path, OLMOE, olmoe())
        with open_model(tmp_path) as model:
            os.truncate(path, 4096)
            assert not model.layer(1).expert(E - 1).down.any()  # and no SIGBUS
            if forget:
                with pytest.raises(InvalidInput, match="got a file cut short since"):
                    model.layer(1).forget()

    for forget in (True, False):
        with pytest.raises(InvalidInput, match=r"got a file cut short since - at .*model\.safetensors"):
            cut_and_read(forget)


CONFIGS = {
    "no family": ({"model_type": "llama"}, UsageError, r"a family .* that is supported, got llama - at .*model_type"),
    "no type": ({"model_type": None}, InvalidInput, r"Expected a string, got null - at .*\$\.model_type"),
    "refused": ({"model_type": "phimoe"}, UsageError, r"got phimoe: its gate is the sparsemixer - at .*model_type"),
    "no experts": ({"num_experts": None}, InvalidInput, r"an integer in 1\.\.1024, got null - at .*\$\.num_experts"),
    "many experts": ({"num_experts": 1025}, InvalidInput, r"an integer in 1\.\.1024, got 1025 - at .*\$\.num_experts"),
    "a fraction": ({"num_experts": 4.5}, InvalidInput, r"an integer in 1\.\.1024, got 4\.5 - at .*\$\.num_experts"),
    "true": ({"num_experts": True}, InvalidInput, r"an integer in 1\.\.1024, got true - at .*\$\.num_experts"),
    "top-k": ({"num_experts_per_tok": 5}, InvalidInput, r"an integer in 1\.\.4, got 5 - at .*num_experts_per_tok"),
    "two counts": ({"num_local_experts": 5}, InvalidInput, r"num_experts and num_local_experts to agree, got 4 and 5"),
    "size": ({"hidden_size": 1 << 80}, InvalidInput, r"got a very large integer - at .*\$\.hidden_size"),
    "a word": ({"norm_topk_prob": "yes"}, InvalidInput, r'true or false, got "yes" - at .*norm_topk_prob'),
    "activation": ({"hidden_act": "xielu"}, UsageError, r"an activation of silu, .*, got xielu - at .*\.hidden_act"),
    "quantised": (
        {"quantization_config": {"quant_method": "awq"}},
        UsageError,
        r"weights of fp8 or mxfp4, got awq - at .*\$\.quantization_config\.quant_method",
    ),
    "layers": ({"num_hidden_layers": 0}, InvalidInput, r"an integer in 1\.\.4096, got 0 - at .*num_hidden_layers"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_configs_that_are_refused(tmp_path, case):
    changes, error, message = CONFIGS[case]
    write(tmp_path, OLMOE | changes, olmoe())
    with pytest.raises(error, match=message):
        open_model(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "[]", "3", "{", '{"model_type": "olmoe", "model_type": "mixtral"}', "{" * 9**6, "\xff"]
)
def test_configs_that_are_none(tmp_path, text):
    write(tmp_path, OLMOE, olmoe())
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(InvalidInput, match=r"config\.json"):
        open_model(tmp_path)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (DEEPSEEK, {"scoring_func": "softmax"}, r"Expected sigmoid or noaux_tc, got softmax - at \$\.scoring_func"),
        (DEEPSEEK, {"n_group": 3}, r"Expected a divisor of 4 experts, got 3 - at \$ \(n_groups\)"),
        (DEEPSEEK, {"n_group": 4, "topk_group": 2}, r"groups of at least 2 experts, got 1 - at \$ \(n_groups\)"),
        (DEEPSEEK, {"first_k_dense_replace": 2}, r"Expected a model with MoE layers, got none by its settings - at \$"),
        (DEEPSEEK, {"routed_scaling_factor": 0}, r"Expected a finite float32 above 0, got 0.* - at \$ \(scale\)"),
        (
            DEEPSEEK | {"model_type": "deepseek_v32"},
            {"mlp_layer_types": ["dense"]},
            r"Expected 2 members, one a layer, got an array of 1 - at \$\.mlp_layer_types",
        ),
        (
            DEEPSEEK | {"model_type": "deepseek_v32"},
            {"mlp_layer_types": ["dense", "hash"]},
            r"Expected sparse or dense, got another - at \$\.mlp_layer_types\[1\]",
        ),
        (
            DEEPSEEK | {"model_type": "nemotron_h", "layers_block_type": ["moe", "mamba"]},
            {"moe_latent_size": 16},
            r"Expected none, got another formula - at \$\.moe_latent_size",
        ),
        (
            OLMOE | {"model_type": "cohere2_moe", "num_shared_experts": 1},
            {"shared_expert_combination_strategy": "average"},
            r"Expected sum, got another formula - at \$\.shared_expert_combination_strategy",
        ),
        (
            DEEPSEEK | {"model_type": "deepseek_v2", "topk_method": "noaux_tc"},
            {"scoring_func": "softmax"},
            r"Expected greedy or group_limited_greedy, got noaux_tc - at \$\.topk_method",
        ),
    ],
)
def test_formulas_that_are_refused(config, changes, message):
    settings = Settings(config | changes, "$")
    with pytest.raises((InvalidInput, UsageError), match=message):
        plan_of("", FAMILIES[config["model_type"]], settings)


def test_refused_families_are_not_supported_ones():
    assert not FAMILIES.keys() & REFUSED.keys()


def test_no_checkpoint_at_all(tmp_path):
    with pytest.raises(UsageError, match=r"Expected a directory with config.json, got none"):
        open_model(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"config\.json"):
        open_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(OLMOE))
    with pytest.raises(UsageError, match=r"Expected model.safetensors or model.safetensors.index.json, got neither"):
        open_model(tmp_path)


def test_layers_and_experts_that_are_not_there(tmp_path):
    write(tmp_path, OLMOE, olmoe())
    with open_model(tmp_path) as model:
        with pytest.raises(UsageError, match=r"Expected one of the layers 0, 1, got 2 - at layer"):
            model.layer(2)
        with pytest.raises(InvalidInput, match=r"Expected an expert in 0\.\.3, got 4 - at expert"):
            model.layer(0).expert(4)


def test_opening_reads_headers_only(tmp_path):
    """The file's last page is gone, and nobody notices until a weight on it is read."""
    write(tmp_path, OLMOE, olmoe())
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    length = 8 + int.from_bytes(data[:8], "little")
    with path.open("wb") as stream:  # a hole: pages that were never written
        stream.write(data[:length])
        stream.truncate(len(data))
    with open_model(tmp_path) as model:
        assert model.plan.layers == (0, 1)


def test_files_are_let_go(tmp_path):
    def n_open():
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir()))

    write(tmp_path, OLMOE, olmoe())
    before = n_open()
    with open_model(tmp_path) as model:
        model.layer(0).expert(0)
        assert n_open() > before
    del model
    assert n_open() == before
