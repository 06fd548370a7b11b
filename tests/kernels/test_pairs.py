"""bfloat16 weights and hidden states that bfloat16 holds, which some processors multiply in pairs: the bits of FMAs."""

import numpy as np
import pytest
from reference import BFloat16, high_halves, integers, numbers

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


@pytest.mark.parametrize("layout", ["packed", "in place"])
@pytest.mark.parametrize("n_tokens", [0, 1, 2, 7, 13, 150])
@pytest.mark.parametrize(("hidden", "inter"), [(1, 1), (16, 16), (24, 33), (65, 48)])
def test_narrow_states_are_rounded_between_the_projections(hidden, inter, n_tokens, layout):
    up, down, bias = weights_of(hidden, inter)
    down = np.concatenate([down, rounded(numbers(7, *down.shape))], 2)
    x = numbers(6, n_tokens, hidden)
    x[::3] = rounded(x[::3])
    if n_tokens:
        x[-1] = 2.0**-62
        bias[:, ::2] = 0  # so some states of the last token are small enough to be 0
    ids, scale = np.zeros((n_tokens, 1), np.int32), np.ones((n_tokens, 1), np.float32)
    relu = {"activation": "relu", "gated": False}
    whole = [a[:1] for a in (up, down, bias)]
    # The two projections apart, as layers of one more size: the other projection is then the identity.
    size = max(hidden, 2 * inter)
    eye = np.eye(2 * inter, size, dtype=np.float32)[None]
    widened_up = np.pad(whole[0], ((0, 0), (0, 0), (0, size - hidden)))
    first = Experts.from_arrays(widened_up, eye.transpose(0, 2, 1), gate_up_bias=whole[2], **relu)
    second = Experts.from_arrays(eye, np.pad(whole[1], ((0, 0), (0, size - hidden), (0, 0))), **relu)
    states = first.run(np.pad(x, ((0, 0), (0, size - hidden))), ids, scale)
    expected = second.run(narrowed(states), ids, scale)[:, :hidden]
    if layout == "in place":
        whole = [BFloat16(high_halves(a)) for a in whole]
    options = {"gate_up_bias": whole[2], "dtype": "bfloat16", "copy": layout == "packed", **relu}
    experts = Experts.from_arrays(*whole[:2], **options, intermediate_dtype="bfloat16")
    np.testing.assert_array_equal(experts.run(x, ids, scale), expected)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "int4"])
def test_only_bfloat16_weights_have_narrow_states(dtype):
    with pytest.raises(InvalidInput, match=rf"bfloat16 weights.*{dtype}.*at intermediate_dtype"):
        Experts.from_arrays(*weights_of(16, 16)[:2], dtype=dtype, intermediate_dtype="bfloat16")
    with pytest.raises(InvalidInput, match="at intermediate_dtype"):
        Experts.from_arrays(*weights_of(16, 16)[:2], dtype="bfloat16", intermediate_dtype="float16")
