import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Classifier, integers

from colibri_cli import Balancer, InvalidInput, Model, UsageError
from colibri_cli.model import builtin_bundle

IDS = integers(1, 0, 50, 60)
SIZES = [
    {},
    {"context": 0},
    {"context": 5},
    {"context": 31, "hidden": 8},
    {"hidden": 1, "inter": 1, "n_experts": 1, "n_classes": 1, "vocab": 1, "top_k": 1},
    {"hidden": 15},
    {"hidden": 16},
    {"hidden": 65, "inter": 33},
    {"n_classes": 1},
    {"n_classes": 16},
    {"n_classes": 17},
    {"n_classes": 150},
    {"n_classes": 1024, "hidden": 8},
    {"n_experts": 17, "top_k": 5},
    {"top_k": 6, "kind": "softmax-topk"},
    {"activation": "relu", "gated": False},
    {"activation": "gelu_tanh"},
]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    classifier = Classifier.make()
    return classifier, classifier.write(tmp_path_factory.mktemp("small") / "bundle")


@pytest.fixture(scope="module")
def model(small):
    return Model.open(small[1])


def answer(model, ids, **options):
    result = model.infer(ids, **options)
    return result.probabilities.tobytes() + result.routing.expert_ids.tobytes()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_against_float64(sizes, tmp_path):
    classifier = Classifier.make(**sizes)
    ids = IDS % len(classifier.embedding)
    probabilities, chosen = classifier.infer(ids.tolist())
    result = Model.open(classifier.write(tmp_path / "bundle")).infer(ids)
    np.testing.assert_array_equal(result.routing.expert_ids, chosen)
    assert np.abs(result.probabilities - probabilities).max() < 5e-6
    np.testing.assert_array_equal(result.classes, result.probabilities.argmax(axis=1))


def test_an_inference(model):
    result = model.infer(IDS)
    assert result.ids.tolist() == IDS.tolist()
    assert (result.ids.dtype, result.probabilities.dtype, result.classes.dtype) == (np.int32, np.float32, np.int32)
    np.testing.assert_allclose(result.probabilities.sum(axis=1), 1, atol=1e-6)
    assert list(result.seconds) == ["mix", "route", "experts", "head"]
    assert min(result.seconds.values()) >= 0
    assert result.routing.load.sum() == 2 * len(IDS)


def test_ties_go_to_the_lower_class(small, tmp_path):
    twins = dataclasses.replace(
        small[0], head=np.repeat(small[0].head[:3], 2, axis=0), head_bias=np.repeat(small[0].head_bias[:3], 2)
    )
    result = Model.open(twins.write(tmp_path / "bundle")).infer(IDS)
    np.testing.assert_array_equal(result.probabilities[:, ::2], result.probabilities[:, 1::2])
    assert {0, 2} <= set(result.classes.tolist()) <= {0, 2, 4}


def test_predict_is_the_mean_over_tokens(model):
    result = model.infer(IDS)
    pooled = result.predict()
    assert pooled.dtype == np.float32
    np.testing.assert_allclose(pooled, result.probabilities.astype(np.float64).mean(axis=0), atol=1e-7)
    assert pooled.sum() == pytest.approx(1)


def test_no_tokens(model):
    for ids in ([], np.empty(0, np.int32), np.empty(0, np.int64)):
        result = model.infer(ids)
        assert result.probabilities.shape == (0, 5)
        assert result.routing.expert_ids.shape == (0, 2)
        np.testing.assert_allclose(result.predict(), np.full(5, 0.2, np.float32))


def test_one_token_has_no_neighbours(small, model):
    probabilities, _ = small[0].infer([7])
    np.testing.assert_allclose(model.infer([7]).probabilities, probabilities, atol=5e-6)


@pytest.mark.parametrize(
    "ids", [[50], [-1], [0, 50], np.int64([0, 2**32]), np.int32([0, 2**31 - 1]), np.uint64([2**63])]
)
def test_an_id_out_of_range_is_named(ids, model):
    with pytest.raises(InvalidInput, match=rf"0\.\.49, got {ids[-1]} - at ids\[{len(ids) - 1}\]"):
        model.infer(ids)


@pytest.mark.parametrize("ids", [[1.0], [[1]], "text", [True], 3, np.float32([1]), None])
def test_what_is_no_list_of_ids(ids, model):
    with pytest.raises(InvalidInput, match="at ids"):
        model.infer(ids)


@pytest.mark.parametrize("loading", ["static", "mmap", "on-demand"])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("max_tokens", [7, 512])
def test_the_answer_does_not_depend_on_how_the_model_is_opened(max_tokens, threads, loading, small, model):
    other = Model.open(small[1], loading=loading, threads=threads, cache_experts=1, max_tokens=max_tokens)
    assert answer(other, IDS) == answer(model, IDS)


def test_many_tokens(model):
    ids = integers(2, 0, 50, 700)
    whole = model.infer(ids).probabilities
    for first in (0, 95, 311, 690):
        window = model.infer(ids[max(first - 2, 0) : first + 12]).probabilities  # and its context of 2
        skip = min(first, 2)
        np.testing.assert_array_equal(window[skip : skip + 8], whole[first : first + 8])


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(0, 49), max_size=40), st.integers(0, 49))
def test_a_token_sees_its_neighbours_and_no_further(model, ids, last):
    n = max(len(ids) - 2, 0)
    np.testing.assert_array_equal(model.infer([*ids, last]).probabilities[:n], model.infer(ids).probabilities[:n])


def test_gating_is_the_callers_before_the_configs(small, tmp_path):
    classifier, bundle = small
    taylor = classifier.write(tmp_path / "taylor", router={"kind": "topk-softmax", "gating": "taylor"})
    exact = answer(Model.open(bundle), IDS)
    assert answer(Model.open(taylor), IDS) == answer(Model.open(bundle, gating="taylor"), IDS) != exact
    assert answer(Model.open(taylor, gating="exact"), IDS) == exact
    with pytest.raises(InvalidInput, match="at gating"):
        Model.open(bundle, gating="rough")


def test_balancing_is_never_silent(small, model, tmp_path):
    classifier, _ = small
    rule = {"enabled": True, "window": 8, "threshold": 1.0, "candidates": 4, "prefer": "emptiest"}
    balanced = Model.open(classifier.write(tmp_path / "bundle", balance=rule))
    balancer = balanced.new_balancer()
    assert (balancer.n_experts, balancer.window, balancer.threshold) == (6, 8, 1.0)
    assert (balancer.candidates, balancer.prefer) == (4, "emptiest")
    assert answer(balanced, IDS) == answer(balanced, IDS)  # each call starts with no memory
    assert answer(balanced, IDS) == answer(model, IDS, balancer=balancer) != answer(model, IDS)
    assert balancer.sums.sum() > 0
    assert answer(model, IDS) == answer(Model.open(small[1]), IDS)
    carried = Balancer(6, window=8, threshold=1.0, candidates=4, prefer="emptiest")
    balanced.infer(IDS, balancer=carried)
    assert answer(balanced, IDS, balancer=carried) != answer(balanced, IDS)


@pytest.mark.parametrize("enabled", [True, False])
def test_balancing_is_the_callers_before_the_configs(enabled, small, model, tmp_path):
    rule = {"enabled": enabled, "window": 8, "threshold": 1.0, "candidates": 4, "prefer": "emptiest"}
    bundle = small[0].write(tmp_path / "bundle", balance=rule)
    as_configured, off = answer(Model.open(bundle), IDS), answer(model, IDS)
    on = answer(Model.open(bundle, balance=True), IDS)
    assert answer(Model.open(bundle, balance=False), IDS) == off != on
    assert as_configured == (on if enabled else off)


def test_experts_of_another_folder(small, tmp_path):
    classifier, bundle = small
    other = Classifier.make(99)
    names = other.experts.write(tmp_path)
    assert names[0] == "expert_0.bin"
    expected = answer(Model.open(other.write(tmp_path / "whole")), IDS)
    mixed = Model.open(bundle, experts_dir=tmp_path)
    assert answer(mixed, IDS) not in (answer(Model.open(bundle), IDS), expected)
    one = Classifier(
        classifier.embedding, classifier.mixer, classifier.gate, other.experts, classifier.head, classifier.head_bias
    )
    np.testing.assert_allclose(mixed.infer(IDS).probabilities, one.infer(IDS.tolist())[0], atol=5e-6)
    assert mixed.experts.stats()["source"] == str(tmp_path)


def test_experts_may_be_swapped_in_a_model(small, model, tmp_path):
    classifier, bundle = small
    mine = Model.open(bundle, loading="static")
    before = answer(mine, IDS)
    (tmp_path / "new.bin").write_bytes(Classifier.make(99).experts.raw(3))
    mine.experts.replace(3, tmp_path / "new.bin")
    assert answer(mine, IDS) != before
    (tmp_path / "old.bin").write_bytes(classifier.experts.raw(3))
    mine.experts.replace(3, tmp_path / "old.bin")
    assert answer(mine, IDS) == before == answer(model, IDS)


def test_an_artifact_names_the_files(tmp_path):
    classifier = Classifier.make()
    bundle = classifier.write(tmp_path / "bundle", artifact="experts/deep/{i}/weights.bin")
    for i in range(6):
        (bundle / f"experts/deep/{i}").mkdir(parents=True)
        (bundle / f"experts/expert_{i}.bin").rename(bundle / f"experts/deep/{i}/weights.bin")
    probabilities, _ = classifier.infer(IDS.tolist())
    np.testing.assert_allclose(Model.open(bundle).infer(IDS).probabilities, probabilities, atol=5e-6)


# ---------------------------------------------------------------- the built-in bundle


def test_the_built_in_bundle_gives_its_trainers_answers():
    model = Model.open()
    for case in json.loads((builtin_bundle() / "golden.json").read_text()):
        assert model.tokenizer.encode(case["text"]).tolist() == case["ids"]
        result = model.infer(case["ids"])
        assert result.routing.expert_ids.tolist() == case["expert_ids"]
        np.testing.assert_allclose(result.routing.expert_weights, case["expert_weights"], atol=1e-5)
        np.testing.assert_allclose(result.probabilities, case["probabilities"], atol=1e-5)


def test_the_built_in_bundle_is_like_any_other(tmp_path):
    ids = integers(3, 0, 12_000, 300)
    model = Model.open()
    assert model.path == builtin_bundle()
    assert model.classes == ("noun", "verb", "modifier", "function", "other")
    assert answer(Model.open(builtin_bundle()), ids) == answer(model, ids)
    with pytest.raises(UsageError, match="no such folder"):
        Model.open(tmp_path / "none")
