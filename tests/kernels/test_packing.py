"""Weights as they are held: found by asking a layer for each input alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from reference import integers, numbers

from colibri_cli import Experts, _core

N = 128  # inputs and outputs: two groups of int8, four of int4, eight panels
GROUPS = {"int8": (N, N // 64, 64), "int4": (N, N // 32, 32)}
# Held exactly, beside zeros.
ONE = {"float32": 1.0, "bfloat16": 1.0, "float16": 1.0, "int8": 127 / 128, "int4": 15 / 16}
QUANTISED = ("int8", "int4")
STEPS = {"int8": 127, "int4": 15}

few = settings(max_examples=60, deadline=None)
sizes = st.integers(-100, 120).map(lambda n: np.float32(2.0**n))
shapes = hnp.arrays(np.float32, (N, N), elements=st.floats(-1, 1, width=32), fill=st.just(np.float32(0.25)))


def held(w, dtype, threads=1):
    """The float32 (N, N) that a layer computes with in place of w."""
    one = np.eye(N, dtype=np.float32)
    experts = Experts.from_arrays(
        one[None] * np.float32(ONE[dtype]), w[None], gated=False, activation="relu", dtype=dtype, threads=threads
    )
    y = experts.run(one, np.zeros((N, 1), np.int32), np.ones((N, 1), np.float32))
    return y.T / np.float32(ONE[dtype])


def errors(w, dtype):
    """Of each group: root-mean-square error, and the distance between its largest and smallest weight and 0."""
    groups = w.reshape(GROUPS[dtype]).astype(np.float64)
    found = held(w, dtype).reshape(GROUPS[dtype])
    assert np.isfinite(found).all()
    span = np.maximum(groups.max(-1), 0) - np.minimum(groups.min(-1), 0)
    if dtype == "int8":
        span = np.abs(groups).max(-1)
    return np.sqrt(((found - groups) ** 2).mean(-1)), span


@pytest.mark.parametrize("dtype", QUANTISED)
@few
@given(
    w=hnp.arrays(np.float32, (N, N), elements=st.floats(-(2.0**123), 2.0**123, width=32), fill=st.just(np.float32(1.0)))
)
def test_finite_weights_give_finite_results(w, dtype):
    assert np.isfinite(held(w, dtype)).all()


@pytest.mark.parametrize("dtype", QUANTISED)
@few
@given(w=shapes, size=sizes)
def test_a_group_is_never_far_off(w, size, dtype):
    """Half a step, if steps span what the group spans; int4 keeps 14 octaves below a panel's largest weight."""
    w = w * size
    w[::16, 0] = w[::16, 64] = np.abs(w).max()
    error, span = errors(w, dtype)
    floor = np.abs(w).max() * 2.0**-14 if dtype == "int4" else 1e-35
    assert (error <= 0.5 * np.maximum(span / STEPS[dtype], floor)).all()


@few
@given(
    codes=hnp.arrays(np.int32, GROUPS["int4"], elements=st.integers(0, 15)),
    scale=st.integers(16, 31),
    zero=st.integers(0, 240),
    exponent=st.integers(-100, 100),
    data=st.data(),
)
def test_what_int4_can_say_is_held_exactly(codes, scale, zero, exponent, data):
    """Steps of five bits, which are not the same in every group, and codes that reach both ends."""
    codes[..., data.draw(st.integers(0, 15))] = 0
    codes[..., data.draw(st.integers(16, 31))] = 15
    steps = np.float32(scale) * np.float32(2.0) ** (integers(5, 0, 8, *GROUPS["int4"][:2], 1) + exponent)
    w = ((16 * codes - zero) * steps).astype(np.float32).reshape(N, N)
    np.testing.assert_allclose(held(w, "int4"), w, rtol=2e-6, atol=2e-6 * 240 * float(steps.max()))


@few
@given(codes=hnp.arrays(np.int32, GROUPS["int8"], elements=st.integers(-127, 127)), scale=st.integers(128, 255))
def test_what_int8_can_say_is_held_exactly(codes, scale):
    codes[..., 3] = 127
    w = (codes * np.float32(scale) * np.float32(2.0) ** integers(5, -90, 90, *GROUPS["int8"][:2], 1)).astype(np.float32)
    np.testing.assert_allclose(held(w.reshape(N, N), "int8"), w.reshape(N, N), rtol=2e-6)


@pytest.mark.parametrize("dtype", QUANTISED)
@pytest.mark.parametrize(
    "w",
    [
        np.zeros((N, N)),
        np.full((N, N), 0.7),
        np.full((N, N), -0.7),
        np.where(np.arange(N * N).reshape(N, N) % 2, 1e-30, -1e-30),
        np.geomspace(1e-20, 1e20, N * N).reshape(N, N),
        np.full((N, N), 1e-40),
        np.where(np.arange(N * N).reshape(N, N) == 77, 1e30, 1e-3),
    ],
    ids=["zeros", "constant", "negative", "tiny", "ratios", "denormal", "outlier"],
)
def test_odd_weights(w, dtype):
    error, span = errors(w.astype(np.float32), dtype)
    of_panel = np.abs(w).reshape(N // 16, -1).max(1).repeat(16)[:, None]
    floor = 0.5 * of_panel * 2.0**-14 if dtype == "int4" else 0.0
    assert (error <= np.maximum(0.5 * span / STEPS[dtype], floor) + 1e-35).all()
    assert (error[span == 0] == 0).all()


@pytest.mark.parametrize("dtype", _core.DTYPES)
def test_layout_and_threads_of_packing_change_nothing(dtype):
    w = numbers(1, 3 * N, 2 * N)[::3, ::2]
    plain = held(np.ascontiguousarray(w), dtype)
    column_major, backwards = np.asfortranarray(w), np.ascontiguousarray(w[::-1, ::-1])[::-1, ::-1]
    for source in (w, column_major, backwards):
        for threads in (1, 3):
            np.testing.assert_array_equal(held(source, dtype, threads), plain)


@pytest.mark.parametrize("dtype", QUANTISED)
def test_instruction_sets_choose_the_same(dtype):
    w = numbers(2, N, N) ** 3
    before, answers = _core.isa(), set()
    try:
        for isa in _core.isa_names():
            _core.use_isa(isa)
            answers.add(held(w, dtype).tobytes())
    finally:
        _core.use_isa(before)
    assert len(answers) == 1


@pytest.mark.parametrize(("dtype", "most"), [("int8", 0.0056), ("int4", 0.0692)])
def test_error_on_gaussian_weights(dtype, most):
    w = sum(numbers(10 + i, N, N) for i in range(12)).astype(np.float32)
    assert 0.9 * most < np.sqrt(((held(w, dtype) - w) ** 2).mean() / (w**2).mean()) < most
