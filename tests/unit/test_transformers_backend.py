"""transformers' models with their experts run by Colibri: the answers of their own loop, and never a stale one."""

import copy
import gc
import importlib.util
import io
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", "5.24")

from colibri_cli import Experts  # noqa: E402
from colibri_cli.errors import InvalidInput  # noqa: E402
from colibri_cli.integrations.transformers import forget, layers, register  # noqa: E402
from colibri_cli.integrations.transformers.operator import STORE  # noqa: E402
from colibri_cli.integrations.transformers.rules import Rule, rule_of  # noqa: E402
from colibri_cli.integrations.transformers.team import Team  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # others' warnings

ROOT = Path(__file__).parents[2]
PACKS = ("float32", "bfloat16", "int8", "int4")
REFUSED = {"inkling2", "inkling2_loop", "muse_spark"}
# Their text models have no head to choose tokens by.
HEADLESS = {
    "deepseek_ocr2",
    "diffusion_gemma",
    "ernie4_5_vl_moe",
    "glm4v_moe",
    "glm5_next",
    "hy_v4_vl",
    "mistral_large4",
    "openai_privacy_filter",
    "qwen3_omni_moe",
    "qwen3_vl_moe",
    "unlimited_ocr",
}
# One of each kind of class: layouts, formulas, biases, and what routers give.
KINDS = ["olmoe", "mixtral", "deepseek_v3", "deepseek_v4", "gpt_oss", "nemotron_h", "aria", "gemma4", "minimax_m3_vl"]


def _page():
    spec = importlib.util.spec_from_file_location("families_page", ROOT / "scripts" / "families_page.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["families_page"] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


PAGE = _page()


@pytest.fixture(autouse=True, scope="module")
def _registered():
    register()
    for pack in PACKS:
        register(pack=pack, name=f"colibri-{pack}")
    register(name="colibri-exact", intermediate_dtype="float32")


@pytest.fixture(autouse=True)
def _inference():
    with torch.no_grad():
        yield
    torch.set_num_threads(1)


def ids_of(*shape, seed=1):
    return torch.randint(0, 60, shape, generator=torch.Generator().manual_seed(seed))


def layer_of(family="olmoe", dtype=torch.float32):
    """Give a model, its first experts module, and what that is called with."""
    model = PAGE.small_model(family).to(dtype)
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn((7, 32), generator=generator).to(dtype)
    ids = torch.stack([torch.randperm(8, generator=generator)[:2] for _ in range(7)])
    return model, PAGE.experts_of(model)[0], (hidden, ids, torch.rand((7, 2), generator=generator))


def run(model, layer, inputs, implementation="colibri"):
    model.set_experts_implementation(implementation)
    return layer(*inputs)


def exactly(layer, inputs):
    """Run a copy in float64, by transformers' own loop."""
    twin = copy.deepcopy(layer).double()
    twin.config._experts_implementation = "eager"
    return twin(inputs[0].double(), inputs[1], inputs[2].double())


def close(found, expected, share=2e-6):
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert float((found - expected).abs().max()) <= share * float(expected.abs().max())


@pytest.mark.parametrize("family", PAGE.families())
def test_every_family_answers_as_eager_or_is_refused(family):
    row = PAGE.row_of(family)
    if family in REFUSED:
        assert row.verdict.startswith("refused")
    else:
        assert row.verdict == "runs"


@pytest.mark.parametrize("family", [family for family in PAGE.families() if family not in REFUSED | HEADLESS])
def test_generate_gives_the_same_ids(family):
    model = PAGE.small_model(family)
    options = {"max_new_tokens": 64, "min_new_tokens": 64, "do_sample": False, "pad_token_id": 0}
    found = {}
    for implementation in ("eager", "colibri", "colibri-float32"):
        model.set_experts_implementation(implementation)
        found[implementation] = model.generate(ids_of(2, 5), **options)
    assert found["eager"].shape == (2, 69)
    assert torch.equal(found["colibri"], found["eager"])
    assert torch.equal(found["colibri-float32"], found["eager"])


@pytest.mark.parametrize("family", sorted(HEADLESS))
def test_a_family_without_a_head_cannot_generate(family):
    assert not PAGE.small_model(family).can_generate()


@pytest.mark.parametrize("family", [*KINDS, "openai_privacy_filter", "beam"])
def test_bfloat16_is_at_least_as_close_to_float64_as_eager(family):
    model, layer, _ = layer_of(family, torch.bfloat16)
    hidden = torch.randn((64, 32), generator=torch.Generator().manual_seed(4)).bfloat16()
    ids = torch.stack([torch.randperm(8)[:2] for _ in range(64)])
    inputs = (hidden, ids, torch.full((64, 2), 0.5, dtype=torch.bfloat16))
    eager = run(model, layer, inputs, "eager")
    names = ("colibri", "colibri-bfloat16", "colibri-float32", "colibri-exact")
    in_place, packed, wide, exact = (run(model, layer, inputs, name) for name in names)
    assert torch.equal(in_place, packed)
    assert torch.equal(wide, exact)
    assert torch.equal(in_place, exact) == (family == "openai_privacy_filter")  # whose eager form is float32 inside
    right = exactly(layer, inputs)
    bound = (eager - right).square().mean()
    for value in (in_place, exact):
        assert value.dtype == torch.bfloat16
        assert (value - right).square().mean() <= bound
    assert (exact - right).square().mean() <= (in_place - right).square().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("implementation", ["colibri", "colibri-float32", "colibri-int8"])
def test_batch_and_threads_leave_every_bit(dtype, implementation):
    model = PAGE.small_model("olmoe").to(dtype)
    prompts = ids_of(8, 11)
    model.set_experts_implementation(implementation)
    seen = []
    layer = PAGE.experts_of(model)[0]
    hook = layer.register_forward_hook(lambda _, inputs, output: seen.append((*inputs, output)))
    for threads in (1, 2):
        torch.set_num_threads(threads)
        model(prompts[:1])
        model(prompts)
    hook.remove()
    (hidden, ids, weights, alone), *_ = seen
    for batch_hidden, batch_ids, batch_weights, output in seen:
        if torch.equal(batch_hidden[:11], hidden):  # what the attention before gives does depend on the batch, at times
            assert torch.equal(output[:11], alone)
        together = torch.cat([hidden, batch_hidden]), torch.cat([ids, batch_ids]), torch.cat([weights, batch_weights])
        assert torch.equal(layer(*together)[:11], alone)


def test_weights_in_place_take_no_memory_and_follow_every_change():
    model, layer, inputs = layer_of()
    before = len(STORE)
    run(model, layer, inputs)
    assert len(STORE) == before + 1
    for change in (
        lambda: layer.gate_up_proj.mul_(1.5),
        lambda: layer.down_proj.data.mul_(0.5),
        lambda: setattr(layer, "gate_up_proj", torch.nn.Parameter(layer.gate_up_proj * 2)),
        lambda: setattr(layer.down_proj, "data", layer.down_proj.data * 3),
        lambda: layer.load_state_dict({k: v + 0.1 for k, v in layer.state_dict().items()}),
        lambda: layer.load_state_dict({k: v + 0.1 for k, v in layer.state_dict().items()}, assign=True),
    ):
        change()
        close(run(model, layer, inputs), run(model, layer, inputs, "eager"))
    assert len(STORE) == before + 1


@pytest.mark.parametrize("pack", ["float32", "bfloat16"])
def test_packed_weights_follow_every_change_that_pytorch_counts(pack):
    model, layer, inputs = layer_of()
    name = f"colibri-{pack}"
    share = 2e-6 if pack == "float32" else 2e-2
    before = len(STORE)
    for change in (
        lambda: None,
        lambda: layer.gate_up_proj.mul_(1.5),
        lambda: setattr(layer, "gate_up_proj", torch.nn.Parameter(layer.gate_up_proj * 2)),
        lambda: setattr(layer.down_proj, "data", layer.down_proj.data * 3),
        lambda: layer.load_state_dict({k: v * 1.1 for k, v in layer.state_dict().items()}),
        lambda: layer.load_state_dict({k: v * 1.1 for k, v in layer.state_dict().items()}, assign=True),
    ):
        change()
        close(run(model, layer, inputs, name), run(model, layer, inputs, "eager"), share)
    layer.down_proj.data.mul_(2)  # behind PyTorch's back
    forget()
    close(run(model, layer, inputs, name), run(model, layer, inputs, "eager"), share)
    assert len(STORE) <= before + 1


def test_to_another_type_and_back():
    model, layer, (hidden, ids, weights) = layer_of()
    for dtype in (torch.bfloat16, torch.float32, torch.bfloat16, torch.float32):
        model.to(dtype)
        inputs = (hidden.to(dtype), ids, weights.to(dtype))
        for name in ("colibri", "colibri-float32"):
            close(
                run(model, layer, inputs, name),
                run(model, layer, inputs, "eager"),
                2e-6 if dtype == torch.float32 else 2e-2,
            )


def test_copies_and_pickles_are_their_own():
    model, layer, inputs = layer_of()
    for name in ("colibri", "colibri-float32"):
        first = run(model, layer, inputs, name)
        twin = copy.deepcopy(model)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        for other in (twin, loaded):
            theirs = PAGE.experts_of(other)[0]
            assert torch.equal(run(other, theirs, inputs, name), first)
            theirs.down_proj.mul_(2)
            assert torch.equal(run(other, theirs, inputs, name), 2 * first)
        assert torch.equal(run(model, layer, inputs, name), first)


def test_experts_go_with_the_module():
    forget()
    model, layer, inputs = layer_of()
    for name in ("colibri", "colibri-float32", "colibri-int4"):
        run(model, layer, inputs, name)
    assert len(STORE) == 3
    storage = weakref.ref(layer.gate_up_proj.untyped_storage())
    del model, layer
    gc.collect()
    assert storage() is None
    assert len(STORE) == 0


def test_many_threads_may_come_first():
    model, layer, inputs = layer_of()
    expected = run(model, layer, inputs, "colibri-float32").clone()
    forget()
    found, barrier = [], threading.Barrier(4)

    def call():
        barrier.wait()
        with torch.no_grad():
            found.extend(layer(*inputs) for _ in range(20))

    every = [threading.Thread(target=call) for _ in range(4)]
    for thread in every:
        thread.start()
    for thread in every:
        thread.join()
    assert len(found) == 80
    assert all(torch.equal(value, expected) for value in found)
    assert len(STORE) == 1


@pytest.mark.parametrize("family", ["olmoe", "gpt_oss"])
def test_ids_past_the_last_expert_are_skipped(family):
    model, layer, (hidden, ids, weights) = layer_of(family)
    some = ids.clone()
    some[::2, 0] = 8
    some[1, 1] = 11
    found = run(model, layer, (hidden, some, weights))
    expected = run(model, layer, (hidden, ids, torch.where(some >= 8, 0.0, weights)), "eager")
    close(found, expected)
    assert torch.equal(run(model, layer, (hidden, torch.full_like(ids, 8), weights)), torch.zeros_like(hidden))


def test_inputs_of_any_stride_and_float_type():
    model, layer, (hidden, ids, weights) = layer_of()
    expected = run(model, layer, (hidden, ids, weights))
    strided = torch.stack([hidden, hidden], dim=2)[..., 0], ids.T.contiguous().T, torch.stack([weights] * 2, 2)[..., 1]
    assert not any(tensor.is_contiguous() for tensor in strided)
    assert torch.equal(run(model, layer, strided), expected)
    assert torch.equal(run(model, layer, (hidden, ids.int(), weights.double())), expected)
    half = run(model, layer, (hidden.half(), ids, weights))
    close(half, expected.half(), 2e-3)
    empty = run(model, layer, (hidden[:0], ids[:0], weights[:0]))
    assert empty.shape == (0, 32)
    assert hidden.equal(strided[0])  # inputs are not written


def test_weights_of_a_mapped_file_run_where_they_are(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model, layer, inputs = layer_of("gpt_oss", torch.bfloat16)
    expected = run(model, layer, (inputs[0], inputs[1], inputs[2].bfloat16()), "eager")
    safetensors.save_file({"a": torch.zeros(3, dtype=torch.bfloat16), **layer.state_dict()}, tmp_path / "a.safetensors")
    tensors = safetensors.load_file(tmp_path / "a.safetensors")
    layer.load_state_dict({name: tensors[name] for name in layer.state_dict()}, assign=True)
    assert any(parameter.data_ptr() % 64 for parameter in layer.parameters())
    close(run(model, layer, (inputs[0], inputs[1], inputs[2].bfloat16())), expected, 2e-2)


def test_gradients_are_refused_where_they_are_wanted():
    model, layer, inputs = layer_of()
    model.set_experts_implementation("colibri")
    with torch.enable_grad():
        with pytest.raises(InvalidInput, match=r"(?s)no gradients.*OlmoeExperts.*no_grad.*eager"):
            model(ids_of(1, 5))
        model.requires_grad_(False)
        assert model(ids_of(1, 5)).logits.shape == (1, 5, 64)
        with pytest.raises(InvalidInput, match="no gradients"):
            layer(inputs[0].requires_grad_(), *inputs[1:])


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("implementation", ["colibri", "colibri-float32"])
def test_a_compiled_function_serves_every_layer_and_change(backend, implementation, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    model = PAGE.small_model("deepseek_v4")
    first, second = PAGE.experts_of(model)
    first.limit, second.limit = 0.5, 2.0
    inputs = layer_of()[2]
    compiled = torch.compile(lambda layer, *inputs: layer(*inputs), fullgraph=True, backend=backend)
    forget()

    def check(layer):
        expected = run(model, layer, inputs, "eager")
        model.set_experts_implementation(implementation)
        close(compiled(layer, *inputs), expected)

    check(first)
    check(second)
    assert len(STORE) == 2  # made once a layer, not once a call
    first.limit = 1.0
    check(first)
    first.gate_up_proj.mul_(1.5)
    check(first)
    first.down_proj = torch.nn.Parameter(first.down_proj * 2)
    check(first)
    first.act_fn = torch.nn.ReLU()
    check(first)
    torch._dynamo.reset()


def test_a_compiled_model_generates():
    model = PAGE.small_model("olmoe")
    expected = PAGE.answer(model, "eager", ids_of(2, 9))
    torch._dynamo.reset()
    model.set_experts_implementation("colibri")
    close(torch.compile(model, fullgraph=True, backend="eager")(ids_of(2, 9)).logits, expected, 2e-5)
    torch._dynamo.reset()


def test_pytorchs_own_threads_do_the_work_where_it_uses_as_many():
    team = Team()
    for threads, of_pytorch, hosted in ((2, 2, True), (2, 3, False), (1, 1, False)):
        torch.set_num_threads(of_pytorch)
        assert (team.address(threads) != 0) == hosted
    team.after_fork()
    torch.set_num_threads(2)
    assert team.address(2) == 0


FORKED = """
import os, signal, warnings
import torch
from transformers import AutoModelForCausalLM, OlmoeConfig
from colibri_cli.integrations.transformers import register
warnings.simplefilter("ignore")
register()
torch.manual_seed(0)
sizes = {"hidden_size": 256, "intermediate_size": 256, "num_experts": 8, "num_hidden_layers": 1, "vocab_size": 64}
config = OlmoeConfig(**sizes, eos_token_id=1, pad_token_id=0, num_attention_heads=2, num_key_value_heads=2)
model = AutoModelForCausalLM.from_config(config, experts_implementation="colibri").eval()
layer = model.model.layers[0].mlp.experts
torch.set_num_threads(2)
hidden, ids = torch.randn((64, 256)), torch.arange(128).reshape(64, 2) % 8
weights = torch.full((64, 2), 0.5)
with torch.inference_mode():
    before = layer(hidden, ids, weights)
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        os._exit(0 if (layer(hidden, ids, weights) == before).all().item() else 3)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(layer(hidden, ids, weights), before)
"""


def test_a_forked_child_has_threads_again():
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr[-500:]) == (0, "")


def test_the_layers_that_an_implementation_runs():
    assert layers(PAGE.small_model("olmoe")) == [f"model.layers.{i}.mlp.experts" for i in (0, 1)]
    transformers = importlib.import_module("transformers")
    with pytest.raises(InvalidInput, match="SwitchTransformersModel, where nothing does"):
        layers(
            transformers.SwitchTransformersModel(transformers.SwitchTransformersConfig(d_model=16, num_heads=2, d_ff=8))
        )


def test_meta_tensors_give_shapes():
    model, layer, inputs = layer_of()
    model.set_experts_implementation("colibri")
    model.to("meta")
    assert layer(*(tensor.to("meta") for tensor in inputs)).shape == (7, 32)
    with pytest.raises(InvalidInput, match="on the CPU"):
        layer(*inputs)


@pytest.mark.parametrize("pack", PACKS)
def test_packed_weights_come_as_near_as_their_type(pack):
    model, layer, inputs = layer_of()
    expected = run(model, layer, inputs, "eager")
    error = (
        run(model, layer, inputs, f"colibri-{pack}") - expected
    ).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error < {"float32": 1e-6, "bfloat16": 5e-3, "int8": 2e-2, "int4": 0.2}[pack]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ["colibri", "colibri-float32"])
def test_an_update_is_seen_through_a_parameter_that_wraps_the_same_memory_anew(name, mode):
    model, layer, inputs = layer_of()
    layer.down_proj = torch.nn.Parameter(layer.down_proj.data, requires_grad=False)
    with mode():
        before = run(model, layer, inputs, name)
    layer.down_proj.mul_(2)
    layer.down_proj = torch.nn.Parameter(layer.down_proj.data, requires_grad=False)
    with mode():
        assert torch.equal(run(model, layer, inputs, name), before * 2)


@pytest.mark.parametrize("name", ["colibri", "colibri-float32", "colibri-int8"])
@pytest.mark.parametrize("family", ["olmoe", "gpt_oss"])
def test_a_fused_optimizers_step_is_seen_though_pytorch_does_not_count_it(family, name):
    model, layer, inputs = layer_of(family)
    with torch.enable_grad():
        parameters = [parameter.requires_grad_() for parameter in layer.parameters()]
        optimizer = torch.optim.AdamW(parameters, lr=0.05, fused=True)
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        now = run(model, layer, inputs, name)
        forget()
        assert torch.equal(run(model, layer, inputs, name), now)


def test_a_biass_gradient_is_refused_too():
    model, layer, inputs = layer_of("gpt_oss")
    model.set_experts_implementation("colibri")
    model.requires_grad_(False)
    layer.down_proj_bias.requires_grad_()
    with torch.enable_grad(), pytest.raises(InvalidInput, match="no gradients"):
        layer(*inputs)


@pytest.mark.parametrize("name", ["hidden_states", "weight"])
def test_forward_mode_gradients_are_refused(name):
    model, layer, (hidden, ids, weights) = layer_of()
    model.set_experts_implementation("colibri")

    def call(value):
        if name == "hidden_states":
            return layer(value, ids, weights)
        return torch.func.functional_call(layer, {"down_proj": value}, (hidden, ids, weights))

    value = hidden if name == "hidden_states" else layer.down_proj.detach()
    with pytest.raises(InvalidInput, match=r"Expected a call that needs no gradients.*got tensors with tangents"):
        torch.func.jvp(call, (value,), (torch.ones_like(value),))
    assert torch.equal(call(value), run(model, layer, (hidden, ids, weights)))


def test_an_activation_that_is_changed_where_it_is():
    model, layer, inputs = layer_of()
    layer.act_fn = torch.nn.GELU()
    for change in (
        lambda: setattr(layer.act_fn, "approximate", "tanh"),
        lambda: layer.act_fn.register_forward_hook(lambda *_: torch.zeros(())),
    ):
        close(run(model, layer, inputs, "colibri"), run(model, layer, inputs, "eager"))
        change()
    with pytest.raises(InvalidInput, match="none of them"):
        run(model, layer, inputs, "colibri")


@pytest.mark.parametrize("name", ["colibri", "colibri-float32"])
@pytest.mark.parametrize("n_bytes", [0, 4096])
def test_a_storage_that_was_made_smaller(name, n_bytes):
    model, layer, inputs = layer_of()
    run(model, layer, inputs, name)
    layer.down_proj.untyped_storage().resize_(n_bytes)
    with pytest.raises(InvalidInput, match="within their storages"):
        run(model, layer, inputs, name)


@pytest.mark.parametrize("family", ["olmoe", "gpt_oss"])
@pytest.mark.parametrize("name", ["colibri", "colibri-float32"])
def test_float16_weights_run_in_place_and_packed(family, name):
    model, layer, inputs = layer_of(family, torch.float16)
    close(run(model, layer, inputs, name), exactly(layer, inputs).half(), 1e-3)


def scaled_layer(inter=128, **options):
    """Give transformers' own FP8 experts, with random numbers and scales, and those numbers as it decodes them."""
    transformers, fp8 = (
        importlib.import_module(f"transformers{name}") for name in ("", ".integrations.finegrained_fp8")
    )
    config = transformers.Qwen3MoeConfig(hidden_size=256, moe_intermediate_size=inter, num_experts=4)
    config._experts_implementation = "colibri"
    decorate = importlib.import_module("transformers.integrations.moe").use_experts_implementation
    made = decorate(type("FP8Experts", (fp8.FP8Experts,), {}), experts_interface=fp8.ALL_FP8_EXPERTS_FUNCTIONS)
    layer = made(config=config, **({"block_size": (128, 128)} | options))
    torch.manual_seed(0)
    decoded = []
    for name in ("gate_up_proj", "down_proj"):
        weight, scale = getattr(layer, name), getattr(layer, f"{name}_scale_inv")
        weight.copy_((torch.randn(weight.shape) * 50).to(weight.dtype))
        scale.copy_((torch.rand(scale.shape) * 2e-3 + 1e-3).to(scale.dtype))
        decoded.append(fp8.Fp8Dequantize(None)._dequantize_one(weight, scale, torch.float32))
    return layer, decoded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [{}, {"inter": 24}, {"scale_fmt": "ue8m0"}, {"block_size": None}, {"expert_dtype": "fp4", "scale_fmt": "ue8m0"}],
    ids=str,
)
def test_block_scaled_experts_are_decoded_as_transformers_decodes_them(options, dtype):
    layer, (up, down) = scaled_layer(**options)
    hidden = torch.randn((5, 256), generator=torch.Generator().manual_seed(1)).to(dtype)
    ids, weights = torch.tensor([[0, 1], [3, 2], [1, 1], [2, 0], [3, 0]]), torch.full((5, 2), 0.5)
    name = str(dtype).removeprefix("torch.")
    experts = Experts.from_arrays(up.to(dtype), down.to(dtype), dtype=name, intermediate_dtype=name)
    expected = torch.from_numpy(experts.run(hidden.float(), ids, weights)).to(dtype)
    assert torch.equal(layer(hidden, ids, weights), expected)
    layer.down_proj_scale_inv.copy_((layer.down_proj_scale_inv.float() * 2).to(layer.down_proj_scale_inv.dtype))
    assert torch.equal(layer(hidden, ids, weights), expected * 2)


@pytest.mark.parametrize("inter", [192, 160])
def test_a_block_across_gate_and_up_is_refused(inter):
    layer = scaled_layer(256)[0]
    layer.gate_up_proj = torch.nn.Parameter(layer.gate_up_proj[:, : 2 * inter].clone())
    layer.gate_up_proj_scale_inv = torch.nn.Parameter(layer.gate_up_proj_scale_inv[:, :3].clone())
    layer.down_proj = torch.nn.Parameter(layer.down_proj[..., :inter].clone())
    with pytest.raises(InvalidInput, match=r"(?s)a scale for each block, \(4, 2\).*FP8Experts.gate_up_proj_scale_inv"):
        layer(torch.zeros((1, 256)), torch.zeros((1, 1), dtype=torch.int64), torch.ones((1, 1)))


class Squashed(torch.nn.Module):
    def forward(self, x):
        return torch.tanh(x)


class Slightly(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.silu(x) * 1.0001


@pytest.mark.parametrize("act", [Squashed(), Slightly(), torch.nn.Hardswish(), torch.nn.ReLU6()])
def test_an_unknown_activation_is_refused_by_name(act):
    model, layer, inputs = layer_of()
    layer.act_fn = act
    with pytest.raises(
        InvalidInput, match=rf'(?s){type(act).__name__} - at OlmoeExperts.*set_experts_implementation\("eager"\)'
    ):
        run(model, layer, inputs)


@pytest.mark.parametrize(
    "gate",
    [
        lambda layer, x: x.chunk(2, dim=-1)[0] * layer.act_fn(x.chunk(2, dim=-1)[1]),  # up first
        lambda layer, x: layer.act_fn(x.chunk(2, dim=-1)[0]).clamp(max=7) * x.chunk(2, dim=-1)[1],
        lambda layer, x: layer.act_fn(x.chunk(2, dim=-1)[0]),
        lambda _, x: x.relu(),
        lambda layer, x: layer.nothing(x),
    ],
)
def test_an_unknown_gate_is_refused_by_the_classs_name(gate):
    model, layer, inputs = layer_of()
    layer.__class__ = type("HomeMadeExperts", (type(layer),), {"_apply_gate": gate})
    with pytest.raises(InvalidInput, match="HomeMadeExperts"):
        run(model, layer, inputs)


def test_a_subclass_is_known_by_what_it_does(monkeypatch):
    model, layer, inputs = layer_of()
    layer.limit = 0.25

    def gate(self, both):
        first, second = both[..., ::2].clamp(max=self.limit), both[..., 1::2].clamp(-self.limit, self.limit)
        return torch.nn.functional.gelu(first) * (second + 1)

    monkeypatch.setattr(type(layer), "_apply_gate", gate)
    rule = Rule.parse(rule_of(layer))
    assert (rule.activation, rule.interleaved, rule.beta, rule.limit) == ("gelu", True, 1.0, 0.25)
    close(run(model, layer, inputs), run(model, layer, inputs, "grouped_mm"))


def test_a_norm_after_the_experts_is_refused():
    model, layer, inputs = layer_of()
    layer.has_post_expert_norm = True
    with pytest.raises(InvalidInput, match=r"(?s)has_post_expert_norm.*at OlmoeExperts.*eager"):
        run(model, layer, inputs)


@pytest.mark.parametrize(
    ("options", "at"),
    [
        ({"pack": "int3"}, "pack"),
        ({"threads": 0}, "threads"),
        ({"name": "eager"}, "name"),
        ({"name": "grouped_mm"}, "name"),
    ],
)
def test_register_checks_its_options(options, at):
    with pytest.raises(InvalidInput, match=f"at {at}"):
        register(**options)


def test_the_page_is_the_generators():
    version = importlib.import_module("transformers").__version__
    if f"transformers {version};" not in PAGE.PAGE.read_text("utf-8"):
        pytest.skip(f"the page is of another transformers than {version}")
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "families_page.py", "--check"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_families_apart_have_the_class_that_the_page_names():
    for family, name in PAGE.APART.items():
        assert hasattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)


def test_the_example_says_the_same_with_both(tmp_path):
    example = ROOT / "examples" / "transformers_backend.py"
    output = subprocess.run([sys.executable, example], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    lines = dict(line.split(maxsplit=1) for line in output.splitlines())
    assert lines.keys() == {"eager", "colibri", "colibri-int8"}
    assert lines["eager"] == lines["colibri"]


def test_an_import_registers_nothing():
    code = (
        "import colibri_cli.integrations.transformers as t\n"
        "from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS as every\n"
        "assert 'colibri' not in every\nt.register()\nassert 'colibri' in every"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)
