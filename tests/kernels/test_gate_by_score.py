"""Gates of published models that choose by scores: the formulas in float64, ties, groups, and what bits depend on."""

import math

import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Gumbel, integers, numbers

from colibri_cli import Balancer, GumbelNoise, InvalidInput, Router

pytestmark = pytest.mark.usefixtures("isa")

KINDS = ("softmax-topk", "sigmoid-topk", "sqrtsoftplus-topk", "topk-sigmoid")
GROUPED = KINDS[:3]
EXPERTS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 257)


def identity(n_experts, **options):
    """A router whose logits are its hidden states, exactly."""
    return Router.from_array(np.eye(n_experts, dtype=np.float32), **options)


def agree(logits, kind, top_k, correction, *, renormalize=True, scale=1.0, epsilon=1e-20, **groups):
    """Hold a router to float64. Choices that float32 cannot tell apart may change places."""
    weighing = {"renormalize": renormalize, "scale": scale, "epsilon": epsilon}
    router = identity(logits.shape[1], kind=kind, top_k=top_k, correction_bias=correction, **weighing, **groups)
    routing = router.route(logits)
    by = np.array(reference.choices(logits, kind, correction, **groups)).reshape(logits.shape)
    best = np.sort(by, axis=1)[:, ::-1][:, :top_k]
    np.testing.assert_allclose(np.take_along_axis(by, routing.expert_ids.astype(np.int64), 1), best, rtol=0, atol=4e-7)
    assert all(len(set(ids)) == top_k for ids in routing.expert_ids.tolist())
    weights = reference.score_weights(logits, kind, routing.expert_ids, **weighing)
    np.testing.assert_allclose(routing.expert_weights, weights, rtol=2e-6, atol=1e-37)
    np.testing.assert_array_equal(routing.load, np.bincount(routing.expert_ids.ravel(), minlength=logits.shape[1]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_experts", EXPERTS)
def test_against_float64(n_experts, kind):
    correction = numbers(5, n_experts)
    for n_tokens in (1, 7, 8, 9, 33):
        logits = numbers(n_tokens, n_tokens, n_experts) * 4
        for top_k in {1, min(2, n_experts), min(8, n_experts), n_experts}:
            agree(logits, kind, top_k, correction)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        {"renormalize": False},
        {"scale": 2.5},
        {"renormalize": False, "scale": 0.125},
        {"epsilon": 1e-6},
        {"epsilon": 0.0},
    ],
)
def test_weights(kind, options):
    agree(numbers(1, 60, 12) * 6 - 8, kind, 4, numbers(2, 12), **options)


@pytest.mark.parametrize("kind", GROUPED)
@pytest.mark.parametrize("group_score", ["top2", "max"])
@pytest.mark.parametrize("masked_score", [-math.inf, 0.0])
@pytest.mark.parametrize(
    ("n_experts", "n_groups", "topk_groups", "top_k"),
    [
        (8, 2, 1, 4),
        (8, 4, 2, 3),
        (8, 4, 4, 8),
        (9, 3, 1, 1),
        (24, 4, 3, 18),
        (64, 8, 4, 8),
        (256, 8, 4, 8),
        (1024, 512, 511, 40),
    ],
)
def test_groups(n_experts, n_groups, topk_groups, top_k, masked_score, group_score, kind):
    groups = {
        "n_groups": n_groups,
        "topk_groups": topk_groups,
        "group_score": group_score,
        "masked_score": masked_score,
    }
    agree(numbers(1, 40, n_experts) * 3, kind, top_k, numbers(2, n_experts), **groups)


@pytest.mark.parametrize("kind", GROUPED)
def test_an_expert_may_be_a_group(kind):
    logits, correction = numbers(1, 40, 12) * 3, numbers(2, 12)
    plain = identity(12, kind=kind, top_k=4, correction_bias=correction).route(logits)
    groups = {"n_groups": 12, "topk_groups": 4, "group_score": "max"}
    grouped = identity(12, kind=kind, top_k=4, correction_bias=correction, **groups).route(logits)
    np.testing.assert_array_equal(grouped.expert_ids, plain.expert_ids)
    np.testing.assert_array_equal(grouped.expert_weights, plain.expert_weights)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_experts", EXPERTS)
def test_ties_go_to_the_lower_id(n_experts, kind):
    logits = integers(n_experts, -3, 3, 33, n_experts).astype(np.float32)
    correction = integers(4, 0, 2, n_experts).astype(np.float32)
    for top_k in {1, min(2, n_experts), min(8, n_experts), n_experts}:
        routing = identity(n_experts, kind=kind, top_k=top_k, correction_bias=correction).route(logits)
        by = reference.choices(logits, kind, correction)
        if kind == "topk-sigmoid":  # exact sums
            assert routing.expert_ids.tolist() == [
                sorted(range(n_experts), key=lambda e: (-row[e], e))[:top_k] for row in by
            ]
        else:  # distinct choices lie far apart, equal ones come from equal numbers
            rounded = np.round(by, 9)
            expected = np.argsort(-rounded, axis=1, kind="stable")[:, :top_k]
            np.testing.assert_array_equal(routing.expert_ids, expected)


@pytest.mark.parametrize("kind", GROUPED)
@pytest.mark.parametrize("group_score", ["top2", "max"])
def test_ties_of_groups_go_to_the_lower_group(group_score, kind):
    group = np.float32([0.5, -1.0, 2.0])
    other = np.float32([-2.0, -2.0, -2.0])
    logits = np.concatenate([other, group, other, group[::-1], group], dtype=np.float32)[np.newaxis]
    groups = {"n_groups": 5, "topk_groups": 2, "group_score": group_score}
    routing = identity(15, kind=kind, top_k=6, **groups).route(logits)
    assert routing.expert_ids.tolist() == [[5, 9, 3, 11, 4, 10]]


@pytest.mark.parametrize("kind", GROUPED)
def test_all_experts_alike(kind):
    routing = identity(16, kind=kind, top_k=3, n_groups=4, topk_groups=2).route(np.full((5, 16), 0.25, np.float32))
    np.testing.assert_array_equal(routing.expert_ids, np.tile([0, 1, 2], (5, 1)))
    np.testing.assert_allclose(routing.expert_weights, 1 / 3, rtol=3e-7)


def test_masked_experts_may_be_worth_0_or_nothing():
    logits, correction = np.float32([[1, 2, 1, 2]]), np.float32([-2, -1.5, -2.5, -3])
    options = {"kind": "sigmoid-topk", "top_k": 2, "correction_bias": correction, "n_groups": 2, "topk_groups": 1}
    assert identity(4, **options).route(logits).expert_ids.tolist() == [[1, 0]]
    assert identity(4, **options, masked_score=0.0).route(logits).expert_ids.tolist() == [[2, 3]]


def test_the_correction_chooses_and_does_not_weigh():
    logits, correction = np.float32([[0.0, 1.0, 2.0]]), np.float32([10.0, 0.0, 0.0])
    routing = identity(3, kind="sigmoid-topk", top_k=2, correction_bias=correction, renormalize=False).route(logits)
    assert routing.expert_ids.tolist() == [[0, 2]]
    np.testing.assert_allclose(routing.expert_weights, [[0.5, 1 / (1 + math.exp(-2))]], rtol=3e-7)


def test_topk_sigmoid_tells_logits_apart_whose_sigmoid_is_1():
    logits = np.float32([[30.0, 20.0, 40.0]])
    assert identity(3, kind="topk-sigmoid", top_k=2).route(logits).expert_ids.tolist() == [[2, 0]]
    assert identity(3, kind="sigmoid-topk", top_k=2).route(logits).expert_ids.tolist() == [[0, 1]]


@pytest.mark.parametrize("kind", ["sigmoid-topk", "sqrtsoftplus-topk"])
def test_scores_over_the_whole_range(kind):
    logits = np.linspace(-86, 100, 4001, dtype=np.float32)[:, np.newaxis]
    found = identity(1, kind=kind, top_k=1, renormalize=False).route(logits).expert_weights
    np.testing.assert_allclose(found, reference.scores(logits.astype(np.float64), kind), rtol=3e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_at_the_ends_of_float32(kind):
    largest = np.finfo(np.float32).max
    routing = identity(4, kind=kind, top_k=4, correction_bias=np.zeros(4, np.float32)).route(
        np.float32([[-largest, largest, 0, -largest], [-largest] * 4, [largest] * 4])
    )
    first = (
        [1, 0, 2, 3] if kind == "softmax-topk" else [1, 2, 0, 3]
    )  # a softmax leaves nothing for 0 beside the largest
    assert routing.expert_ids.tolist() == [first, [0, 1, 2, 3], [0, 1, 2, 3]]
    assert np.isfinite(routing.expert_weights).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("tokens", [(0,), (13, 9, 11), (300, 299, 57), (399,), (399, 100, 200)])
def test_the_first_token_whose_logits_are_not_finite_is_named(tokens, bad, threads, kind):
    hidden = numbers(1, 400, 64)
    for token in tokens:
        hidden[token, token % 64] = bad
    router = Router.from_array(numbers(2, 17, 64), kind=kind, correction_bias=numbers(3, 17), threads=threads)
    with pytest.raises(InvalidInput, match=f"at token {min(tokens)}\n"):
        router.route(hidden)


def test_a_correction_that_makes_logits_overflow_is_refused():
    correction = np.full(3, 3e38, np.float32)
    router = identity(3, kind="topk-sigmoid", correction_bias=correction)
    with pytest.raises(InvalidInput, match="at token 1\n"):
        router.route(np.float32([[0, 1, 2], [0, 3e38, 0]]))


def test_by_scores_a_softmax_is_the_same_softmax():
    logits = numbers(1, 200, 20) * 4
    for renormalize in (False, True):
        plain = identity(20, top_k=5, renormalize=renormalize).route(logits)
        zeros = np.zeros(20, np.float32)
        scored = identity(20, top_k=5, renormalize=renormalize, correction_bias=zeros).route(logits)
        np.testing.assert_array_equal(scored.expert_ids, plain.expert_ids)
        np.testing.assert_allclose(scored.expert_weights, plain.expert_weights, rtol=5e-7)


def test_options_that_change_nothing_change_no_bit():
    logits = numbers(1, 50, 12) * 4
    plain = identity(12, top_k=3).route(logits).expert_weights
    for options in (
        {"epsilon": 0.0},
        {"n_groups": 4, "topk_groups": 4},
        {"n_groups": 12, "topk_groups": 12},
        {"scale": 1},
    ):
        np.testing.assert_array_equal(identity(12, top_k=3, **options).route(logits).expert_weights, plain)


@pytest.mark.parametrize("kind", ["softmax-topk", "topk-softmax"])
@pytest.mark.parametrize("renormalize", [False, True])
def test_scale_of_the_gates_that_choose_by_logits(renormalize, kind):
    logits = numbers(1, 50, 12) * 4
    one, four, third = (
        identity(12, kind=kind, top_k=3, renormalize=renormalize, scale=scale).route(logits).expert_weights
        for scale in (1.0, 4.0, 1 / 3)
    )
    np.testing.assert_array_equal(four, one * 4)
    np.testing.assert_array_equal(third, one * np.float32(1 / 3))


def test_taylor_softmax_by_scores():
    logits = numbers(1, 100, 12) * 4
    options = {"top_k": 3, "renormalize": False, "n_groups": 4, "topk_groups": 2}
    exact, taylor = (identity(12, gating=gating, **options).route(logits) for gating in ("exact", "taylor"))
    assert (exact.expert_weights != taylor.expert_weights).any()
    np.testing.assert_allclose(np.sort(taylor.expert_weights), np.sort(exact.expert_weights), atol=0.003)


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    n_groups=st.integers(1, 6),
    size=st.integers(2, 9),
    share=st.floats(0, 1),
    n_tokens=st.integers(1, 40),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_a_token_is_routed_alike_in_any_company(kind, n_groups, size, share, n_tokens, seed, data):
    n_groups = 1 if kind == "topk-sigmoid" else n_groups
    n_experts, topk_groups = n_groups * size, 1 + int(share * (n_groups - 1))
    top_k = data.draw(st.integers(1, topk_groups * size))
    groups = {"n_groups": n_groups, "topk_groups": topk_groups}
    correction = numbers(seed, n_experts)
    router = Router.from_array(
        numbers(seed, n_experts, 7), kind=kind, top_k=top_k, correction_bias=correction, threads=1 + seed % 3, **groups
    )
    hidden = numbers(seed + 1, n_tokens, 7)
    whole = router.route(hidden)
    order = data.draw(st.permutations(range(n_tokens)))
    shuffled = router.route(hidden[order])
    np.testing.assert_array_equal(shuffled.expert_ids, whole.expert_ids[order])
    np.testing.assert_array_equal(shuffled.expert_weights, whole.expert_weights[order])
    for token in range(n_tokens):
        one = router.route(hidden[token : token + 1])
        np.testing.assert_array_equal(one.expert_ids[0], whole.expert_ids[token])
        np.testing.assert_array_equal(one.expert_weights[0], whole.expert_weights[token])
    assert all(len({e // size for e in ids}) <= topk_groups for ids in whole.expert_ids.tolist())


@pytest.mark.parametrize("n_tokens", [0, 1, 3, 4, 5, 95, 96, 97, 300])
@pytest.mark.parametrize("n_experts", [20, 1024])
def test_tokens_around_the_blocks(n_experts, n_tokens):
    hidden, weight = numbers(2, n_tokens, 7), numbers(4, n_experts, 7)
    router = Router.from_array(weight, kind="sigmoid-topk", top_k=3, correction_bias=numbers(3, n_experts))
    for balancer in (None, Balancer(n_experts)):
        routing = router.route(hidden, balancer)
        alone = Balancer(n_experts) if balancer else None
        one_by_one = [router.route(hidden[t : t + 1], alone).expert_ids[0].tolist() for t in range(n_tokens)]
        assert routing.expert_ids.tolist() == one_by_one


@pytest.mark.parametrize("kind", KINDS)
def test_all_of_1024_experts(kind):
    agree(numbers(2, 3, 1024) * 3, kind, 1024, numbers(1, 1024))


@pytest.mark.parametrize("kind", KINDS)
def test_noise_comes_before_the_scores(kind):
    logits, correction, drawn = numbers(1, 50, 6), numbers(2, 6), Gumbel(7)
    noisy = (logits + 0.5 * np.array([next(drawn) for _ in range(300)]).reshape(50, 6)).astype(np.float32)
    options = {"kind": kind, "top_k": 3, "correction_bias": correction}
    groups = {} if kind == "topk-sigmoid" else {"n_groups": 2, "topk_groups": 1}
    router = identity(6, **options, **groups)
    found, expected = router.route(logits, noise=GumbelNoise(0.5, 7)), router.route(noisy)
    np.testing.assert_array_equal(found.expert_ids, expected.expert_ids)
    np.testing.assert_allclose(found.expert_weights, expected.expert_weights, rtol=2e-6)
