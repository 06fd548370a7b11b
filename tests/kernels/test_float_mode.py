"""Another library may have changed how this thread rounds; the bits stay, and so does the mode."""

import ctypes
import ctypes.util

import numpy as np
import pytest
from reference import Ffns, integers, numbers

from colibri_cli import Experts, Model, Router

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
