"""bfloat16 weights and hidden states that bfloat16 holds, which some processors multiply in pairs: the bits of FMAs."""

import numpy as np
import pytest
from reference import BFloat16, blocks, high_halves, integers, numbers

from colibri_cli import Experts, InvalidInput, _core

pytestmark = pytest.mark.usefixtures("isa")

N_EXPERTS = 3


def rounded(values):
    """To nearest in bfloat16, as float32."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def weights_of(hidden, inter):
    up, down = (rounded(numbers(i, N_EXPERTS, *size)) for i, size in ((1, (2 * inter, hidden)), (2, (hidden, inter))))
    return up, down, rounded(numbers(3, N_EXPERTS, 2 * inter))


def run(up, down, bias, x, *, dtype="bfloat16", layout="packed", **options):
    ids, weights = integers(4, 0, N_EXPERTS, len(x), 2), numbers(5, len(x), 2)
    if layout == "in place":
        up, down, bias = (BFloat16(high_halves(a)) for a in (up, down, bias))
        experts = Experts.from_arrays(up, down, gate_up_bias=bias, dtype=dtype, copy=False, **options)
    else:
        experts = Experts.from_arrays(up, down, gate_up_bias=bias, dtype=dtype, **options)
    return experts.run(x, ids, weights)


def by_fmas(*arrays, **options):
    """What the scalar kernels say, on the same weights as float32."""
    before = _core.isa()
    _core.use_isa("scalar")
    try:
        return run(*arrays, dtype="float32", **options)
    finally:
        _core.use_isa(before)


@pytest.mark.parametrize("layout", ["packed", "in place"])
@pytest.mark.parametrize("n_tokens", [0, 1, 2, 3, 5, 8, 9, 11, 17, 31, 150])
@pytest.mark.parametrize(("hidden", "inter"), [(1, 1), (2, 16), (3, 17), (64, 24), (65, 33), (130, 48)])
def test_the_bits_are_those_of_fmas(hidden, inter, n_tokens, layout):
    arrays = weights_of(hidden, inter)
    x = rounded(numbers(6, n_tokens, hidden))
    np.testing.assert_array_equal(run(*arrays, x, layout=layout), by_fmas(*arrays, x))


def times(name, factor):
    def change(arrays):
        arrays[name] *= np.float32(factor)

    return change


def put(name, index, value):
    def change(arrays):
        arrays[name][index] = value

    return change


TINY = 2.0**-70  # squared it is a denormal
EVERY = slice(None)
CASES = {
    "a float32 among the states": [put("x", (3, -1), np.float32(1 / 3))],
    "tiny states": [times("x", TINY)],
    "a denormal state": [put("x", 2, 0), put("x", (2, 5), 2.0**-133), times("bias", 0)],
    "tiny weights": [times("up", TINY)],
    "a denormal weight": [times("up", 0), put("up", (EVERY, 30, 7), 2.0**-133), times("bias", 0)],
    "both tiny": [times("up", TINY), times("x", TINY), times("bias", 0)],
    "a denormal bias": [times("up", 0), times("bias", 0), put("bias", (EVERY, 20), 2.0**-130)],
    "zeros": [put("up", (..., slice(None, None, 2)), 0), put("x", (..., slice(None, None, 2)), 0), times("bias", 0)],
    "negative zeros": [times("up", -0.0), times("bias", -0.0)],
    "large": [times("up", 2.0**64), times("x", 2.0**58)],
    "infinite states": [put("x", (4, 1), np.inf)],
    "states that are NaN": [put("x", (4, 1), np.nan)],
    "infinite weights": [put("up", (EVERY, 3, 1), -np.inf)],
}


@pytest.mark.parametrize("layout", ["packed", "in place"])
@pytest.mark.parametrize("case", CASES)
def test_what_pairs_would_get_wrong_is_left_to_fmas(case, layout):
    up, down, bias = weights_of(38, 16)
    down = rounded(np.concatenate([down, down], 2) * np.float32(1 if case == "large" else 2.0**64))  # a denormal shows
    x = rounded(numbers(6, 29, 38))
    for change in CASES[case]:
        change({"up": up, "bias": bias, "x": x})
    relu = {"activation": "relu", "gated": False}
    np.testing.assert_array_equal(run(up, down, bias, x, layout=layout, **relu), by_fmas(up, down, bias, x, **relu))


def narrowed(states):
    """What intermediate states become: the nearest bfloat16, and 0 below 2^-60."""
    return np.where(np.abs(states) < np.float32(2.0**-60), np.float32(0), rounded(states))


LAYOUTS = ["packed", "in place", "transposed"]
RELU = {"activation": "relu", "gated": False}


def run_narrow(up, down, biases, x, layout, **options):
    """One expert of ReLU, all of it in bfloat16."""
    arrays = [a[None] for a in (up, down, *biases)]
    if layout != "packed":
        arrays = [high_halves(a) for a in arrays]
    if layout == "transposed":
        arrays[:2] = [np.ascontiguousarray(a.swapaxes(1, 2)).swapaxes(1, 2) for a in arrays[:2]]
    if layout != "packed":
        arrays = [BFloat16(a) for a in arrays]
    named = dict(zip(("gate_up_bias", "down_bias"), arrays[2:], strict=True))
    options = {"dtype": "bfloat16", "intermediate_dtype": "bfloat16", "copy": layout == "packed", **RELU, **options}
    experts = Experts.from_arrays(*arrays[:2], **named, **options)
    return experts.run(x, np.zeros((len(x), 1), np.int32), np.ones((len(x), 1), np.float32))


def by_the_rule(up, down, biases, x):
    """What docs/numerics.md says of it, without any kernel."""
    states = np.maximum(blocks(x, up, biases[0]), np.float32(0))
    return np.float32(0) + blocks(narrowed(states), down, biases[1])


def narrow_case(hidden, inter, n_tokens, exact=True):
    up, down = rounded(numbers(1, inter, hidden)), rounded(numbers(2, hidden, inter))
    biases = [rounded(numbers(3, inter)), rounded(numbers(4, hidden))]
    x = numbers(6, n_tokens, hidden)
    return up, down, biases, rounded(x) if exact else x


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n_tokens", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 33, 47, 49, 64, 97, 150])
@pytest.mark.parametrize(("hidden", "inter"), [(1, 1), (31, 33), (32, 32), (64, 48), (65, 96), (96, 40)])
def test_narrow_layers_sum_in_blocks(hidden, inter, n_tokens, layout):
    case = narrow_case(hidden, inter, n_tokens)
    np.testing.assert_array_equal(run_narrow(*case, layout), by_the_rule(*case))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_of_many_inputs(layout):
    """More than a matrix instruction's weights and lanes are taken at once, and than rows are held in one block."""
    up, down, biases, x = narrow_case(1056, 544, 203)
    found = [run_narrow(up, down, biases, x, layout, threads=threads) for threads in (1, 2)]
    assert (found[0] == found[1]).all()
    rows = [0, 1, 15, 16, 95, 96, 97, 191, 192, 202]
    np.testing.assert_array_equal(found[0][rows], by_the_rule(up, down, biases, x[rows]))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n_tokens", [1, 2, 7, 13, 41])
def test_narrow_layers_of_hidden_states_that_bfloat16_does_not_hold(n_tokens, layout):
    up, down, biases, x = narrow_case(64, 64, n_tokens, exact=False)
    x[::3] = rounded(x[::3])
    np.testing.assert_array_equal(run_narrow(up, down, biases, x, layout), by_the_rule(up, down, biases, x))


NARROW_CASES = {
    "tiny hidden states": [put("x", 3, 2.0**-62), put("bias", slice(None, None, 2), 0)],  # and states that become 0
    "a tiny weight up": [put("up", (30, 33), 2.0**-60)],
    "a tiny weight down": [put("down", (17, 5), 2.0**-60)],
    "tiny weights": [times("up", 2.0**-66), times("down", 2.0**-66)],
    "a denormal start": [put("up", 20, 0), put("bias", 20, 2.0**-130)],
    "zeros": [put("up", slice(None, None, 2), 0), put("x", slice(8, 12), 0)],
    "negative zeros": [times("up", -0.0), times("bias", -0.0)],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", NARROW_CASES)
def test_what_matrix_instructions_would_get_wrong_is_left_to_fmas(case, layout):
    up, down, biases, x = narrow_case(64, 64, 29)
    for change in NARROW_CASES[case]:
        change({"up": up, "down": down, "bias": biases[0], "x": x})
    np.testing.assert_array_equal(run_narrow(up, down, biases, x, layout), by_the_rule(up, down, biases, x))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_narrow_layers_keep_what_is_not_finite_in_its_row(layout):
    up, down, biases, x = narrow_case(64, 64, 29)
    expected = run_narrow(up, down, biases, x, layout)
    x[4, 1], x[5, 3] = np.inf, np.nan
    found = run_narrow(up, down, biases, x, layout)
    assert not np.isfinite(found[4:6]).any()
    np.testing.assert_array_equal(np.delete(found, (4, 5), 0), np.delete(expected, (4, 5), 0))


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "int4"])
def test_only_bfloat16_weights_have_narrow_states(dtype):
    with pytest.raises(InvalidInput, match=rf"bfloat16 weights.*{dtype}.*at intermediate_dtype"):
        Experts.from_arrays(*weights_of(16, 16)[:2], dtype=dtype, intermediate_dtype="bfloat16")
    with pytest.raises(InvalidInput, match="at intermediate_dtype"):
        Experts.from_arrays(*weights_of(16, 16)[:2], dtype="bfloat16", intermediate_dtype="float16")
