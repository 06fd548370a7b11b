import numpy as np
import pytest
import reference
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from reference import numbers

from colibri_cli import InvalidInput, Router, _core

pytestmark = pytest.mark.usefixtures("isa")

GATINGS = ("exact", "taylor")
BOUND = {"exact": 1e-6, "taylor": 0.003}
LARGEST = float(np.finfo(np.float32).max)
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
EXTREMES = [
    [LARGEST, -LARGEST, 0, 0, 0, 0, 0, 0],
    [3e38, 3e38, -3e38, -3e38, 1, 1, 1, 1],
    [-LARGEST] * 8,
    [LARGEST] * 8,
    [1e-45, -1e-45, 1e-40, -1e-40, 0.0, -0.0, 1e-38, -1e-38],
    [88, -88, 87.5, -87.5, 103, -104, 0.5, -0.5],
    [0, -0.3465735, -0.17328675, -0.17328674, -0.5198603, -0.693147, -86.4, -86.6],
    [-1e10, -1e10, -1e10 + 1024, -1e10, -1e10, -1e10, -1e10, -1e10],
]


def errors(logits, gating):
    logits = np.asarray(logits, np.float32)
    return np.abs(_core.softmax(logits, gating) - reference.softmax(logits.astype(np.float64))).max(initial=0)


@pytest.mark.parametrize("gating", GATINGS)
@pytest.mark.parametrize("n_columns", [8, 16, 24, 64, 1024])
@pytest.mark.parametrize("n_tokens", [0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 129])
def test_sizes_around_the_lanes(n_tokens, n_columns, gating):
    logits = numbers(1, n_tokens, n_columns) * 10
    assert errors(logits, gating) < BOUND[gating]
    np.testing.assert_allclose(_core.softmax(logits, gating).sum(axis=1, dtype=np.float64), 1, atol=4e-6)


@pytest.mark.parametrize("gating", GATINGS)
def test_every_finite_input(gating):
    assert errors(EXTREMES, gating) < BOUND[gating]
    differences = np.linspace(-90, 90, 100_003, dtype=np.float32)  # against one other expert: the worst case
    pairs = np.full((len(differences), 8), -LARGEST, np.float32)
    pairs[:, 3], pairs[:, 5] = differences, 0
    assert errors(pairs, gating) < BOUND[gating]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(hnp.arrays(np.float32, (9, 8), elements=FINITE | st.floats(-20, 20, width=32)))
def test_any_finite_input(logits):
    for gating in GATINGS:
        assert errors(logits, gating) < BOUND[gating]


def test_taylor_is_not_the_exact_exponential():
    logits = numbers(1, 50, 8) * 4
    assert errors(logits, "taylor") > 1e-4


@pytest.mark.parametrize("gating", GATINGS)
def test_equal_logits_get_equal_probabilities(gating):
    logits = np.repeat(numbers(1, 20, 4) * 5, 2, axis=1)
    found = _core.softmax(logits, gating)
    np.testing.assert_array_equal(found[:, ::2], found[:, 1::2])
    np.testing.assert_array_equal(_core.softmax(np.full((1, 8), 7, np.float32), gating), np.full((1, 8), 0.125))


@pytest.mark.parametrize("gating", GATINGS)
def test_a_higher_logit_never_gets_less(gating):
    logits = np.arange(-1024, 0, dtype=np.float32) / 64  # crosses every boundary of the range reduction down to -16
    found = _core.softmax(logits[np.newaxis], gating)[0]
    assert (np.diff(found) >= 0).all()


@pytest.mark.parametrize("gating", GATINGS)
def test_rows_with_a_stride_are_read_in_place(gating):
    whole = numbers(1, 19, 48) * 10
    np.testing.assert_array_equal(
        _core.softmax(whole[::2, 16:32], gating), _core.softmax(whole[::2, 16:32].copy(), gating)
    )


@pytest.mark.parametrize("gating", GATINGS)
@pytest.mark.parametrize("n_experts", [1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 100])
def test_a_router_of_any_width(n_experts, gating):
    router = Router.from_array(
        np.eye(n_experts, dtype=np.float32), top_k=n_experts, renormalize=False, gating=gating, threads=1
    )
    logits = numbers(1, 17, n_experts) * 10
    routing = router.route(logits)
    found = np.empty(logits.shape)
    np.put_along_axis(found, routing.expert_ids.astype(np.int64), routing.expert_weights, axis=1)
    assert np.abs(found - reference.softmax(logits.astype(np.float64))).max() < BOUND[gating]


@pytest.mark.parametrize("shape", [(3, 7), (3, 0), (3, 1032)])
def test_other_widths_are_refused(shape):
    with pytest.raises(InvalidInput, match="multiple of 8"):
        _core.softmax(np.zeros(shape, np.float32))
