import numpy as np
import pytest
from reference import Gumbel, numbers, route, softmax

from colibri_cli import GumbelNoise, InvalidInput, Router

pytestmark = pytest.mark.usefixtures("isa")


def identity(n_experts, **options):
    return Router.from_array(np.eye(n_experts, dtype=np.float32), **options)


@pytest.mark.parametrize("seed", [0, 1, 42, 2**63, 2**64 - 1])
@pytest.mark.parametrize("temperature", [0.25, 1.0, 3.0])
def test_choices_and_weights_are_those_of_the_noisy_logits(temperature, seed):
    logits = numbers(1, 50, 5)
    drawn = Gumbel(seed)
    noisy = logits + temperature * np.array([next(drawn) for _ in range(logits.size)]).reshape(logits.shape)
    ids, weights = route(noisy, "topk-softmax", 3)
    routing = identity(5, kind="topk-softmax", top_k=3).route(logits, noise=GumbelNoise(temperature, seed))
    np.testing.assert_array_equal(routing.expert_ids, ids)
    np.testing.assert_allclose(routing.expert_weights, weights, atol=2e-6)
    np.testing.assert_array_equal(routing.load, np.bincount(ids.ravel(), minlength=5))


def test_the_stream_goes_on_over_calls():
    logits, router = numbers(1, 60, 9), identity(9)
    whole = router.route(logits, noise=GumbelNoise(1.0, 3)).expert_ids
    noise = GumbelNoise(1.0, 3)
    parts = [router.route(logits[a:b], noise=noise).expert_ids for a, b in [(0, 1), (1, 8), (8, 8), (8, 60)]]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_at_temperature_1_experts_come_up_as_often_as_their_softmax_says():
    logits = np.float32([1.5, 0.0, -1.0, 0.5, 1.0])
    n = 40_000
    ids = identity(5, top_k=2).route(np.tile(logits, (n, 1)), noise=GumbelNoise(1.0, 11)).expert_ids
    p = softmax(logits.astype(np.float64))
    spread = np.sqrt(n * p * (1 - p))
    assert (np.abs(np.bincount(ids[:, 0], minlength=5) - n * p) < 4 * spread).all()
    second = p * ((p / (1 - p)).sum() - p / (1 - p))  # without replacement
    assert (np.abs(np.bincount(ids[:, 1], minlength=5) - n * second) < 4 * np.sqrt(n * second)).all()


def test_little_noise_changes_no_clear_choice_and_much_noise_hides_it():
    logits = np.tile(np.float32([0, 4, 0, 0]), (500, 1))
    router = identity(4, top_k=1)
    assert (router.route(logits, noise=GumbelNoise(0.01, 1)).expert_ids == 1).all()
    share = (router.route(logits, noise=GumbelNoise(1e6, 1)).expert_ids == 1).mean()
    assert 0.15 < share < 0.35


def test_noise_is_off_by_default():
    logits, router = numbers(1, 20, 8), identity(8)
    plain = router.route(logits).expert_ids
    assert (router.route(logits, noise=GumbelNoise(5.0, 1)).expert_ids != plain).any()
    np.testing.assert_array_equal(router.route(logits).expert_ids, plain)


@pytest.mark.parametrize("temperature", [0, -1, np.nan, np.inf, 1e39, 1e-60])
def test_a_temperature_is_a_float32_above_0(temperature):
    with pytest.raises(InvalidInput, match="temperature"):
        GumbelNoise(temperature, 1)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_has_64_bits(seed):
    with pytest.raises(InvalidInput, match="seed"):
        GumbelNoise(1.0, seed)
