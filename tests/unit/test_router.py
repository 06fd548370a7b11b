import dataclasses

import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import numbers

from colibri_cli import Balancer, InvalidInput, Router, _core
from colibri_cli.model import builtin_bundle
from colibri_cli.topology import default_threads

WEIGHT = numbers(1, 6, 10)


def same(one, other):
    np.testing.assert_array_equal(one.expert_ids, other.expert_ids)
    np.testing.assert_array_equal(one.expert_weights, other.expert_weights)


def test_a_routing():
    hidden = numbers(2, 9, 10)
    routing = Router.from_array(WEIGHT, top_k=3).route(hidden)
    ids, weights = reference.route(hidden.astype(np.float64) @ WEIGHT.T.astype(np.float64), "softmax-topk", 3)
    np.testing.assert_array_equal(routing.expert_ids, ids)
    np.testing.assert_allclose(routing.expert_weights, weights, atol=1e-6)
    assert (routing.expert_ids.dtype, routing.expert_weights.dtype, routing.load.dtype) == (
        np.int32,
        np.float32,
        np.int64,
    )
    assert routing.load.tolist() == np.bincount(ids.ravel(), minlength=6).tolist()
    with pytest.raises(dataclasses.FrozenInstanceError):
        routing.load = None


def test_sizes_are_told():
    router = Router.from_array(WEIGHT, top_k=3)
    assert (router.n_experts, router.hidden_size, router.top_k) == (6, 10, 3)


@pytest.mark.parametrize("balancer", [None, Balancer(6)])
def test_no_tokens(balancer):
    routing = Router.from_array(WEIGHT, top_k=3).route(np.empty((0, 10), np.float32), balancer)
    assert routing.expert_ids.shape == routing.expert_weights.shape == (0, 3)
    assert routing.load.tolist() == [0] * 6


def test_a_router_keeps_its_own_copy_of_the_weights():
    weight, bias, hidden = WEIGHT.copy(), numbers(3, 6), numbers(2, 9, 10)
    router = Router.from_array(weight, bias)
    before = router.route(hidden)
    weight[:], bias[:] = 0, 0
    same(router.route(hidden), before)


def test_lists_are_not_taken_for_float32():
    with pytest.raises(InvalidInput, match="float64"):
        Router.from_array([[1.0, 2.0]])


def test_answers_are_the_callers_own():
    router, hidden = Router.from_array(WEIGHT), numbers(2, 9, 10)
    first = router.route(hidden)
    kept = first.expert_ids.copy()
    first.expert_weights[:] = 0
    second = router.route(hidden[::-1])
    np.testing.assert_array_equal(first.expert_ids, kept)
    np.testing.assert_array_equal(second.expert_ids, kept[::-1])


@settings(max_examples=30, deadline=None)
@given(
    n_tokens=st.integers(1, 40), cut=st.floats(0, 1), n_experts=st.integers(1, 20), k=st.floats(0, 1), data=st.data()
)
def test_a_token_is_routed_alike_in_any_company(n_tokens, cut, n_experts, k, data):
    top_k = 1 + int(k * (n_experts - 1))
    router = Router.from_array(numbers(n_experts, n_experts, 7), top_k=top_k)
    hidden = numbers(n_tokens, n_tokens, 7)
    whole = router.route(hidden)
    order = data.draw(st.permutations(range(n_tokens)))
    shuffled = router.route(hidden[order])
    np.testing.assert_array_equal(shuffled.expert_ids, whole.expert_ids[order])
    np.testing.assert_array_equal(shuffled.expert_weights, whole.expert_weights[order])
    np.testing.assert_array_equal(shuffled.load, whole.load)
    at = int(cut * n_tokens)
    parts = [router.route(hidden[:at]), router.route(hidden[at:])]
    np.testing.assert_array_equal(np.concatenate([part.expert_weights for part in parts]), whole.expert_weights)
    np.testing.assert_array_equal(sum(part.load for part in parts), whole.load)
    assert all(len(set(row)) == top_k for row in whole.expert_ids.tolist())
    assert (np.diff(whole.expert_weights, axis=1) <= 0).all()


@settings(max_examples=20, deadline=None)
@given(shift=st.integers(-64, 64), scale=st.sampled_from([0.25, 0.5, 2.0, 4.0]))
def test_what_routing_does_not_depend_on(shift, scale):
    logits = reference.integers(1, -40, 40, 30, 6).astype(np.float32)
    router = Router.from_array(np.eye(6, dtype=np.float32), top_k=3)
    plain = router.route(logits)
    same(router.route(logits + np.float32(shift)), plain)  # a softmax knows differences alone
    np.testing.assert_array_equal(router.route(logits * np.float32(scale)).expert_ids, plain.expert_ids)


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({"weight": np.zeros((0, 10), np.float32)}, "weight"),
        ({"weight": np.zeros((6, 0), np.float32)}, "weight"),
        ({"weight": np.zeros((1025, 1), np.float32)}, "weight"),
        ({"weight": np.zeros(6, np.float32)}, "weight"),
        ({"weight": np.zeros((1, 6, 10), np.float32)}, "weight"),
        ({"weight": np.full((6, 10), np.nan, np.float32)}, "weight"),
        ({"weight": np.full((6, 10), np.inf, np.float32)}, "weight"),
        ({"bias": np.zeros(5, np.float32)}, "bias"),
        ({"bias": np.zeros((1, 6), np.float32)}, "bias"),
        ({"bias": np.zeros(6)}, "bias"),
        ({"bias": np.full(6, np.nan, np.float32)}, "bias"),
        ({"kind": "hash"}, "kind"),
        ({"kind": "sparsemixer"}, "kind"),
        ({"scale": 0}, "scale"),
        ({"scale": -1.0}, "scale"),
        ({"scale": np.nan}, "scale"),
        ({"scale": 1e39}, "scale"),
        ({"scale": "1"}, "scale"),
        ({"epsilon": -1e-20}, "epsilon"),
        ({"epsilon": np.inf}, "epsilon"),
        ({"epsilon": 1e39}, "epsilon"),
        ({"kind": "topk-softmax", "epsilon": 1e-6}, "epsilon"),
        ({"correction_bias": np.zeros(5, np.float32)}, "correction_bias"),
        ({"correction_bias": np.zeros((1, 6), np.float32)}, "correction_bias"),
        ({"correction_bias": np.full(6, np.inf, np.float32)}, "correction_bias"),
        ({"kind": "topk-softmax", "correction_bias": np.zeros(6, np.float32)}, "correction_bias"),
        ({"n_groups": 0}, "n_groups"),
        ({"n_groups": 4}, "n_groups"),
        ({"n_groups": 7}, "n_groups"),
        ({"n_groups": 6, "topk_groups": 2}, "n_groups"),
        ({"kind": "topk-softmax", "n_groups": 2}, "n_groups"),
        ({"kind": "topk-sigmoid", "n_groups": 2}, "n_groups"),
        ({"topk_groups": 0}, "topk_groups"),
        ({"topk_groups": 2}, "topk_groups"),
        ({"n_groups": 3, "topk_groups": 4}, "topk_groups"),
        ({"n_groups": 3, "topk_groups": 1, "top_k": 3}, "top_k"),
        ({"group_score": "mean"}, "group_score"),
        ({"masked_score": -1.0}, "masked_score"),
        ({"masked_score": np.nan}, "masked_score"),
        ({"masked_score": "0"}, "masked_score"),
        ({"kind": "sigmoid-topk", "gating": "taylor"}, "gating"),
        ({"kind": "sqrtsoftplus-topk", "gating": "taylor"}, "gating"),
        ({"kind": "topk-sigmoid", "gating": "taylor"}, "gating"),
        ({"gating": "rough"}, "gating"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": 7}, "top_k"),
        ({"top_k": 2.0}, "top_k"),
        ({"top_k": "2"}, "top_k"),
        ({"threads": 0}, "threads"),
        ({"threads": 257}, "threads"),
        ({"threads": True}, "threads"),
        ({"threads": 1.5}, "threads"),
        ({"threads": "2"}, "threads"),
    ],
)
def test_options_out_of_range(options, place):
    with pytest.raises(InvalidInput, match=f"at {place}"):
        Router.from_array(**{"weight": WEIGHT} | options)


@pytest.mark.parametrize("options", [{"top_k": np.int64(3)}, {"threads": np.int32(2)}, {"threads": None}])
def test_options_that_numpy_made(options):
    same(Router.from_array(WEIGHT, **options).route(WEIGHT), Router.from_array(WEIGHT, **options).route(WEIGHT))


def test_the_place_of_a_weight_that_is_not_finite():
    weight = WEIGHT.copy()
    weight[4, 7] = np.nan
    with pytest.raises(InvalidInput, match=r"Expected finite weights, got nan - at weight\[4, 7\]"):
        Router.from_array(weight)


@pytest.mark.parametrize("shape", [(9, 11), (9, 9), (9,), (10,), (1, 9, 10), (), (0, 9)])
def test_hidden_states_of_another_shape(shape):
    with pytest.raises(InvalidInput, match=r"at hidden\.shape"):
        Router.from_array(WEIGHT).route(np.zeros(shape, np.float32))


def test_1024_experts():
    weight = numbers(1, 1024, 3)
    hidden = numbers(2, 5, 3)
    routing = Router.from_array(weight, top_k=1024).route(hidden)
    np.testing.assert_array_equal(np.sort(routing.expert_ids, axis=1), np.tile(np.arange(1024), (5, 1)))
    assert (np.diff(routing.expert_weights, axis=1) <= 0).all()
    assert (routing.load == 5).all()


def test_the_built_in_router_is_the_table_of_its_bundle():
    weight = np.fromfile(builtin_bundle() / "router_weights.bin", "<f4").reshape(8, 128)
    table = _core.builtin_router_table()
    np.testing.assert_array_equal(table[:, :8], weight.T)
    assert not table[:, 8:].any()
    hidden = numbers(2, 40, 128)
    options = {"kind": "topk-softmax", "top_k": 2}
    same(Router.builtin(8, **options).route(hidden), Router.from_array(weight, **options).route(hidden))
    with pytest.raises(InvalidInput, match="n_experts"):
        Router.builtin(17, **options)


def test_threads_are_what_the_machine_gives():
    assert Router.from_array(WEIGHT)._core.threads == default_threads()
    assert Router.from_array(WEIGHT, threads=3)._core.threads == 3
