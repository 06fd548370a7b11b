"""Another library may have changed how this thread rounds; the bits stay, and so does the mode."""

import ctypes
import ctypes.util

import numpy as np
import pytest
from reference import Ffns, integers, numbers

from colibri_cli import Experts, Model, MoELayer, Router, SharedExpert, _core

UPWARD = {"x86_64": 0x800, "aarch64": 0x400000}
LIBM = ctypes.CDLL(ctypes.util.find_library("m"))


@pytest.fixture
def upward():
    import platform

    mode = UPWARD.get(platform.machine())
    if mode is None:
        pytest.skip("no rounding mode known for this processor")
    before = LIBM.fegetround()
    yield lambda: LIBM.fesetround(mode)
    LIBM.fesetround(before)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", _core.DTYPES)
def test_weights_are_packed_to_the_same_bytes(dtype, threads, upward):
    ffns = Ffns.make(1, 5, 96, 64).arrays()
    x, ids, weights = numbers(2, 20, 96), integers(3, 0, 5, 20, 2), numbers(4, 20, 2)
    expected = Experts.from_arrays(**ffns, dtype=dtype, threads=threads).run(x, ids, weights)
    assert upward() == 0
    found = Experts.from_arrays(**ffns, dtype=dtype, threads=threads)
    np.testing.assert_array_equal(found.run(x, ids, weights), expected)


def test_a_shared_expert_is_added_to_the_same_bits(upward):
    ffns, shared = Ffns.make(1, 5, 96, 64).arrays(), Ffns.make(6, 1, 96, 64).arrays()
    router = Router.from_array(numbers(5, 5, 96))
    layer = MoELayer(router, Experts.from_arrays(**ffns), shared=SharedExpert(Experts.from_arrays(**shared)))
    x = numbers(2, 200, 96)
    expected = layer(x)
    assert upward() == 0
    np.testing.assert_array_equal(layer(x), expected)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("threads", [1, 2])
def test_rounding_upward_changes_no_bit(threads, upward):
    ffns = Ffns.make(1, 5, 96, 64)
    x, ids, weights = numbers(2, 200, 96), integers(3, 0, 5, 200, 2), numbers(4, 200, 2)
    experts = Experts.from_arrays(**ffns.arrays(), threads=threads)
    router = Router.from_array(numbers(5, 5, 96), threads=threads)
    model = Model.open(threads=threads)
    expected = experts.run(x, ids, weights), router.route(x).expert_weights, model.infer(range(300)).probabilities
    assert upward() == 0
    mode = LIBM.fegetround()
    found = experts.run(x, ids, weights), router.route(x).expert_weights, model.infer(range(300)).probabilities
    assert LIBM.fegetround() == mode
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)
