"""Experts that run where the caller's arrays are: the packed ones' bits, whatever the layout, and nobody's copy."""

import gc
import itertools
import os
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
from reference import BFloat16, Ffns, high_halves, integers, numbers, widened

from colibri_cli import Experts, InvalidInput, _core

DTYPES = ("float32", "bfloat16", "float16")
LAYOUTS = list(itertools.product(("concatenated", "interleaved"), (False, True)))
# Around the panel (16), the lanes, cache lines of either type (16 and 32 inputs) and several of them.
SIZES = [(1, 1), (3, 5), (16, 16), (17, 33), (33, 31), (64, 48), (80, 130), (300, 100)]
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
every_layout = pytest.mark.parametrize(("layout", "transposed"), LAYOUTS)


def held(array, dtype):
    """The array in a type that NumPy has, bfloat16 as its bits."""
    return high_halves(array) if dtype == "bfloat16" else array.astype(dtype)


def given(array, dtype):
    return BFloat16(held(array, dtype)) if dtype == "bfloat16" else held(array, dtype)


def arrays_of(ffns, dtype, layout="concatenated", transposed=False):
    """The arguments of from_arrays, weights and biases in one type."""
    arrays = ffns.arrays()
    if layout == "interleaved" and ffns.gated:
        order = np.arange(ffns.up.shape[1]).reshape(2, -1).T.ravel()
        arrays |= {"gate_up": ffns.up[:, order], "gate_up_bias": ffns.up_bias[:, order]}
    if transposed:
        arrays |= {name: arrays[name].transpose(0, 2, 1) for name in ("gate_up", "down")}
    weights = {name: np.ascontiguousarray(a) for name, a in arrays.items() if isinstance(a, np.ndarray)}
    return arrays | weights | {"dtype": dtype, "layout": layout, "transposed": transposed}


def both(ffns, dtype, layout="concatenated", transposed=False, **options):
    """(packed, in place)."""
    arrays = arrays_of(ffns, dtype, layout, transposed)
    arrays |= {name: given(a, dtype) for name, a in arrays.items() if isinstance(a, np.ndarray)}
    return tuple(Experts.from_arrays(**arrays, **options, copy=copy) for copy in (True, False))


def batch(ffns, n_tokens, top_k=2):
    n_experts, hidden = ffns.down.shape[:2]
    return (
        numbers(8, n_tokens, hidden),
        integers(9, -1, n_experts, n_tokens, top_k),
        numbers(10, n_tokens, top_k),
    )


# ---------------------------------------------------------------- bits


@every_dtype
@every_layout
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("sizes", SIZES)
def test_the_bits_of_packed_weights(sizes, gated, layout, transposed, dtype):
    ffns = Ffns.make(1, 3, *sizes, gated=gated)
    x, ids, weights = batch(ffns, 130)
    answers, before = set(), _core.isa()
    try:
        for isa in _core.isa_names():
            _core.use_isa(isa)
            for threads, max_tokens in ((1, 512), (3, 50)):
                for experts in both(ffns, dtype, layout, transposed, threads=threads, max_tokens=max_tokens):
                    answers.add(experts.run(x, ids, weights).tobytes())
            cuts = [slice(*ends) for ends in itertools.pairwise((0, 1, 3, 6, 10, 22, 60, 130))]
            answers.add(np.concatenate([experts.run(x[cut], ids[cut], weights[cut]) for cut in cuts]).tobytes())
    finally:
        _core.use_isa(before)
    assert len(answers) == 1


@pytest.mark.usefixtures("isa")
@every_layout
def test_every_bit_of_float32(layout, transposed):
    ffns = Ffns.make(2, 3, 81, 49, activation="relu")
    for n_tokens in (1, 2, 5, 97):
        found = both(ffns, "float32", layout, transposed)[1].run(*batch(ffns, n_tokens))
        np.testing.assert_array_equal(found, ffns.bits(*batch(ffns, n_tokens)))


@pytest.mark.usefixtures("isa")
@every_dtype
@every_layout
@pytest.mark.parametrize("sizes", [(1, 1030, 650), (40, 300, 140)], ids=["decode", "prefill"])
def test_threads_share_one_expert(sizes, layout, transposed, dtype):
    n_tokens, hidden, inter = sizes
    ffns = Ffns.make(3, 2, hidden, inter)
    packed, _ = both(ffns, dtype, threads=1)
    expected = packed.run(*batch(ffns, n_tokens))
    for threads in (1, 2, 5):
        _, in_place = both(ffns, dtype, layout, transposed, threads=threads)
        np.testing.assert_array_equal(in_place.run(*batch(ffns, n_tokens)), expected)


@pytest.mark.usefixtures("isa")
@every_dtype
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("sizes", [(1, 1), (7, 17), (33, 47), (523, 597)])
def test_few_rows_read_weights_in_runs(sizes, gated, dtype):
    ffns = Ffns.make(7, 2, *sizes, gated=gated)
    expected = both(ffns, dtype, threads=1)[0]
    for threads, layout in ((1, "concatenated"), (3, "interleaved")):
        in_place = both(ffns, dtype, layout, threads=threads)[1]
        for n in (1, 2, 3, 4, 5, 97):
            tokens = numbers(8, n, sizes[0]), np.ones((n, 1), np.int32), numbers(10, n, 1)
            np.testing.assert_array_equal(in_place.run(*tokens), expected.run(*tokens), str(n))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("sizes", [(1, 1), (33, 47), (300, 130)])
def test_rows_in_lanes(sizes, gated):
    ffns = Ffns.make(5, 2, *sizes, gated=gated)
    expected = both(ffns, "float32", threads=1)[0]
    for threads, layout in ((1, "concatenated"), (3, "interleaved")):
        in_place = both(ffns, "float32", layout, threads=threads)[1]
        for n in (12, 13, 15, 16, 17, 24, 25, 31, 32, 33, 35, 36, 40, 41, 48, 95, 96, 97, 109, 112, 129, 250):
            tokens = numbers(8, n, sizes[0]), np.ones((n, 1), np.int32), numbers(10, n, 1)
            np.testing.assert_array_equal(in_place.run(*tokens), expected.run(*tokens), str(n))


@pytest.mark.usefixtures("isa")
def test_weights_under_many_rows_are_not_put_in_order():
    ffns = Ffns.make(6, 1, 300, 130)
    in_place = both(ffns, "float32", threads=1)[1]

    def counts(n):
        tokens = numbers(8, n, 300), np.zeros((n, 1), np.int32), numbers(10, n, 1)
        return _core.metered(lambda: in_place.run(*tokens))[2::2]  # products, and panels filled

    (n_half, filled), (n_whole, _), (_, filled_few) = counts(40), counts(47), counts(20)
    if _core.isa() in ("scalar", "neon"):
        assert filled > 2
    else:
        assert filled == 2  # the hidden states and the intermediate ones
        assert n_half == n_whole  # half a panel of rows is metered too
    assert filled_few > 2


def offset(array, n_bytes):
    """The same values, n_bytes after a cache line's start."""
    memory = np.empty(array.nbytes + 128, np.uint8)
    first = -memory.ctypes.data % 64 + n_bytes
    view = memory[first : first + array.nbytes].view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


ARRANGEMENTS = {
    **{f"{n} bytes off": lambda a, n=n: offset(a, n) for n in (1, 2, 3, 4, 16, 34, 62)},
    "rows apart": lambda a: np.concatenate([a, a], axis=2)[:, :, : a.shape[2]],
    "every other row": lambda a: np.repeat(a, 2, axis=1)[:, ::2],
    "every other expert": lambda a: np.repeat(a, 2, axis=0)[::2],
    "rows reversed": lambda a: np.ascontiguousarray(a[:, ::-1])[:, ::-1],
    "experts reversed": lambda a: np.ascontiguousarray(a[::-1])[::-1],
    "outputs side by side": lambda a: np.ascontiguousarray(a.transpose(0, 2, 1)).transpose(0, 2, 1),
    "experts inside": lambda a: np.ascontiguousarray(a.transpose(1, 0, 2)).transpose(1, 0, 2),
    "read-only": read_only,
}


@pytest.mark.usefixtures("isa")
@every_dtype
@every_layout
@pytest.mark.parametrize("arrange", ARRANGEMENTS.values(), ids=ARRANGEMENTS)
def test_any_address_and_any_strides_outside(arrange, layout, transposed, dtype):
    ffns = Ffns.make(4, 3, 70, 41)
    few, many = batch(ffns, 9), batch(ffns, 70)
    packed = both(ffns, dtype)[0]
    arrays = arrays_of(ffns, dtype, layout, transposed)
    for name, array in arrays.items():
        if isinstance(array, np.ndarray):
            bits = held(array, dtype)
            bits = arrange(bits) if array.ndim == 3 else np.repeat(bits, 3, axis=1)[:, ::3]
            arrays[name] = BFloat16(bits) if dtype == "bfloat16" else bits
    in_place = Experts.from_arrays(**arrays, copy=False)
    for tokens in (few, many):
        np.testing.assert_array_equal(in_place.run(*tokens), packed.run(*tokens))


@every_dtype
@pytest.mark.parametrize("bias_dtype", DTYPES)
def test_biases_of_either_type(bias_dtype, dtype):
    ffns = Ffns.make(5, 3, 40, 24)
    arrays = arrays_of(ffns, dtype)
    for name in ("gate_up", "down"):
        arrays[name] = given(arrays[name], dtype)
    for name in ("gate_up_bias", "down_bias"):
        arrays[name] = given(arrays[name], bias_dtype)
    packed, in_place = (Experts.from_arrays(**arrays, copy=copy) for copy in (True, False))
    np.testing.assert_array_equal(in_place.run(*batch(ffns, 7)), packed.run(*batch(ffns, 7)))


def test_weights_of_bfloat16_are_widened():
    ffns = Ffns.make(6, 3, 40, 24, bias=False)
    wide = [widened(high_halves(a)) for a in (ffns.up, ffns.down)]
    narrow = [BFloat16(a) for a in (ffns.up, ffns.down)]
    x, ids, weights = batch(ffns, 20)
    expected = Experts.from_arrays(*wide).run(x, ids, weights)
    for options in ({}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "copy": False}):
        np.testing.assert_array_equal(Experts.from_arrays(*narrow, **options).run(x, ids, weights), expected)


@pytest.mark.parametrize("dtype", _core.DTYPES)
def test_weights_of_float16_are_widened(dtype):
    ffns = Ffns.make(7, 3, 40, 24)
    narrow = [a.astype(np.float16) for a in (ffns.up, ffns.down, ffns.up_bias, ffns.down_bias)]
    names = ("gate_up", "down", "gate_up_bias", "down_bias")
    found, expected = (
        Experts.from_arrays(**dict(zip(names, arrays, strict=True)), dtype=dtype).run(*batch(ffns, 20))
        for arrays in (narrow, [a.astype(np.float32) for a in narrow])
    )
    np.testing.assert_array_equal(found, expected)


# ---------------------------------------------------------------- whose arrays


@every_dtype
@every_layout
def test_tensors_of_pytorch(layout, transposed, dtype):
    torch = pytest.importorskip("torch")
    ffns = Ffns.make(15, 3, 48, 32)
    expected = both(ffns, dtype)[0].run(*batch(ffns, 9))
    arrays = arrays_of(ffns, dtype, layout, transposed)
    for name, array in arrays.items():
        if isinstance(array, np.ndarray):
            bits = held(array, dtype).copy()
            tensor = torch.from_numpy(bits.view(np.int16) if dtype == "bfloat16" else bits)
            arrays[name] = tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor
    for copy in (True, False):
        np.testing.assert_array_equal(Experts.from_arrays(**arrays, copy=copy).run(*batch(ffns, 9)), expected)
    arrays["down"] = torch.nn.Parameter(arrays["down"])
    with pytest.raises(InvalidInput, match=r"requires? grad.* - at down\nhint: pass its \.detach\(\)"):
        Experts.from_arrays(**arrays, copy=False)
    arrays["down"] = arrays["down"].detach()
    np.testing.assert_array_equal(Experts.from_arrays(**arrays, copy=False).run(*batch(ffns, 9)), expected)


def test_arrays_of_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    ffns = Ffns.make(16, 3, 48, 32, bias=False)
    up, down = (high_halves(a).view(ml_dtypes.bfloat16) for a in (ffns.up, ffns.down))
    expected = both(ffns, "bfloat16")[0].run(*batch(ffns, 9))
    for copy in (True, False):
        experts = Experts.from_arrays(up, down, dtype="bfloat16", copy=copy)
        np.testing.assert_array_equal(experts.run(*batch(ffns, 9)), expected)


@pytest.mark.parametrize("versioned", [False, True])
def test_bfloat16_in_either_version_of_dlpack(versioned):
    if versioned and np.lib.NumpyVersion(np.__version__) < "2.1.0":
        pytest.skip("this NumPy exports the older one alone")
    ffns = Ffns.make(17, 3, 48, 32, bias=False)
    for way in ("read-only", "every other row", "outputs side by side"):
        arrange = ARRANGEMENTS[way] if versioned or way != "read-only" else np.asarray
        up, down = (BFloat16(arrange(high_halves(a)), versioned=versioned) for a in (ffns.up, ffns.down))
        found = Experts.from_arrays(up, down, dtype="bfloat16", copy=False).run(*batch(ffns, 9))
        np.testing.assert_array_equal(found, both(ffns, "bfloat16")[0].run(*batch(ffns, 9)))


class Differentiated:
    """A tensor that will not be exported while somebody wants its gradient."""

    requires_grad = True

    def __dlpack_device__(self):
        return 1, 0

    def __dlpack__(self, **_options):
        raise BufferError("it requires a gradient")


def test_a_tensor_with_a_gradient_is_refused_with_the_way_out():
    with pytest.raises(InvalidInput, match=r"Differentiated .*it requires a gradient.* - at gate_up\nhint: .*detach"):
        Experts.from_arrays(Differentiated(), np.ones((1, 1, 1), np.float32))


# ---------------------------------------------------------------- whose memory it is


@every_dtype
def test_the_caller_may_let_go_of_its_arrays(dtype):
    ffns = Ffns.make(8, 3, 40, 24)
    expected = both(ffns, dtype)[0].run(*batch(ffns, 7))
    arrays = {n: a for n, a in arrays_of(ffns, dtype).items() if isinstance(a, np.ndarray)}
    mine = {n: held(a, dtype).copy() for n, a in arrays.items()}
    before = {n: sys.getrefcount(a) for n, a in mine.items()}
    given_arrays = {n: BFloat16(a) if dtype == "bfloat16" else a for n, a in mine.items()}
    experts = Experts.from_arrays(**given_arrays, dtype=dtype, copy=False)
    del given_arrays
    assert all(sys.getrefcount(a) > before[n] for n, a in mine.items())
    experts.remove(1)
    experts.run(numbers(8, 1, 40), np.zeros((1, 1), np.int32), np.ones((1, 1), np.float32))
    del experts
    gc.collect()
    assert {n: sys.getrefcount(a) for n, a in mine.items()} == before

    experts = Experts.from_arrays(
        **{n: BFloat16(a) if dtype == "bfloat16" else a for n, a in mine.items()}, dtype=dtype, copy=False
    )
    del mine
    gc.collect()
    np.testing.assert_array_equal(experts.run(*batch(ffns, 7)), expected)


@every_dtype
def test_changes_between_calls_are_seen(dtype):
    ffns, other = Ffns.make(9, 3, 40, 24), Ffns.make(90, 3, 40, 24)
    names = ("up", "down", "up_bias", "down_bias")
    memory = [held(getattr(ffns, n), dtype).copy() for n in names]
    arrays = [BFloat16(a) for a in memory] if dtype == "bfloat16" else memory
    up, down, up_bias, down_bias = arrays
    experts = Experts.from_arrays(up, down, gate_up_bias=up_bias, down_bias=down_bias, dtype=dtype, copy=False)
    for now in (ffns, other):
        for array, n in zip(memory, names, strict=True):
            array[...] = held(getattr(now, n), dtype)
        expected = both(now, dtype)[0].run(*batch(now, 7))
        np.testing.assert_array_equal(experts.run(*batch(now, 7)), expected)


@every_dtype
def test_statistics_say_what_is_in_place(dtype):
    ffns = Ffns.make(10, 3, 40, 24)
    packed, in_place = (experts.stats() for experts in both(ffns, dtype))
    assert packed["in_place_bytes"] == 0
    n_values = ffns.up.size + ffns.down.size + ffns.up_bias.size + ffns.down_bias.size
    assert in_place["in_place_bytes"] == in_place["resident_bytes"] == n_values * (4 if dtype == "float32" else 2)
    assert in_place["resident"] == 3


@every_dtype
def test_files_join_experts_in_place(dtype, tmp_path):
    ffns, other = Ffns.make(11, 3, 40, 24), Ffns.make(110, 3, 40, 24)
    other.write(tmp_path)
    packed, in_place = both(ffns, dtype)
    for experts in (packed, in_place):
        assert experts.add(tmp_path / "expert_0.bin") == 3
        experts.replace(1, tmp_path / "expert_2.bin")
    x, _, weights = batch(ffns, 9)
    ids = integers(12, 0, 4, 9, 2)
    np.testing.assert_array_equal(in_place.run(x, ids, weights), packed.run(x, ids, weights))
    stats = in_place.stats()
    assert 0 < stats["in_place_bytes"] < stats["resident_bytes"]


NO_SECOND_COPY = """
import pathlib, sys
import numpy as np
from reference import BFloat16
from colibri_cli import Experts

def peak():
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()  # getrusage would count the parent's, too
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))

dtype, copy = sys.argv[1], sys.argv[2] == "copy"
wide = np.dtype("uint16" if dtype == "bfloat16" else dtype)
up, down = np.zeros((8, 2048, 1024), wide), np.zeros((8, 1024, 1024), wide)
up[...], down[...] = 1, 1
Experts.from_arrays(*(np.ones((1, 2, 1), np.float32), np.ones((1, 1, 1), np.float32)))
before = peak()
given = (BFloat16(up), BFloat16(down)) if dtype == "bfloat16" else (up, down)
experts = Experts.from_arrays(*given, dtype=dtype, copy=copy)
x, ids = np.ones((16, 1024), np.float32), np.tile(np.arange(8, dtype=np.int32), (16, 1))
experts.run(x, ids, np.ones((16, 8), np.float32))
print((peak() - before) / (up.nbytes + down.nbytes))
"""


@pytest.mark.skipif(_core.sanitized(), reason="the sanitizer has memory of its own")
@every_dtype
def test_peak_memory_does_not_grow_by_the_weights(dtype):
    def growth(how):
        paths = [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, "-c", NO_SECOND_COPY, dtype, how]
        return float(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)

    assert growth("copy") > 0.95, "the measure does not see a copy"
    assert growth("in place") < 0.1


def test_an_answer_does_not_go_into_the_weights():
    ffns = Ffns.make(14, 9, 24, 20)
    arrays = ffns.arrays() | {"copy": False}
    for name in ("gate_up", "down", "gate_up_bias", "down_bias"):
        memory = arrays[name].copy()
        experts = Experts.from_arrays(**arrays | {name: memory})
        out = memory.ravel()[-5 * 24 :].reshape(5, 24)
        before = memory.copy()
        with pytest.raises(InvalidInput, match="Expected memory of its own, got an overlap with a weight - at out"):
            experts.run(*batch(ffns, 5), out=out)
        np.testing.assert_array_equal(memory, before)
        experts.run(*batch(ffns, 5), out=np.empty((5, 24), np.float32))


# ---------------------------------------------------------------- what is refused


class Listed:
    """What becomes an array only through a copy."""

    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return self.array.copy()


FFNS = Ffns.make(13, 3, 20, 12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "int8"}, "Expected one of float32, bfloat16, float16, got 'int8' - at dtype with copy=False"),
        ({"dtype": "int4"}, "Expected one of float32, bfloat16, float16, got 'int4' - at dtype with copy=False"),
        ({"dtype": "bfloat16"}, "Expected bfloat16, to run in place, got float32 - at gate_up.dtype"),
        ({"gate_up": BFloat16(FFNS.up)}, "Expected float32, to run in place, got bfloat16 - at gate_up.dtype"),
        ({"down": FFNS.down.astype(np.float16)}, "Expected float32, to run in place, got float16 - at down.dtype"),
        ({"down": np.repeat(FFNS.down, 3, axis=2)[:, :, ::3]}, r"side by side, .* got strides \(144, 12\) - at down"),
        ({"gate_up": Ffns.make(1, 3, 20, 12).up[:, :, ::-1]}, "side by side, .* - at gate_up.strides"),
        (
            {"gate_up_bias": Listed(FFNS.up_bias)},
            "Expected a buffer or a DLPack tensor, .*, got neither - at gate_up_b",
        ),
    ],
)
def test_what_cannot_run_in_place(change, message):
    arrays = FFNS.arrays() | change
    Experts.from_arrays(**arrays)  # which may be copied
    with pytest.raises(InvalidInput, match=message) as caught:
        Experts.from_arrays(**arrays, copy=False)
    assert change.get("dtype") in ("int8", "int4") or "copy=True" in caught.value.hint


class Misleading(np.ndarray):
    """An array whose base is not what keeps its memory."""

    base = b"nobody"


def test_an_expert_keeps_who_has_its_arrays_and_no_views():
    kernel = _core.ExpertKernel(8, 4, _core.ACTIVATIONS["relu"], True)
    up, down = numbers(1, 2, 8, 8).copy(), numbers(2, 2, 8, 4).copy()
    views, owners = [up[1], down[1]], [weakref.ref(up), weakref.ref(down)]
    expert = kernel.in_place(*views)
    views = [weakref.ref(view) for view in views]
    del up, down
    gc.collect()
    assert [view() for view in views] == [None, None]
    assert all(owner() is not None for owner in owners)
    del expert
    assert [owner() for owner in owners] == [None, None]

    odd = numbers(3, 8, 8).view(Misleading)
    expert, kept = kernel.in_place(odd, numbers(4, 8, 4)), weakref.ref(odd)
    del odd
    assert kept() is not None
    del expert
    assert kept() is None
