import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Ffns, numbers, route

from colibri_cli import Balancer, Experts, InvalidInput, MoELayer, Router

WEIGHT, FFNS = numbers(1, 6, 10), Ffns.make(2, 6, 10, 7)
HIDDEN = numbers(3, 40, 10)


@pytest.fixture(scope="module")
def layer():
    return MoELayer(Router.from_array(WEIGHT, top_k=3), Experts.from_arrays(**FFNS.arrays()))


def test_against_float64(layer):
    ids, weights = route(HIDDEN.astype(np.float64) @ WEIGHT.T.astype(np.float64), "softmax-topk", 3)
    assert np.abs(layer(HIDDEN) - FFNS(HIDDEN, ids, weights)).max() < 2e-6


def test_it_is_the_router_and_then_the_experts(layer):
    routing = layer.router.route(HIDDEN)
    expected = layer.experts.run(HIDDEN, routing.expert_ids, routing.expert_weights)
    np.testing.assert_array_equal(layer(HIDDEN), expected)
    assert layer(HIDDEN).dtype == np.float32


def test_a_balancer_decides_and_moves_on(layer):
    balancer, twin = Balancer(6, threshold=1.0, window=8), Balancer(6, threshold=1.0, window=8)
    found = layer(HIDDEN, balancer)
    routing = layer.router.route(HIDDEN, twin)
    np.testing.assert_array_equal(found, layer.experts.run(HIDDEN, routing.expert_ids, routing.expert_weights))
    assert (found != layer(HIDDEN)).any()
    assert balancer.sums.tolist() == twin.sums.tolist()


def test_out_is_the_callers(layer):
    out = np.full(HIDDEN.shape, 7, np.float32)
    assert layer(HIDDEN, out=out) is out
    np.testing.assert_array_equal(out, layer(HIDDEN))
    bad = HIDDEN.copy()
    bad[39, 0] = np.inf
    out[:] = 7
    with pytest.raises(InvalidInput, match="at token 39\n"):
        layer(bad, out=out)
    assert (out == 7).all()


def test_no_tokens(layer):
    assert layer(np.empty((0, 10), np.float32)).shape == (0, 10)


@settings(max_examples=15, deadline=None)
@given(order=st.permutations(range(40)), cut=st.integers(0, 40))
def test_a_token_keeps_its_bits_in_any_company(layer, order, cut):
    whole = layer(HIDDEN)
    np.testing.assert_array_equal(layer(HIDDEN[order]), whole[order])
    np.testing.assert_array_equal(np.concatenate([layer(HIDDEN[:cut]), layer(HIDDEN[cut:])]), whole)


def test_a_token_that_is_not_finite_refuses_the_batch(layer):
    hidden = HIDDEN.copy()
    hidden[11, 3] = np.nan
    with pytest.raises(InvalidInput, match="at token 11\n"):
        layer(hidden)


def test_hidden_sizes_must_agree():
    with pytest.raises(InvalidInput, match="Expected experts of hidden size 9, got 10 - at experts"):
        MoELayer(Router.from_array(numbers(1, 6, 9)), Experts.from_arrays(**FFNS.arrays()))


def test_experts_that_the_router_knows_and_the_set_does_not():
    layer = MoELayer(Router.from_array(numbers(1, 9, 10), top_k=9), Experts.from_arrays(**FFNS.arrays()))
    with pytest.raises(InvalidInput, match=r"0\.\.5, got . - at expert_ids\[0, "):
        layer(HIDDEN)
