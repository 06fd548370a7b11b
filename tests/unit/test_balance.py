"""The balancer against the rule written out in Python, in integers; and what the caller may do with its state."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Rings, choices, integers, numbers, score_weights

from colibri_cli import Balancer, InvalidInput, Router


def identity(n_experts, top_k=2, **options):
    """A router whose logits are its hidden states, exactly."""
    return Router.from_array(np.eye(n_experts, dtype=np.float32), top_k=top_k, **options)


def skewed(seed, n_tokens, n_experts):
    """Logits that favour the lower experts, and for a third of the tokens one expert alone."""
    logits = numbers(seed, n_tokens, n_experts) * 2 - np.arange(n_experts, dtype=np.float32) / 4
    logits[::3, n_experts // 2] += 3
    return logits


def agree(logits, top_k, *, window=64, threshold=1.8, candidates=None, prefer="score", **options):
    n_experts = logits.shape[1]
    balancer = Balancer(n_experts, window=window, threshold=threshold, candidates=candidates, prefer=prefer)
    routing = identity(n_experts, top_k, **options).route(logits, balancer)
    rings = Rings(n_experts, top_k, window, threshold, candidates or min(top_k + 2, n_experts), prefer)
    tokens = zip(logits.tolist(), routing.expert_ids.tolist(), routing.expert_weights.tolist(), strict=True)
    for t, (row, ids, weights) in enumerate(tokens):
        assert rings.choose(row) == ids, f"token {t}"
        rings.push(ids, weights)
    assert balancer.sums.tolist() == rings.sums
    np.testing.assert_array_equal(balancer.state()["ring"].T, rings.rings)
    chosen = np.take_along_axis(logits, routing.expert_ids.astype(np.int64), 1).astype(np.float64)
    e = np.exp(chosen - chosen[:, :1])
    np.testing.assert_allclose(routing.expert_weights, e / e.sum(axis=1, keepdims=True), atol=3e-7)
    np.testing.assert_array_equal(routing.load, np.bincount(routing.expert_ids.ravel(), minlength=n_experts))


def test_100_000_skewed_tokens():
    agree(skewed(1, 100_000, 8), 2)


@pytest.mark.parametrize("prefer", ["score", "emptiest"])
@pytest.mark.parametrize(
    ("n_experts", "top_k", "options"),
    [
        (8, 2, {}),
        (8, 2, {"candidates": 2}),
        (8, 2, {"candidates": 8}),
        (8, 2, {"threshold": 1.0}),
        (8, 2, {"threshold": 1000.0}),
        (8, 2, {"window": 1}),
        (8, 2, {"window": 7, "threshold": 1.1}),
        (8, 1, {"candidates": 1, "threshold": 1.0}),
        (2, 1, {}),
        (2, 1, {"candidates": 1, "threshold": 1.0, "window": 3}),
        (2, 2, {}),
        (1, 1, {"threshold": 1.0}),
        (5, 5, {"threshold": 1.0}),
        (5, 4, {"threshold": 1.2}),
        (17, 3, {"threshold": 1.5}),
        (33, 6, {"candidates": 6, "threshold": 1.0, "window": 5}),
    ],
)
def test_parameters(n_experts, top_k, options, prefer):
    agree(skewed(2, 1_500, n_experts), top_k, prefer=prefer, **options)


@pytest.mark.parametrize("prefer", ["score", "emptiest"])
def test_ties_go_to_the_lower_expert(prefer):
    agree(integers(3, 0, 3, 1_500, 7).astype(np.float32), 2, prefer=prefer, threshold=1.2)
    agree(np.zeros((200, 5), np.float32), 2, prefer=prefer)


@pytest.mark.parametrize("kind", ["softmax-topk", "topk-softmax"])
def test_both_kinds_of_gate(kind):
    agree(skewed(4, 500, 9), 3, kind=kind)


GROUPS = {"n_groups": 3, "topk_groups": 2}


@pytest.mark.parametrize("prefer", ["score", "emptiest"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("softmax-topk", {}),
        ("sigmoid-topk", {}),
        ("sqrtsoftplus-topk", {}),
        ("topk-sigmoid", {}),
        ("softmax-topk", GROUPS),
        ("sigmoid-topk", GROUPS),
        ("sigmoid-topk", {**GROUPS, "masked_score": 0.0, "group_score": "max"}),
        ("sqrtsoftplus-topk", GROUPS),
    ],
)
def test_gates_that_choose_by_scores(kind, options, prefer):
    n_experts, top_k, logits = 9, 5, skewed(11, 1_500, 9)
    correction = numbers(12, n_experts) / 2
    balancer = Balancer(n_experts, window=20, threshold=1.1, prefer=prefer)
    router = identity(n_experts, top_k, kind=kind, correction_bias=correction, **options)
    routing = router.route(logits, balancer)
    rings = Rings(n_experts, top_k, 20, 1.1, top_k + 2, prefer)
    rows = choices(logits, kind, correction, **options)
    for t, (row, ids) in enumerate(zip(rows, routing.expert_ids.tolist(), strict=True)):
        assert rings.choose(row) == ids, f"token {t}"
        rings.push(ids, routing.expert_weights[t].tolist())
    assert balancer.sums.tolist() == rings.sums
    weights = score_weights(logits, kind, routing.expert_ids)
    np.testing.assert_allclose(routing.expert_weights, weights, rtol=1e-6)
    assert (routing.expert_ids != router.route(logits).expert_ids).any()


def test_a_group_that_is_kept_out_stays_out():
    options = {"kind": "sigmoid-topk", "n_groups": 4, "topk_groups": 1}
    balancer = Balancer(8, window=4, threshold=1.0, candidates=8)
    routing = identity(8, 2, **options).route(skewed(13, 300, 8), balancer)
    assert (routing.expert_ids[:, 0] // 2 == routing.expert_ids[:, 1] // 2).all()


def test_what_is_pushed_is_not_scaled():
    logits, scaled, plain = skewed(14, 200, 6), Balancer(6), Balancer(6)
    for kind in ("softmax-topk", "sigmoid-topk"):
        identity(6, 3, kind=kind, scale=2.5, renormalize=False).route(logits, scaled)
        identity(6, 3, kind=kind).route(logits, plain)
        assert scaled.sums.tolist() == plain.sums.tolist()


@settings(max_examples=30, deadline=None)
@given(
    n_experts=st.integers(1, 12),
    fraction=st.floats(0, 1),
    window=st.integers(1, 20),
    threshold=st.sampled_from([1.0, 1.1, 1.5, 1.8, 3.0]),
    more=st.integers(0, 12),
    prefer=st.sampled_from(["score", "emptiest"]),
    seed=st.integers(0, 1000),
)
def test_any_parameters(n_experts, fraction, window, threshold, more, prefer, seed):
    top_k = 1 + int(fraction * (n_experts - 1))
    candidates = min(top_k + more, n_experts)
    logits = integers(seed, -4, 5, 60, n_experts).astype(np.float32) / 2
    agree(logits, top_k, window=window, threshold=threshold, candidates=candidates, prefer=prefer)


def test_what_is_pushed_is_renormalised_even_where_the_weights_are_not():
    balancer = Balancer(6, window=10)
    routing = identity(6, 3, renormalize=False).route(skewed(5, 50, 6), balancer)
    assert (routing.expert_weights.sum(axis=1) < 0.99).any()
    assert abs(int(balancer.sums.sum()) - 10 * 2**24) <= 3 * 10


def test_the_load_becomes_more_even():
    router = identity(8)
    logits = skewed(6, 5_000, 8) - np.arange(8, dtype=np.float32) / 4
    without, balanced = router.route(logits).load, router.route(logits, Balancer(8)).load
    assert without.max() / without.mean() > 2.2
    assert balanced.max() / balanced.mean() < 1.8


def test_it_is_off_unless_asked_for():
    logits, router = skewed(6, 300, 8), identity(8)
    plain = router.route(logits).expert_ids
    assert (router.route(logits, Balancer(8)).expert_ids != plain).any()
    np.testing.assert_array_equal(router.route(logits).expert_ids, plain)


def test_experts_stay_by_falling_score():
    logits = skewed(7, 400, 8)
    ids = identity(8, 4).route(logits, Balancer(8, prefer="emptiest")).expert_ids.astype(np.int64)
    assert (np.diff(np.take_along_axis(logits, ids, 1), axis=1) <= 0).all()


def split(balancer, logits, router, *cuts):
    parts = [router.route(part, balancer).expert_ids for part in np.split(logits, cuts)]
    return np.concatenate(parts)


def test_batches_do_not_matter():
    logits, router = skewed(8, 300, 8), identity(8)
    whole, parts = Balancer(8), Balancer(8)
    ids = router.route(logits, whole).expert_ids
    np.testing.assert_array_equal(split(parts, logits, router, 0, 1, 2, 9, 73, 200), ids)
    assert whole.sums.tolist() == parts.sums.tolist()


def test_a_saved_state_goes_on_exactly():
    logits, router = skewed(9, 300, 8), identity(8)
    first, second = Balancer(8), Balancer(8)
    router.route(logits[:101], first)
    state = first.state()
    expected = router.route(logits[101:], first).expert_ids
    second.restore(state)
    np.testing.assert_array_equal(router.route(logits[101:], second).expert_ids, expected)
    assert first.sums.tolist() == second.sums.tolist()
    assert first.state()["position"] == second.state()["position"] == 300 % 64


def test_a_state_is_a_copy():
    logits, router, balancer = skewed(9, 100, 8), identity(8), Balancer(8)
    router.route(logits, balancer)
    state, sums = balancer.state(), balancer.sums
    kept = state["ring"].copy()
    router.route(logits, balancer)
    np.testing.assert_array_equal(state["ring"], kept)
    state["ring"][:] = 0
    sums[:] = 0
    assert balancer.sums.sum() > 0
    balancer.restore(state)
    state["ring"][:] = 1
    assert balancer.sums.tolist() == [0] * 8


def test_reset_forgets_every_token():
    logits, router, balancer = skewed(9, 100, 8), identity(8), Balancer(8)
    ids = router.route(logits, balancer).expert_ids
    balancer.reset()
    assert balancer.sums.tolist() == [0] * 8
    assert balancer.state()["position"] == 0
    np.testing.assert_array_equal(router.route(logits, balancer).expert_ids, ids)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"ring": np.zeros((63, 8), np.int32)}, "ring"),
        ({"ring": np.zeros((64, 7), np.int32)}, "ring"),
        ({"ring": np.zeros((64, 8), np.int64)}, "ring"),
        ({"ring": np.zeros(512, np.int32)}, "ring"),
        ({"ring": np.full((64, 8), -1, np.int32)}, "ring"),
        ({"ring": np.full((64, 8), 2**24 + 1, np.int32)}, "ring"),
        ({"position": 64}, "position"),
        ({"position": -1}, "position"),
        ({"position": 1.0}, "position"),
        ({"position": True}, "position"),
    ],
)
def test_a_state_that_is_none_leaves_the_present_one(change, place):
    router, balancer = identity(8), Balancer(8)
    router.route(skewed(9, 100, 8), balancer)
    before = balancer.state()
    with pytest.raises(InvalidInput, match=place):
        balancer.restore(before | change)
    after = balancer.state()
    np.testing.assert_array_equal(after["ring"], before["ring"])
    assert after["position"] == before["position"]


def test_a_state_from_a_file_is_taken(tmp_path):
    router, balancer = identity(8), Balancer(8)
    router.route(skewed(9, 100, 8), balancer)
    state = balancer.state()
    np.save(tmp_path / "ring.npy", np.asfortranarray(state["ring"]))
    balancer.reset()
    balancer.restore(state | {"ring": np.load(tmp_path / "ring.npy"), "position": np.int64(state["position"])})
    np.testing.assert_array_equal(balancer.state()["ring"], state["ring"])


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({"n_experts": 0}, "n_experts"),
        ({"n_experts": 1025}, "n_experts"),
        ({"n_experts": 2.0}, "n_experts"),
        ({"window": 0}, "window"),
        ({"window": 65_537}, "window"),
        ({"window": True}, "window"),
        ({"threshold": 0.99}, "threshold"),
        ({"threshold": np.nan}, "threshold"),
        ({"threshold": np.inf}, "threshold"),
        ({"candidates": 0}, "candidates"),
        ({"candidates": 9}, "candidates"),
        ({"prefer": "fullest"}, "prefer"),
    ],
)
def test_parameters_out_of_range(options, place):
    with pytest.raises(InvalidInput, match=f"at {place}$"):
        Balancer(**{"n_experts": 8} | options)


def test_a_balancer_must_fit_the_router():
    hidden = np.zeros((1, 8), np.float32)
    with pytest.raises(InvalidInput, match="a balancer of 8 experts, got 7"):
        identity(8).route(hidden, Balancer(7))
    with pytest.raises(InvalidInput, match="at least top_k = 3 candidates, got 2"):
        identity(8, 3).route(hidden, Balancer(8, candidates=2))


def test_one_balancer_serves_routers_of_different_top_k():
    balancer = Balancer(8)
    for top_k in (1, 8, 2):
        assert identity(8, top_k).route(skewed(1, 10, 8), balancer).expert_ids.shape == (10, top_k)
    assert balancer.state()["position"] == 30


def test_calls_that_share_a_balancer_take_turns():
    balancer, router = Balancer(8, window=1024), identity(8)
    logits = np.tile(skewed(1, 1, 8), (64, 1))
    threads = [threading.Thread(target=lambda: [router.route(logits, balancer) for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    alone = Balancer(8, window=1024)
    router.route(np.tile(logits, (200, 1)), alone)
    assert balancer.sums.tolist() == alone.sums.tolist()
    np.testing.assert_array_equal(balancer.state()["ring"], alone.state()["ring"])
