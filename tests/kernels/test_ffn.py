"""Expert FFNs: to the last bit where no exponential is involved, against float64 where one is."""

import functools

import numpy as np
import pytest
import reference
from reference import ACTIVATIONS, Ffns, integers, numbers

from colibri_cli import Experts

pytestmark = pytest.mark.usefixtures("isa")

# Around the lanes (8), the panel (16), four panels and the block of rows (96); each size in turn, the others odd.
TOKENS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 31, 33, 95, 96, 97, 193)
WIDTHS = (1, 7, 8, 9, 15, 16, 17, 31, 33, 47, 63, 64, 65, 81, 129)
CASES = [
    *[(tokens, 13, 11, 1, 1) for tokens in TOKENS],
    *[(5, hidden, 9, 3, 2) for hidden in WIDTHS],
    *[(5, 9, inter, 3, 2) for inter in WIDTHS],
    *[(9, 10, 11, n_experts, 1) for n_experts in (2, 7, 8, 9, 17)],
    *[(9, 10, 11, 5, top_k) for top_k in (3, 4, 5)],
]


@functools.cache
def case(tokens, hidden, inter, n_experts, top_k, gated, bias, activation):
    """Make experts and a batch, and the answer to the last bit."""
    ffns = Ffns.make(1, n_experts, hidden, inter, gated=gated, bias=bias, activation=activation)
    x, weights = numbers(8, tokens, hidden), numbers(9, tokens, top_k)
    ids = np.argsort(numbers(10, tokens, n_experts), axis=1, kind="stable")[:, :top_k].astype(np.int32)
    return ffns, (x, ids, weights), ffns.bits(x, ids, weights)


@pytest.mark.parametrize(("gated", "bias"), [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize("sizes", CASES, ids=lambda sizes: "T{}-H{}-I{}-E{}-K{}".format(*sizes))
def test_every_bit_at_sizes_around_the_lanes(sizes, gated, bias):
    ffns, batch, expected = case(*sizes, gated, bias, "relu")
    np.testing.assert_array_equal(Experts.from_arrays(**ffns.arrays(), threads=1).run(*batch), expected)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1024, 640, 2, 2), (40, 300, 140, 2, 2)], ids=["decode", "prefill"])
def test_every_bit_when_threads_share_one_expert(sizes, gated):
    ffns, batch, expected = case(*sizes, gated, True, "relu2")
    for threads in (1, 2, 5):
        np.testing.assert_array_equal(Experts.from_arrays(**ffns.arrays(), threads=threads).run(*batch), expected)


@pytest.mark.parametrize("tokens", [6, 7, 8, 11, 33, 97])
@pytest.mark.parametrize(("hidden", "inter"), [(255, 256), (257, 19), (38, 513), (770, 70)])
def test_every_bit_of_inputs_in_blocks(hidden, inter, tokens):  # of 256, where many rows share them
    ffns = Ffns.make(1, 2, hidden, inter, activation="relu")
    x, ids, weights = numbers(2, tokens, hidden), np.ones((tokens, 1), np.int32), numbers(3, tokens, 1)
    expected = ffns.bits(x, ids, weights)
    for threads in (1, 3):
        experts = Experts.from_arrays(**ffns.arrays(), threads=threads)
        np.testing.assert_array_equal(experts.run(x, ids, weights), expected)


# More slots than states are held at once (1056): experts that share them, that have them alone, that have more.
CROWDS = {
    "share": lambda t, k: (t + k) % 5,
    "alone": lambda t, k: np.where(k == 0, 1, np.where(t % 2, 3, -1)),
    "more": lambda t, k: np.where(t % 600 == 599, k % 5, 2),
}


@pytest.mark.parametrize("crowd", CROWDS)
def test_every_bit_of_more_slots_than_are_held_at_once(crowd):
    ffns = Ffns.make(1, 5, 17, 9, activation="relu")
    x, weights = numbers(2, 700, 17), numbers(3, 700, 3)
    ids = np.fromfunction(CROWDS[crowd], (700, 3), dtype=np.int32).astype(np.int32)
    expected = ffns.bits(x, ids, weights)
    for threads in (1, 2, 5):
        experts = Experts.from_arrays(**ffns.arrays(), threads=threads, max_tokens=1024)
        np.testing.assert_array_equal(experts.run(x, ids, weights), expected)


def test_every_bit_of_the_clamped_gate():
    ffns = Ffns.make(1, 3, 19, 21, activation="relu", limit=0.25, beta=1.0)
    x, ids, weights = numbers(8, 12, 19), integers(9, 0, 3, 12, 2), numbers(10, 12, 2)
    up = ffns.expert(0, x)  # the clamp must be at work, or this shows nothing
    assert np.abs(up - Ffns.make(1, 3, 19, 21, activation="relu", beta=1.0).expert(0, x)).max() > 0.1
    np.testing.assert_array_equal(Experts.from_arrays(**ffns.arrays()).run(x, ids, weights), ffns.bits(x, ids, weights))


RULES = {
    "plain": {},
    "ungated": {"gated": False},
    "no bias": {"bias": False},
    "gpt-oss": {"limit": 7.0, "alpha": 1.702, "beta": 1.0},
    "tight": {"limit": 0.25, "alpha": 0.5, "beta": -0.5},
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_against_float64(activation, rule):
    ffns = Ffns.make(3, 5, 33, 49, activation=activation, **rule)
    x, ids, weights = numbers(4, 23, 33) * 8, integers(5, 0, 5, 23, 3), numbers(6, 23, 3)
    found, expected = Experts.from_arrays(**ffns.arrays()).run(x, ids, weights), ffns(x, ids, weights)
    assert np.abs(found - expected).max() < 1e-6 * np.abs(expected).max()


def curve(activation, x, **rule):
    """One expert of one hidden and one intermediate unit, with weights of 1: the activation alone."""
    one = np.ones((1, 1, 1), np.float32)
    experts = Experts.from_arrays(one, one, activation=activation, gated=False, **rule)
    x = np.asarray(x, np.float32).reshape(-1, 1)
    return experts.run(x, np.zeros(x.shape, np.int32), np.ones(x.shape, np.float32))[:, 0]


@pytest.mark.parametrize(
    ("activation", "relative"), [("relu", 0), ("relu2", 6e-8), ("silu", 2e-7), ("gelu", 8e-6), ("gelu_tanh", 1.2e-5)]
)
def test_the_curve_of_an_activation(activation, relative):
    x = np.concatenate([np.linspace(-9, 30, 20_001), numbers(1, 20_000) * 2, [0.0, 1e-40, -1e-40, 1e-30, -1e-30]])
    x = x.astype(np.float32)
    expected = reference.activation(activation, x.astype(np.float64))
    error = np.abs(curve(activation, x) - expected)
    assert (error <= relative * np.abs(expected) + 1e-37).all()


@pytest.mark.parametrize("alpha", [1.0, 1.702, -2.0])
def test_alpha_is_inside_the_sigmoid(alpha):
    x = np.linspace(-20, 20, 4_001, dtype=np.float32)
    expected = reference.activation("silu", x.astype(np.float64), float(np.float32(alpha)))
    np.testing.assert_allclose(curve("silu", x, alpha=alpha), expected, rtol=3e-6, atol=1e-37)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_ends_of_an_activation(activation):
    assert (np.abs(curve(activation, [-50.0, -1e3, -1e10, -1e20, -3e38])) < 1e-19).all()
    high, infinite, nan, none = curve(activation, [1e15, np.inf, np.nan, 0.0])
    assert high == np.float32(1e15) ** (2 if activation == "relu2" else 1)
    assert infinite == np.inf
    assert np.isnan(nan)
    assert none == 0


def test_a_clamp_lets_nan_through_and_stops_infinity():
    one = np.ones((1, 2, 1), np.float32)
    experts = Experts.from_arrays(one, one[:, :1], activation="relu", limit=3.0)
    x = np.array([[np.nan], [np.inf], [-np.inf], [2.0]], np.float32)
    found = experts.run(x, np.zeros((4, 1), np.int32), np.ones((4, 1), np.float32))[:, 0]
    np.testing.assert_array_equal(found, [np.nan, 9.0, 0.0, 4.0])


LAYOUTS = [("concatenated", False), ("concatenated", True), ("interleaved", False), ("interleaved", True)]


@pytest.mark.parametrize(("layout", "transposed"), LAYOUTS)
@pytest.mark.parametrize(("hidden", "inter"), [(1, 1), (8, 16), (17, 9), (33, 31), (65, 7)])
def test_layouts_hold_the_same_weights(hidden, inter, layout, transposed):
    ffns, batch, expected = case(5, hidden, inter, 3, 2, True, True, "relu")
    arrays = ffns.arrays()
    if layout == "interleaved":
        order = np.arange(2 * inter).reshape(2, inter).T.ravel()
        arrays["gate_up"], arrays["gate_up_bias"] = ffns.up[:, order], ffns.up_bias[:, order]
    if transposed:
        arrays["gate_up"] = np.ascontiguousarray(arrays["gate_up"].transpose(0, 2, 1))
        arrays["down"] = np.ascontiguousarray(ffns.down.transpose(0, 2, 1))
    found = Experts.from_arrays(**arrays, layout=layout, transposed=transposed).run(*batch)
    np.testing.assert_array_equal(found, expected)


def unaligned(array):
    """The same values one byte off any float's address."""
    memory = np.empty(array.nbytes + 1, np.uint8)
    view = memory[1:].view(np.float32).reshape(array.shape)
    view[...] = array
    return view


@pytest.mark.parametrize(
    "arrange",
    [
        np.asfortranarray,
        unaligned,
        lambda a: np.ascontiguousarray(a[::-1])[::-1],
        lambda a: np.ascontiguousarray(a[..., ::-1])[..., ::-1],
        lambda a: np.repeat(np.repeat(a, 2, axis=1), 3, axis=2)[:, ::2, ::3],
    ],
    ids=["fortran", "unaligned", "experts reversed", "inputs reversed", "every other"],
)
def test_weights_of_any_strides(arrange):
    ffns, batch, expected = case(5, 33, 31, 3, 2, True, True, "relu")
    arrays = ffns.arrays() | {"gate_up": arrange(ffns.up), "down": arrange(ffns.down)}
    np.testing.assert_array_equal(Experts.from_arrays(**arrays).run(*batch), expected)
