"""Weights in four types: the same bits everywhere, and how far each is from float64."""

import numpy as np
import pytest
from reference import Ffns, integers, numbers

from colibri_cli import Experts, InvalidInput, _core

# Root-mean-square error of the layer against float64, relative to the output, on weights without structure.
ERRORS = {"float32": 2e-6, "bfloat16": 3.5e-3, "float16": 5e-4, "int8": 1.05e-2, "int4": 0.15}
BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "int8": 8.25, "int4": 4.5}


def gaussian(*shape, seed):
    """Near enough: the sum of 12 uniform numbers."""
    return sum(numbers(seed + 100 * i, *shape) for i in range(12)).astype(np.float32) * np.float32(0.05)


def layer(dtype, threads=1, max_tokens=512, *, hidden=96, inter=80, n_experts=5):
    up = gaussian(n_experts, 2 * inter, hidden, seed=1)
    down = gaussian(n_experts, hidden, inter, seed=2)
    return up, down, Experts.from_arrays(up, down, dtype=dtype, threads=threads, max_tokens=max_tokens)


def batch(n_tokens, hidden=96, n_experts=5, top_k=2):
    return numbers(3, n_tokens, hidden), integers(4, 0, n_experts, n_tokens, top_k), numbers(5, n_tokens, top_k)


@pytest.mark.parametrize("dtype", _core.DTYPES)
@pytest.mark.parametrize("sizes", [(96, 80), (1, 1), (17, 33), (33, 31), (63, 65), (200, 97), (1100, 129)])
def test_bits_depend_on_nothing_but_the_token(dtype, sizes):
    hidden, inter = sizes
    x, ids, weights = batch(41, hidden)
    answers = set()
    before = _core.isa()
    try:
        for isa in _core.isa_names():
            _core.use_isa(isa)
            for threads, max_tokens in ((1, 512), (2, 512), (3, 7)):
                experts = layer(dtype, threads, max_tokens, hidden=hidden, inter=inter)[2]
                answers.add(experts.run(x, ids, weights).tobytes())
            rows = [experts.run(x[t : t + n], ids[t : t + n], weights[t : t + n]) for t, n in ((0, 1), (1, 3), (4, 37))]
            answers.add(np.concatenate(rows).tobytes())
    finally:
        _core.use_isa(before)
    assert len(answers) == 1


@pytest.mark.parametrize("dtype", _core.DTYPES)
def test_many_threads_share_one_projection(dtype):
    x, ids, weights = batch(150)
    one = layer(dtype)[2].run(x, ids, weights)
    np.testing.assert_array_equal(layer(dtype, 3)[2].run(x, ids, weights), one)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", _core.DTYPES)
def test_error_against_float64(dtype):
    up, down, experts = layer(dtype)
    x, ids, weights = batch(30)
    found = experts.run(x, ids, weights)
    expected = np.zeros(found.shape)
    for t, k in np.ndindex(ids.shape):
        gate, value = np.split(up[ids[t, k]].astype(np.float64) @ x[t], 2)
        expected[t] += weights[t, k] * (down[ids[t, k]].astype(np.float64) @ (gate / (1 + np.exp(-gate)) * value))
    error = np.sqrt(((found - expected) ** 2).mean() / (expected**2).mean())
    assert error < ERRORS[dtype]
    assert error > ERRORS[dtype] / 50, "weights are not held in this type"


@pytest.mark.parametrize("dtype", _core.DTYPES)
def test_bits_a_weight(dtype):
    up, down, experts = layer(dtype, hidden=128, inter=64)
    n_bytes = experts.stats()["resident_bytes"]
    if dtype == "int4":
        n_bytes -= 4 * len(up) * (2 * 64 + 128) / 16  # a float for 16 columns
    assert n_bytes * 8 / (up.size + down.size) == BITS[dtype]


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("times", [1e4, 1e30])
def test_an_outlier_coarsens_only_what_is_near(dtype, times):
    up, down = layer(dtype)[:2]
    x, ids, weights = batch(30)
    before = Experts.from_arrays(up, down, dtype=dtype).run(x, ids, weights)
    down[:, 20, 7] *= times
    after = Experts.from_arrays(up, down, dtype=dtype).run(x, ids, weights)
    panel = slice(16, 32) if dtype == "int4" else slice(20, 21)
    assert np.abs(after[:, 20]).mean() > np.abs(before[:, 20]).mean() * times / 100
    np.testing.assert_array_equal(np.delete(after, panel, 1), np.delete(before, panel, 1))


def test_weights_that_bfloat16_holds_give_float32s_bits():
    x, ids, weights = batch(20)
    ffns = [a.view(np.uint32) & np.uint32(0xFFFF0000) for a in layer("float32")[:2]]
    up, down = (a.view(np.float32) for a in ffns)
    exact = Experts.from_arrays(up, down, dtype="float32").run(x, ids, weights)
    np.testing.assert_array_equal(Experts.from_arrays(up, down, dtype="bfloat16").run(x, ids, weights), exact)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("transposed", [False, True])
def test_every_number_of_float16_is_exact(transposed):
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    halves = np.where(np.isfinite(halves), halves, 0).astype(np.float16).reshape(16, 64, 64)
    identity = np.broadcast_to(np.eye(64, dtype=np.float16), halves.shape)
    up = halves.transpose(0, 2, 1) if transposed else halves
    experts = Experts.from_arrays(
        up.copy(), identity.copy(), gated=False, activation="relu", dtype="float16", transposed=transposed, copy=False
    )
    for sign in (1, -1):
        x = np.tile(sign * np.eye(64, dtype=np.float32), (16, 1))
        y = experts.run(x, np.arange(1024, dtype=np.int32)[:, None] // 64, np.ones((1024, 1), np.float32))
        expected = np.maximum(sign * halves.astype(np.float32), 0).transpose(0, 2, 1).reshape(1024, 64)
        np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("value", [65520.0, -1e30])
def test_what_float16_cannot_hold_is_refused(value):
    up, down = layer("float32")[:2]
    down[3, 20, 7] = value
    with pytest.raises(InvalidInput, match=r"at most 65,504, .* - at down\[3\]"):
        Experts.from_arrays(up, down, dtype="float16")
    down[3, 20, 7] = 65519
    Experts.from_arrays(up, down, dtype="float16")


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("value", [0.0, 0.75, -0.75, 3e-39])
def test_weights_that_are_all_the_same(dtype, value):
    up = np.full((1, 64, 64), value, np.float32)
    experts = Experts.from_arrays(up, up, gated=False, activation="relu", dtype=dtype)
    x = np.ones((3, 64), np.float32)
    y = experts.run(x, np.zeros((3, 1), np.int32), np.ones((3, 1), np.float32))
    expected = 64 * value * max(64 * value, 0)
    np.testing.assert_allclose(y, np.full((3, 64), expected, np.float32), rtol=0.02, atol=1e-30)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", _core.DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_row(dtype, bad):
    experts = layer(dtype)[2]
    x, ids, weights = batch(9)
    expected = experts.run(x, ids, weights)
    x[4, 50] = bad
    found = experts.run(x, ids, weights)
    assert not np.isfinite(found[4]).all()
    np.testing.assert_array_equal(np.delete(found, 4, 0), np.delete(expected, 4, 0))


@pytest.mark.parametrize("dtype", _core.DTYPES)
@pytest.mark.parametrize("activation", _core.ACTIVATIONS)
def test_every_expert_of_the_reference(dtype, activation):
    ffns = Ffns.make(7, 3, 40, 24, activation=activation)
    x, ids, weights = batch(6, 40, 3)
    exact = Experts.from_arrays(**ffns.arrays()).run(x, ids, weights)
    found = Experts.from_arrays(**ffns.arrays(), dtype=dtype).run(x, ids, weights)
    error = np.sqrt(((found - exact) ** 2).mean() / (exact**2).mean())
    assert error < {"float32": 1e-9, "bfloat16": 0.02, "float16": 0.003, "int8": 0.04, "int4": 0.5}[dtype]
