import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Ffns, numbers, route, sigmoid

from colibri_cli import Balancer, Experts, InvalidInput, MoELayer, Router, SharedExpert

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


# ---------------------------------------------------------------- a shared expert

SHARED, GATE = Ffns.make(5, 1, 10, 12), numbers(6, 10)


def shared_expert(gate=None):
    return SharedExpert(Experts.from_arrays(**SHARED.arrays(), threads=2), gate)


def with_shared(layer, gate=None):
    return MoELayer(layer.router, layer.experts, shared=shared_expert(gate))


def shared_output(gate):
    weight = np.ones(40) if gate is None else sigmoid(HIDDEN.astype(np.float64) @ gate.astype(np.float64))
    return SHARED(HIDDEN, np.zeros((40, 1), np.int32), weight[:, np.newaxis])


@pytest.mark.parametrize("gate", [None, GATE])
def test_a_shared_expert_against_float64(layer, gate):
    found = with_shared(layer, gate)(HIDDEN) - layer(HIDDEN)
    assert np.abs(found - shared_output(gate)).max() < 2e-6


@pytest.mark.parametrize("gate", [None, GATE])
def test_the_shared_expert_is_added_last(layer, gate):
    weights = np.ones((40, 1), np.float32)
    if gate is not None:
        weights = (
            Router.from_array(gate[np.newaxis], kind="sigmoid-topk", top_k=1, renormalize=False)
            .route(HIDDEN)
            .expert_weights
        )
    shared = Experts.from_arrays(**SHARED.arrays()).run(HIDDEN, np.zeros((40, 1), np.int32), weights)
    np.testing.assert_array_equal(with_shared(layer, gate)(HIDDEN), layer(HIDDEN) + shared)


@pytest.mark.parametrize("gate", [None, GATE])
def test_with_a_shared_expert_a_token_keeps_its_bits_in_any_company(layer, gate):
    both = with_shared(layer, gate)
    whole = both(HIDDEN)
    np.testing.assert_array_equal(both(HIDDEN[::-1]), whole[::-1])
    np.testing.assert_array_equal(np.concatenate([both(HIDDEN[t : t + 1]) for t in range(40)]), whole)
    assert both(HIDDEN[:0]).shape == (0, 10)


def test_a_shared_expert_writes_to_out_and_takes_any_buffer(layer):
    both, out = with_shared(layer, GATE[np.newaxis]), np.full(HIDDEN.shape, 7, np.float32)
    expected = both(HIDDEN)
    np.testing.assert_array_equal(expected, with_shared(layer, GATE)(HIDDEN))
    assert both(HIDDEN, out=out) is out
    np.testing.assert_array_equal(out, expected)
    view = memoryview(np.zeros(HIDDEN.shape, np.float32))
    assert both(memoryview(HIDDEN), out=view) is view
    np.testing.assert_array_equal(np.asarray(view), expected)
    bad = HIDDEN.copy()
    bad[39, 0] = np.inf
    out[:] = 7
    with pytest.raises(InvalidInput, match="at token 39\n"):
        both(bad, out=out)
    assert (out == 7).all()


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        (lambda: (Experts.from_arrays(**FFNS.arrays()),), "expert"),
        (lambda: (Router.from_array(WEIGHT),), "expert"),
        (lambda: (shared_expert().expert, numbers(1, 9)), r"gate\.shape"),
        (lambda: (shared_expert().expert, numbers(1, 2, 10)), r"gate\.shape"),
        (lambda: (shared_expert().expert, np.full(10, np.nan, np.float32)), r"gate\[0\]"),
        (lambda: (shared_expert().expert, np.zeros(10)), "gate"),
    ],
)
def test_shared_experts_that_are_none(arguments, place):
    with pytest.raises(InvalidInput, match=f"at {place}"):
        SharedExpert(*arguments())


def test_what_a_layer_refuses_to_share(layer):
    other = SharedExpert(Experts.from_arrays(**Ffns.make(5, 1, 11, 12).arrays()))
    with pytest.raises(InvalidInput, match="Expected experts of hidden size 10, got 11 - at shared"):
        MoELayer(layer.router, layer.experts, shared=other)
    with pytest.raises(InvalidInput, match="at shared"):
        MoELayer(layer.router, layer.experts, shared=layer.experts)
