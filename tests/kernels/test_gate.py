"""From hidden states to experts: logits, top-k, weights, and the refusal of logits that are not finite."""

import numpy as np
import pytest
import reference
from reference import integers, numbers

from colibri_cli import Balancer, GumbelNoise, InvalidInput, Router

pytestmark = pytest.mark.usefixtures("isa")

KINDS = ("softmax-topk", "topk-softmax")
EXPERTS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 257)


def identity(n_experts, **options):
    """A router whose logits are its hidden states, exactly."""
    return Router.from_array(np.eye(n_experts, dtype=np.float32), **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_experts", EXPERTS)
def test_the_best_in_order_and_ties_to_the_lower_id(n_experts, kind):
    for n_tokens in (1, 7, 8, 9, 33):
        logits = integers(n_tokens, -3, 3, n_tokens, n_experts).astype(np.float32)  # hardly a row without ties
        for top_k in {1, min(2, n_experts), min(3, n_experts), min(8, n_experts), n_experts}:
            routing = identity(n_experts, kind=kind, top_k=top_k).route(logits)
            ids, weights = reference.route(logits, kind, top_k)
            np.testing.assert_array_equal(routing.expert_ids, ids)
            np.testing.assert_allclose(routing.expert_weights, weights, atol=3e-7)
            np.testing.assert_array_equal(routing.load, np.bincount(ids.ravel(), minlength=n_experts))


@pytest.mark.parametrize("gating", ["exact", "taylor"])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kind, renormalize, gating):
    logits = numbers(3, 40, 12) * 6
    routing = identity(12, kind=kind, top_k=4, renormalize=renormalize, gating=gating).route(logits)
    _, weights = reference.route(logits, kind, 4, renormalize)
    np.testing.assert_allclose(routing.expert_weights, weights, atol=0.003 if gating == "taylor" else 3e-7)
    sums = routing.expert_weights.sum(axis=1)
    if kind == "topk-softmax" or renormalize:
        np.testing.assert_allclose(sums, 1, atol=3e-7)
    else:
        assert (sums < 0.999).any()


def test_renormalised_softmax_is_the_softmax_of_the_chosen():
    weight, hidden = numbers(1, 9, 20), numbers(2, 30, 20) * 4
    one, other = (Router.from_array(weight, kind=kind, top_k=3).route(hidden) for kind in KINDS)
    np.testing.assert_array_equal(one.expert_weights, other.expert_weights)


@pytest.mark.parametrize("hidden_size", [1, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 128])
@pytest.mark.parametrize("bias", [False, True])
def test_logits_are_one_chain_from_the_bias(hidden_size, bias):
    weight, hidden = numbers(1, 11, hidden_size), numbers(2, 21, hidden_size)
    offsets = numbers(3, 11) if bias else np.zeros(11, np.float32)
    logits = reference.chain(hidden, weight, offsets)
    found = Router.from_array(weight, offsets if bias else None, top_k=11).route(hidden)
    expected = identity(11, top_k=11).route(logits)
    np.testing.assert_array_equal(found.expert_ids, expected.expert_ids)
    np.testing.assert_array_equal(found.expert_weights, expected.expert_weights)


@pytest.mark.parametrize("n_tokens", [0, 1, 95, 96, 97, 300])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_tokens_around_the_blocks_and_threads(threads, n_tokens):
    weight, hidden = numbers(1, 20, 70), numbers(2, n_tokens, 70)
    found = Router.from_array(weight, threads=threads).route(hidden)
    expected = [Router.from_array(weight, threads=1).route(hidden[t : t + 1]) for t in range(n_tokens)]
    assert found.expert_ids.tolist() == [row.expert_ids[0].tolist() for row in expected]
    assert found.expert_weights.tolist() == [row.expert_weights[0].tolist() for row in expected]
    assert found.load.sum() == 2 * n_tokens


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("tokens", [(0,), (7,), (8, 3), (13, 9, 11), (15, 14), (300, 299, 57), (399,), (399, 100, 200)])
def test_the_first_token_whose_logits_are_not_finite_is_named(tokens, bad, threads):
    hidden = numbers(1, 400, 64)
    for token in tokens:
        hidden[token, token % 64] = bad
    with pytest.raises(InvalidInput, match=f"at token {min(tokens)}\n"):
        Router.from_array(numbers(2, 17, 64), threads=threads).route(hidden)


def test_logits_too_large_for_float32_are_refused():
    with pytest.raises(InvalidInput, match="at token 1\n"):
        Router.from_array(np.full((3, 2), 2, np.float32)).route(np.float32([[1e37, 1e37], [3e38, 3e38], [0, 0]]))


def test_logits_at_the_ends_of_float32_are_not():
    largest = np.finfo(np.float32).max
    routing = identity(4, top_k=4).route(np.float32([[-largest, largest, 0, -largest]]))
    assert routing.expert_ids.tolist() == [[1, 2, 0, 3]]
    np.testing.assert_allclose(routing.expert_weights, [[1, 0, 0, 0]], atol=1e-30)


def test_a_refused_batch_moves_neither_balancer_nor_noise():
    router = identity(6)
    good, bad = numbers(1, 30, 6), numbers(2, 30, 6)
    bad[17, 2] = np.nan
    balancer, noise = Balancer(6), GumbelNoise(0.5, 1)
    router.route(good, balancer, noise=noise)
    before = balancer.state()
    with pytest.raises(InvalidInput, match="at token 17\n"):
        router.route(bad, balancer, noise=noise)
    after = balancer.state()
    np.testing.assert_array_equal(after["ring"], before["ring"])
    assert after["position"] == before["position"]
    twin = GumbelNoise(0.5, 1)
    router.route(good, noise=twin)
    np.testing.assert_array_equal(router.route(good, noise=noise).expert_ids, router.route(good, noise=twin).expert_ids)


def test_noise_that_makes_logits_overflow_does_not_move_either():
    router = identity(4)
    balancer, noise, twin = Balancer(4), GumbelNoise(1e37, 5), GumbelNoise(1e37, 5)
    with pytest.raises(InvalidInput, match="at token 0\n"):
        router.route(np.full((1, 4), 3.4e38, np.float32), balancer, noise=noise)
    assert balancer.sums.tolist() == [0, 0, 0, 0]
    calm = np.zeros((20, 4), np.float32)
    np.testing.assert_array_equal(router.route(calm, noise=noise).expert_ids, router.route(calm, noise=twin).expert_ids)
