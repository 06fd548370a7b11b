"""Bundles of MoE layers: what is written is what runs, and what contradicts it is refused."""

import json
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from reference import Classifier, Ffns, numbers

from colibri_cli import Experts, InvalidInput, Model, MoELayer, Router, SharedExpert, UsageError, _core
from colibri_cli.formats.packed import PackedHeader, write_packed
from colibri_cli.layer_bundle import bundle_config, layer_bundle, load_layer_bundle
from colibri_cli.validate import validate_file

LOADINGS = ("mmap", "static", "on-demand")
DTYPES = ("float32", "bfloat16", "int8", "int4")
CASES = Path(__file__).parents[1] / "cli" / "validate_config"
E, H, I, T = 8, 40, 24, 11  # noqa: E741 - the sizes' usual letters
X = numbers(2, T, H)


@dataclass(frozen=True)
class Gate:
    kind: str = "softmax-topk"
    renormalize: bool = True
    scale: float = 1.0
    bias: bool = False
    correction_bias: bool = False
    n_groups: int = 1
    topk_groups: int = 1
    group_score: str = "top2"
    masked_score: float = -math.inf
    epsilon: float = 1e-20


@dataclass(frozen=True)
class Shared:
    intermediate_size: int
    gated: bool


@dataclass(frozen=True)
class Plan:
    """What a reader of checkpoints says of a model."""

    family: str = "some_moe"
    hidden_size: int = H
    intermediate_size: int = I
    n_experts: int = E
    top_k: int = 3
    activation: str = "silu"
    gated: bool = True
    alpha: float = 1.0
    beta: float = 0.0
    limit: float | None = None
    biased: bool = False
    router: Gate = Gate()
    shared: Shared | None = None
    layers: tuple[int, ...] = (1, 4)

    def ffns(self, seed, n, inter, *, bias):
        rule = {"activation": self.activation, "alpha": self.alpha, "beta": self.beta, "limit": self.limit}
        return Ffns.make(seed, n, self.hidden_size, inter, bias=bias, gated=self.gated, **rule)


class Layer:
    """A layer's weights, as arrays and as files."""

    def __init__(self, plan, layer):
        seed, self.plan = 100 * (layer + 1), plan
        self.experts = plan.ffns(seed, E, plan.intermediate_size, bias=plan.biased)
        self.shared = plan.shared and plan.ffns(seed + 10, 1, plan.shared.intermediate_size, bias=False)
        self.weight = numbers(seed + 20, E, H)
        self.bias = numbers(seed + 21, E) if plan.router.bias else None
        self.correction = numbers(seed + 22, E) if plan.router.correction_bias else None
        self.gate = numbers(seed + 23, H) if plan.shared and plan.shared.gated else None

    def of_arrays(self, dtype, **options):
        rule = {name: value for name, value in vars(self.plan.router).items() if "bias" not in name}
        router = Router.from_array(
            self.weight, self.bias, correction_bias=self.correction, top_k=self.plan.top_k, **rule
        )
        experts = Experts.from_arrays(**self.experts.arrays(), dtype=dtype, **options)
        shared = self.shared and Experts.from_arrays(**self.shared.arrays(), dtype=dtype, **options)
        shared = shared and SharedExpert(shared, self.gate)
        return MoELayer(router, experts, shared=shared)

    def write(self, folder, config):
        (folder / "experts").mkdir(parents=True)
        arrays = {"router_weights": self.weight, "router_bias": self.bias, "correction_bias": self.correction}
        for name, array in (arrays | {"shared_gate": self.gate}).items():
            if array is not None:
                (folder / f"{name}.bin").write_bytes(array.astype("<f4").tobytes())
        names = [folder / name for name in config.expert_names]
        write(names, self.experts, config.shape)
        if self.shared is not None:
            write([folder / "shared.bin"], self.shared, config.shared_shape)


def write(names, ffns, shape):
    sizes, activation = (shape.hidden_size, shape.intermediate_size), _core.ACTIVATIONS[shape.activation]
    rule = (shape.alpha, shape.beta, shape.limit)
    kernel = _core.ExpertKernel(*sizes, activation, shape.gated, *rule, 1, 512, _core.DTYPES[shape.dtype])
    for e, name in enumerate(names):
        biases = [None if b is None else b[e] for b in (ffns.up_bias, ffns.down_bias)]
        expert = kernel.pack(ffns.up[e], ffns.down[e], *biases)
        write_packed(name, PackedHeader(shape, ffns.up_bias is not None), memoryview(expert))


def bundle_of(plan, folder, dtype="float32"):
    config = bundle_config(plan, dtype)
    for layer in plan.layers:
        Layer(plan, layer).write(folder / f"layers/{layer}", layer_bundle(config))
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


PLANS = {
    "plain": Plan(),
    "gpt-oss": Plan(biased=True, limit=7.0, alpha=1.702, beta=1.0, router=Gate("topk-softmax", bias=True)),
    "grouped, with a shared expert": Plan(
        router=Gate("sigmoid-topk", scale=2.5, correction_bias=True, n_groups=4, topk_groups=2),
        shared=Shared(56, False),
    ),
    "masked by 0": Plan(
        router=Gate("sigmoid-topk", correction_bias=True, n_groups=4, topk_groups=2, masked_score=0.0), top_k=2
    ),
    "group by its best": Plan(
        router=Gate("softmax-topk", renormalize=False, n_groups=4, topk_groups=3, group_score="max", scale=16.0)
    ),
    "gated shared expert": Plan(shared=Shared(20, True), router=Gate(renormalize=False)),
    "square roots": Plan(router=Gate("sqrtsoftplus-topk", correction_bias=True, epsilon=1e-6)),
    "by logit": Plan(router=Gate("topk-sigmoid", epsilon=0.0), activation="gelu_tanh"),
    "ungated": Plan(activation="relu2", gated=False, shared=Shared(17, False), biased=True),
}


@pytest.fixture
def folder(tmp_path):
    return bundle_of(PLANS["gated shared expert"], tmp_path / "bundle", "int8")


# ---------------------------------------------------------------- what runs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_layer_of_files_is_the_layer_of_arrays(plan, dtype, tmp_path):
    bundle = bundle_of(plan, tmp_path / "bundle", dtype)
    assert validate_file(bundle, check_files=True) == []
    for number in plan.layers:
        expected = Layer(plan, number).of_arrays(dtype)(X)
        for loading in LOADINGS:
            layer = MoELayer.open(bundle, number, loading=loading, cache_experts=2, threads=2, max_tokens=5)
            assert layer(X).tobytes() == expected.tobytes(), (number, loading)


def test_layers_differ(folder):
    assert (MoELayer.open(folder, 1)(X) != MoELayer.open(folder, 4)(X)).any()


def test_options_arrive(folder):
    layer = MoELayer.open(folder, 4, loading="on-demand", cache_experts=2, threads=1)
    layer(X)
    assert layer.experts.threads == layer.shared.expert.threads == 1
    assert layer.experts.stats()["resident"] == 2
    assert (layer.shared.expert.stats()["misses"], layer.experts.shape.dtype) == (1, "int8")
    with pytest.raises(InvalidInput, match="loading"):
        MoELayer.open(folder, 4, loading="lazy")


@pytest.mark.parametrize("loading", LOADINGS)
def test_narrow_states_of_files_are_those_of_arrays(loading, tmp_path):
    plan = PLANS["gated shared expert"]
    bundle = bundle_of(plan, tmp_path / "bundle", "bfloat16")
    layer = MoELayer.open(bundle, 4, loading=loading, intermediate_dtype="bfloat16")
    narrow = Layer(plan, 4).of_arrays("bfloat16", intermediate_dtype="bfloat16")(X)
    np.testing.assert_array_equal(layer(X), narrow)
    assert (narrow != Layer(plan, 4).of_arrays("bfloat16")(X)).any()
    with pytest.raises(InvalidInput, match="at intermediate_dtype"):
        MoELayer.open(bundle, 4, loading=loading, intermediate_dtype="int8")


def test_a_swapped_expert(folder):
    layer = MoELayer.open(folder, 1)
    for e in range(E):
        layer.experts.replace(e, folder / f"layers/4/experts/expert_{e}.bin")
    other = MoELayer.open(folder, 4)
    routing = other.router.route(X)
    one, same = (m.experts.run(X, routing.expert_ids, routing.expert_weights) for m in (layer, other))
    np.testing.assert_array_equal(one, same)


# ---------------------------------------------------------------- the config


def test_a_config_survives(tmp_path):
    for plan in PLANS.values():
        (tmp_path / "config.json").write_text(json.dumps(bundle_config(plan, "int4")))
        config = load_layer_bundle(tmp_path / "config.json")
        assert vars_of(config.router) == vars_of(plan.router)
        assert (config.shared and vars_of(config.shared)) == (plan.shared and vars_of(plan.shared))
        for name, value in vars_of(plan).items():
            if name not in ("router", "shared"):
                assert getattr(config, name) == value
        assert (config.dtype, config.task, config.schema_version) == ("int4", "moe-layers", 1)
        assert hash(config) is not None


def vars_of(value):
    return {name: getattr(value, name) for name in type(value).__dataclass_fields__}


def test_file_sizes_by_hand():
    plan = Plan(
        biased=True, shared=Shared(20, True), router=Gate("sigmoid-topk", bias=True, correction_bias=True), top_k=1
    )
    sizes = layer_bundle(bundle_config(plan, "int8")).file_sizes(4)
    up, down = 2 * 512 + 32, 512 + 32  # panels of H = 40 inputs, 2 chunks, and of I = 24, 1 chunk; 16 scales each
    panels = 2 * 2 * up + 3 * down
    experts = 64 + panels + 4 * (2 * I + H)
    assert sizes == {
        "layers/4/router_weights.bin": 4 * E * H,
        "layers/4/router_bias.bin": 4 * E,
        "layers/4/correction_bias.bin": 4 * E,
        "layers/4/shared.bin": 64 + panels,
        "layers/4/shared_gate.bin": 4 * H,
        **{f"layers/4/experts/expert_{e}.bin": experts for e in range(E)},
    }


@pytest.mark.parametrize("layer", [0, 2, 5, -1, 1.0, "1", True])
def test_a_layer_that_is_not_there(layer, folder):
    with pytest.raises(InvalidInput, match="at layer"):
        MoELayer.open(folder, layer)


def test_the_layers_of_a_large_bundle_are_not_all_listed():
    config = layer_bundle(bundle_config(replace(Plan(), layers=tuple(range(3, 62))), "int8"))
    with pytest.raises(InvalidInput, match=r"one of the layers 3, 4, 5, 6, \.\.\., 59, 60, 61, got 0"):
        config.file_sizes(0)


# ---------------------------------------------------------------- two tasks


def test_a_model_is_not_made_of_layers(folder):
    with pytest.raises(
        InvalidInput, match=r'of task "token-classification", got "moe-layers" - at .*\n.*MoELayer.open'
    ):
        Model.open(folder)
    with pytest.raises(InvalidInput, match="moe-layers"):
        Experts.open(folder)


@pytest.mark.parametrize("loading", LOADINGS)
@pytest.mark.parametrize("kind", ["topk-softmax", "softmax-topk"])
def test_a_classifier_has_one_layer(kind, loading, tmp_path):
    bundle = Classifier.make(kind=kind).write(tmp_path / "bundle")
    layer, x = MoELayer.open(bundle, loading=loading), numbers(2, T, 24)
    np.testing.assert_array_equal(layer(x), Model.open(bundle).layer(x))
    with pytest.raises(InvalidInput, match="at layer"):
        MoELayer.open(bundle, 1)
    with pytest.raises(InvalidInput, match=r'of task "moe-layers", got "token-classification"'):
        load_layer_bundle(bundle / "config.json")


# ---------------------------------------------------------------- what is refused

FILES = ("router_weights", "router_bias", "correction_bias", "shared", "shared_gate", "experts/expert_3")
FULL = Plan(shared=Shared(20, True), router=Gate("sigmoid-topk", bias=True, correction_bias=True))


@pytest.mark.parametrize("loading", LOADINGS)
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_missing_or_of_another_size(name, loading, tmp_path):
    path = bundle_of(FULL, tmp_path / "bundle") / f"layers/4/{name}.bin"
    size = path.stat().st_size
    for other in (0, size - 1, size + 4, 1 << 40):
        os.truncate(path, other)
        with pytest.raises(InvalidInput, match=rf"Expected {size} bytes .*, got {other} bytes - at .*{name}\.bin"):
            MoELayer.open(tmp_path / "bundle", 4, loading=loading)
        (finding,) = validate_file(tmp_path / "bundle", check_files=True)
        assert finding.expected == f"{size:,} bytes in layers/4/{name}.bin"
    path.unlink()
    with pytest.raises(UsageError, match=rf"{name}\.bin"):
        MoELayer.open(tmp_path / "bundle", 4, loading=loading)
    MoELayer.open(tmp_path / "bundle", 1, loading=loading)(X)


@pytest.mark.parametrize("key", ["alpha", "activation"])
@pytest.mark.parametrize("loading", LOADINGS)
def test_experts_that_contradict_the_config(loading, key, folder):
    config = (
        json.loads((folder / "config.json").read_text())
        | {"alpha": {"alpha": 1.5}, "activation": {"activation": "gelu"}}[key]
    )
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidInput, match=f"Expected {key} .*, as the layer has"):
        MoELayer.open(folder, 1, loading=loading)


def test_a_raw_expert_is_no_part_of_a_bundle_of_layers(folder):
    (folder / "layers/1/experts/expert_0.bin").write_bytes(bytes(4 * (3 * H * I + 2 * I + H)))
    with pytest.raises(InvalidInput, match=r"as config\.json says"):
        MoELayer.open(folder, 1)


def test_missing_layers_are_one_finding_each(tmp_path):
    bundle = bundle_of(Plan(layers=(0, 1, 7)), tmp_path / "bundle")
    (bundle / "layers/1").rename(bundle / "layers/2")
    for expert in (bundle / "layers/7/experts").iterdir():
        expert.unlink()
    found = [(f.pointer, f.expected, f.found) for f in validate_file(bundle, check_files=True)]
    experts = "8 expert files, layers/7/experts/expert_0.bin to layers/7/experts/expert_7.bin"
    assert sorted(found) == [
        ("$.artifact", experts, "none of them"),
        ("$.layers[1]", "the folder layers/1", "none"),
    ]


def test_an_unfinished_bundle(folder):
    (folder / "config.json").unlink()
    with pytest.raises(UsageError, match=r"config\.json"):
        MoELayer.open(folder, 1)
    with pytest.raises(UsageError, match="no such folder"):
        MoELayer.open(folder / "none", 1)


def test_a_router_that_is_not_finite(folder):
    path = folder / "layers/1/router_weights.bin"
    weight = np.fromfile(path, "<f4")
    weight[5] = np.nan
    weight.tofile(path)
    with pytest.raises(InvalidInput, match="finite"):
        MoELayer.open(folder, 1)


@pytest.mark.parametrize("case", sorted((CASES / "bad").glob("layers_router_*.json")), ids=lambda path: path.stem)
def test_what_the_check_says_of_a_gate_is_what_a_router_says(case):
    """Options that do not go together are known to both, each by its own words."""
    config = json.loads(case.read_text())
    rule, n_experts, top_k = config["router"], config["n_experts"], config["top_k"]
    rule["masked_score"] = -math.inf if rule["masked_score"] is None else 0.0
    assert not rule.pop("bias")
    correction = np.zeros(n_experts, np.float32) if rule.pop("correction_bias") else None
    weight = np.ones((n_experts, 4), np.float32)
    with pytest.raises(InvalidInput):
        Router.from_array(weight, correction_bias=correction, top_k=top_k, **rule)
