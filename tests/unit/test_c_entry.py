"""The way in from C, through ctypes: Python's bits from caller-owned memory, and an error for what cannot be run."""

import ctypes
import itertools
import math
import os
import re
import struct
import threading
import zlib
from pathlib import Path

import c_api as c
import numpy as np
import pytest
from reference import Ffns, high_halves, integers, numbers, widened

import colibri_cli
from colibri_cli import Experts, InvalidInput, Router, _core
from colibri_cli.formats.router_table import to_blob

HEADER = (Path(colibri_cli.get_include()) / "colibri.h").read_text()
# Around the panel (16), the lanes, a group of 32 inputs and several of them.
SIZES = [(1, 1), (3, 5), (15, 17), (16, 16), (33, 31), (64, 48), (80, 130)]
E, H, I, T, K = 5, 48, 33, 21, 2  # noqa: E741 - the sizes' usual letters
every_dtype = pytest.mark.parametrize("dtype", c.DTYPES)


def shape_of(ffns, dtype):
    limit = math.inf if ffns.limit is None else ffns.limit
    return c.Shape(
        hidden_size=ffns.down.shape[1],
        intermediate_size=ffns.down.shape[2],
        dtype=c.DTYPES[dtype],
        activation=c.ACTIVATIONS[ffns.activation],
        gated=ffns.gated,
        alpha=ffns.alpha,
        beta=ffns.beta,
        limit=limit,
    )


def one(ffns, e):
    return ffns.up[e], ffns.down[e], *(None if b is None else b[e] for b in (ffns.up_bias, ffns.down_bias))


def files_of(ffns, dtype):
    return [c.packed(shape_of(ffns, dtype), c.arrays_of(*one(ffns, e))) for e in range(len(ffns.up))]


def batch(hidden, n_experts=E, n_tokens=T, top_k=K):
    x, ids = numbers(8, n_tokens, hidden), integers(9, -1, n_experts, n_tokens, top_k)
    return x, ids, numbers(10, n_tokens, top_k)


# ---------------------------------------------------------------- the library


def test_the_abi_and_the_errors_are_the_headers():
    assert c.abi_version() == int(re.search(r"#define CLB_ABI_VERSION (\d+)", HEADER)[1])
    errors = {name: int(n) for name, n in re.findall(r"^  (CLB_\w+) = (\d+),? +/\*", HEADER, re.MULTILINE)}
    errors["CLB_OK"] = 0
    errors = {name: n for name, n in errors.items() if name == "CLB_OK" or name.startswith("CLB_ERROR")}
    assert sorted(errors.values()) == list(range(len(c.ERRORS)))
    for name, n in errors.items():
        assert c.error_name(n) == name.encode()
    for n in (-1, len(errors), 1 << 31 - 1, -(1 << 31)):
        assert c.error_name(n) == b"CLB_ERROR"


def test_the_instruction_set_is_chosen_from_either_side():
    before = _core.isa()
    assert c.isa() == before.encode()
    try:
        for name in _core.isa_names():
            assert c.use_isa(name.encode()) == c.OK
            assert c.isa() == name.encode()
        _core.use_isa("scalar")
        assert c.isa() == b"scalar"
        assert c.use_isa(b"sse9") == c.ISA
        assert c.isa() == b"scalar"
        for best in (None, b""):
            assert c.use_isa(best) == c.OK
            assert c.isa() == _core.isa_names()[0].encode()
    finally:
        _core.use_isa(before)


# ---------------------------------------------------------------- bits


@every_dtype
@pytest.mark.parametrize(("gated", "bias"), [*itertools.product((False, True), repeat=2)])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_packed_experts_have_pythons_bytes_and_bits(dtype, gated, bias, size):
    ffns = Ffns.make(1, E, *size, gated=gated, bias=bias)
    experts = Experts.from_arrays(**ffns.arrays(), dtype=dtype)
    files = files_of(ffns, dtype)
    for file, expert in zip(files, experts._set, strict=True):
        payload = ctypes.string_at(_core.addresses(expert)[0], expert.n_bytes)
        assert file[64:].tobytes() == payload
    shape, opened = c.opened(files)
    assert bytes(shape) == bytes(shape_of(ffns, dtype))
    x, ids, weights = batch(size[0])
    expected = experts.run(x, ids, weights)
    for threads, chunk in ((1, None), (2, None), (1, 1), (2, 4)):
        assert c.run(shape, opened, x, ids, weights, threads=threads, chunk=chunk).tobytes() == expected.tobytes()


@pytest.mark.parametrize("isa", _core.isa_names())
@every_dtype
def test_every_instruction_set_gives_the_same_bits(isa, dtype):
    ffns = Ffns.make(1, E, 300, 200)
    x, ids, weights = batch(300, n_tokens=130)
    expected = Experts.from_arrays(**ffns.arrays(), dtype=dtype).run(x, ids, weights)
    try:
        assert c.use_isa(isa.encode()) == c.OK
        shape, experts = c.opened(files_of(ffns, dtype))
        for threads, chunk in ((1, None), (2, 64)):
            assert np.array_equal(c.run(shape, experts, x, ids, weights, threads=threads, chunk=chunk), expected)
    finally:
        c.use_isa(_core.isa().encode())


@pytest.mark.parametrize("activation", c.ACTIVATIONS)
def test_activations_and_their_numbers(activation):
    ffns = Ffns.make(1, E, H, I, activation=activation, limit=0.75, alpha=1.702, beta=1.0)
    x, ids, weights = batch(H)
    shape, experts = c.opened(files_of(ffns, "float32"))
    assert np.array_equal(
        c.run(shape, experts, x, ids, weights), Experts.from_arrays(**ffns.arrays()).run(x, ids, weights)
    )


def at_odd_address(array):
    """The same values at an address that no type is aligned to; strides kept."""
    memory = np.empty(array.size * array.itemsize + 1, np.uint8)
    flat = np.frombuffer(memory.data, array.dtype, array.size, offset=1)
    order = np.argsort([-abs(s) for s in array.strides], kind="stable")
    view = flat.reshape([array.shape[d] for d in order]).transpose(np.argsort(order))
    view[...] = array
    return view


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("interleaved", "transposed"), [*itertools.product((False, True), repeat=2)])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_arrays_in_place_have_the_packed_bits(dtype, interleaved, transposed, size):
    ffns = Ffns.make(1, E, *size)
    if dtype != "float32":
        values = (ffns.up, ffns.down, ffns.up_bias, ffns.down_bias)
        held = [widened(high_halves(a)) if dtype == "bfloat16" else np.float32(np.float16(a)) for a in values]
        ffns = Ffns(*held)
    x, ids, weights = batch(size[0])
    expected = Experts.from_arrays(**ffns.arrays(), dtype=dtype).run(x, ids, weights)
    shape, experts, kept = shape_of(ffns, "float32").but(dtype=c.IN_PLACE[dtype]), (c.Expert * E)(), []
    for e in range(E):
        up, down, up_bias, down_bias = one(ffns, e)
        if interleaved:
            up, up_bias = (np.stack(np.split(a, 2), axis=1).reshape(a.shape) for a in (up, up_bias))
        matrices = [np.asfortranarray(a) if transposed else np.ascontiguousarray(a) for a in (up, down)]
        arrays = [*matrices, up_bias, down_bias]
        if dtype != "float32":
            narrow = high_halves if dtype == "bfloat16" else np.float16
            arrays = [np.asarray(narrow(a), order="F" if transposed and a.ndim == 2 else "C") for a in arrays]
        kept.append([at_odd_address(a) for a in arrays])
        described = c.arrays_of(*kept[-1], interleaved=interleaved)
        assert c.expert_in_place(shape, described, experts[e]) == c.OK
    for threads in (1, 2):
        assert np.array_equal(c.run(shape, experts, x, ids, weights, threads=threads), expected)


def test_packing_takes_any_strides_and_strides_of_zero_are_pytorchs():
    ffns = Ffns.make(1, 1, H, I)
    shape, (up, down, up_bias, down_bias) = shape_of(ffns, "int4"), one(ffns, 0)
    expected = c.packed(shape, c.arrays_of(up, down, up_bias, down_bias)).tobytes()
    plain = c.arrays_of(up, down, up_bias, down_bias)
    plain.up_stride[:] = plain.down_stride[:] = (0, 0)
    assert c.packed(shape, plain).tobytes() == expected
    reversed_rows = np.ascontiguousarray(up[::-1])[::-1]
    wide = np.repeat(down, 3, axis=1)[:, ::3]
    assert c.packed(shape, c.arrays_of(reversed_rows, wide, up_bias, down_bias), threads=2).tobytes() == expected
    turns, turns_bias = (np.stack(np.split(a, 2), axis=1).reshape(a.shape) for a in (up, up_bias))
    assert c.packed(shape, c.arrays_of(turns, down, turns_bias, down_bias, interleaved=True)).tobytes() == expected


@pytest.mark.parametrize("absent", [0, 1])
def test_an_absent_bias_beside_a_given_one_is_zeros(absent):
    ffns = Ffns.make(1, 1, H, I)
    shape, (up, down, *biases) = shape_of(ffns, "float32"), one(ffns, 0)
    zeros = [np.zeros_like(b) if i == absent else b for i, b in enumerate(biases)]
    biases[absent] = None
    expected = c.packed(shape, c.arrays_of(up, down, *zeros))
    assert c.packed(shape, c.arrays_of(up, down, *biases)).tobytes() == expected.tobytes()


def test_rows_of_x_and_y_may_lie_apart():
    ffns = Ffns.make(1, E, H, I)
    x, ids, weights = batch(H)
    shape, experts = c.opened(files_of(ffns, "int8"))
    expected = c.run(shape, experts, x, ids, weights)
    y = np.full((T, H + 7), 9, np.float32)
    workspace = c.aligned(c.workspace_size(shape, E, T, K) + 1, offset=1)[: c.workspace_size(shape, E, T, K)]
    error = c.experts_run(
        *(shape, experts, E, c.address(x[-1]), -H, c.address(ids), c.address(weights), T, K, c.address(y), H + 7),
        *(c.address(workspace), workspace.nbytes, 1),
    )
    assert error == c.OK
    backwards = c.run(shape, experts, np.ascontiguousarray(x[::-1]), ids, weights)
    assert np.array_equal(y[:, :H], backwards)
    assert (y[:, H:] == 9).all()
    assert not np.array_equal(backwards, expected)


@pytest.mark.parametrize("threads", [1, 2])
def test_more_slots_than_a_workspace_has_states_for(threads):
    ffns, n_tokens = Ffns.make(1, E, 24, 40), 700
    x, ids, weights = numbers(2, n_tokens, 24), integers(3, -1, E, n_tokens, K), numbers(4, n_tokens, K)
    shape, experts = c.opened(files_of(ffns, "int8"))
    expected = c.run(shape, experts, x, ids, weights, chunk=1)
    sizes = [c.workspace_size(shape, E, n, K) for n in range(1, n_tokens + 1)]
    assert all(a < b for a, b in itertools.pairwise(sizes))
    assert sizes[-1] - sizes[-2] < sizes[1] - sizes[0]  # by then a token adds no states
    for chunk in (2, 527, 528, 529, n_tokens):
        assert np.array_equal(c.run(shape, experts, x, ids, weights, threads=threads, chunk=chunk), expected)


def test_a_nan_stays_in_its_row_and_skipped_slots_leave_zeros():
    ffns = Ffns.make(1, E, H, I)
    x, ids, weights = batch(H)
    shape, experts = c.opened(files_of(ffns, "int4"))
    expected = c.run(shape, experts, x, ids, weights)
    ids[4] = -1
    x[7, 3] = np.nan
    ids[7] = 2
    y = c.run(shape, experts, x, ids, weights)
    others = [t for t in range(T) if t not in (4, 7)]
    assert np.array_equal(y[others], expected[others])
    assert not y[4].any()
    assert np.isnan(y[7]).all()
    none = c.run(shape, experts, x, np.full_like(ids, -1), weights)
    assert not none.any()


def test_threads_share_experts_and_each_has_a_workspace():
    ffns = Ffns.make(1, E, 96, 64)
    shape, experts = c.opened(files_of(ffns, "int8"))
    x, ids, weights = batch(96, n_tokens=200)
    expected = c.run(shape, experts, x, ids, weights).tobytes()
    answers = [[] for _ in range(4)]

    def caller(found):
        for _ in range(20):
            found.append(c.run(shape, experts, x, ids, weights, threads=2).tobytes())

    threads = [threading.Thread(target=caller, args=(found,)) for found in answers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {answer for found in answers for answer in found} == {expected}


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_runs_wide_calls():
    ffns = Ffns.make(1, E, 96, 64)
    shape, experts = c.opened(files_of(ffns, "float32"))
    x, ids, weights = batch(96, n_tokens=200)
    expected = c.run(shape, experts, x, ids, weights, threads=3).tobytes()
    child = os.fork()
    if child == 0:
        os._exit(0 if c.run(shape, experts, x, ids, weights, threads=3).tobytes() == expected else 1)
    assert os.waitpid(child, 0)[1] == 0


# ---------------------------------------------------------------- files


@every_dtype
@pytest.mark.parametrize("bias", [False, True])
def test_the_file_is_the_documented_one(dtype, bias):
    ffns = Ffns.make(1, 1, H, I, bias=bias, gated=False, limit=7.0, alpha=1.5, beta=0.25)
    file = files_of(ffns, dtype)[0]
    assert c.expert_seal(c.address(file), file.nbytes) == c.OK
    assert c.expert_verify(c.address(file), file.nbytes) == c.OK
    fields = struct.unpack("<8s4I4B3fQI12s", file[:64].tobytes())
    assert fields[:5] == (b"CLBEXPRT", 1, 64, H, I)
    assert fields[5:12] == (c.DTYPES[dtype], 2, 0, bias, 1.5, 0.25, 7.0)
    assert fields[12] == file.nbytes - 64
    zeroed = file.copy()
    zeroed[48:52] = 0
    assert fields[13:] == (zlib.crc32(zeroed.tobytes()), bytes(12))


def test_damage_is_found_by_the_checksum_alone():
    file = files_of(Ffns.make(1, 1, H, I), "int8")[0]
    c.expert_seal(c.address(file), file.nbytes)
    for at in (48, 51, 64, file.nbytes // 2, file.nbytes - 1):
        damaged = c.aligned(file.nbytes)
        damaged[:] = file
        damaged[at] ^= 16
        assert c.expert_open(c.address(damaged), damaged.nbytes, None, c.Expert()) == c.OK
        assert c.expert_verify(c.address(damaged), damaged.nbytes) == c.CHECKSUM


@every_dtype
def test_a_header_that_lies_is_refused(dtype):
    file = files_of(Ffns.make(1, 1, H, I), dtype)[0]
    before, shape, expert = file.copy(), c.Shape(), c.Expert()
    free = {*range(28, 36), *range(48, 52)}  # alpha, beta and the checksum
    refused = [(at, before[at] ^ 255) for at in range(64) if at not in free | {38, 39}]
    refused += [(24, (c.DTYPES[dtype] + 1) % 4), (26, 0), (27, 0), (39, 0xFF)]  # of limit: -infinity
    for at, value in refused:
        file[:] = before
        file[at] = value
        for entry in (
            c.expert_open(c.address(file), file.nbytes, shape, expert),
            c.expert_verify(c.address(file), file.nbytes),
            c.expert_seal(c.address(file), file.nbytes),
        ):
            assert entry == c.FORMAT, (at, value)
    for at in (28, 32, 36):
        file[:] = before
        file[at : at + 4] = np.frombuffer(struct.pack("<f", math.nan), np.uint8)
        assert c.expert_open(c.address(file), file.nbytes, shape, expert) == c.FORMAT
    assert not any(expert.opaque)
    assert bytes(shape) == bytes(c.Shape())


@every_dtype
def test_a_file_of_another_size_is_refused(dtype):
    file = files_of(Ffns.make(1, 1, 3, 5), dtype)[0]
    longer = c.aligned(file.nbytes + 1)
    longer[:-1] = file
    expert = c.Expert()
    for n in range(file.nbytes):
        assert c.expert_open(c.address(longer), n, None, expert) == c.FORMAT
    assert c.expert_open(c.address(longer), longer.nbytes, None, expert) == c.FORMAT
    assert c.expert_open(c.address(longer), file.nbytes, None, expert) == c.OK


def test_sizes_that_no_memory_has_are_refused_or_true():
    shape = c.Shape(hidden_size=1 << 24, intermediate_size=1 << 24)
    assert c.expert_size(shape, 0) == 64 + 4 * 3 * (1 << 48)
    states = 1056 * 4 * (1 << 24)  # of as many slots as are held at once
    assert 0 < c.workspace_size(shape, 1024, 1, 1 << 16) - states < 1 << 20
    assert 0 < c.workspace_size(shape, 1024, (1 << 31) - 1, 1 << 16) - states - 4 * ((1 << 31) - 1 << 16) < 1 << 20
    lying = c.aligned(64)
    header = struct.pack(
        "<8s4I4B3fQI12s", b"CLBEXPRT", 1, 64, 1 << 24, 1 << 24, 0, 2, 1, 0, 1, 0, math.inf, 3 << 50, 0, b""
    )
    lying[:] = np.frombuffer(header, np.uint8)
    assert c.expert_open(c.address(lying), 64, None, c.Expert()) == c.FORMAT


# ---------------------------------------------------------------- errors


BAD_SHAPES = [
    *(({"struct_size": n}, c.STRUCT) for n in (0, 8, 39, 41, 1 << 40)),
    *(({name: n}, c.SIZE) for name in ("hidden_size", "intermediate_size") for n in (0, -1, (1 << 24) + 1)),
    *(
        ({name: n}, c.OPTION)
        for name, n in [("dtype", 5), ("dtype", -1), ("activation", 5), ("gated", 2), ("gated", -1)]
    ),
    *(({name: x}, c.OPTION) for name in ("alpha", "beta") for x in (math.nan, math.inf, -math.inf)),
    *(({"limit": x}, c.OPTION) for x in (math.nan, 0.0, -1.0, -math.inf)),
]


@pytest.mark.parametrize(("fields", "error"), BAD_SHAPES, ids=str)
def test_every_function_refuses_a_bad_shape(fields, error):
    ffns = Ffns.make(1, 1, H, I)
    shape, arrays, expert = shape_of(ffns, "float32").but(**fields), c.arrays_of(*one(ffns, 0)), (c.Expert * 1)()
    memory = c.aligned(1 << 20)
    assert c.expert_in_place(shape, arrays, expert[0]) == error
    assert c.expert_pack(shape, arrays, c.address(memory), memory.nbytes, 1) == error
    assert c.expert_size(shape, 1) == 0
    assert c.workspace_size(shape, 1, 1, 1) == 0
    x, ids, weights = batch(H, n_experts=1)
    y = np.full((T, H), 9, np.float32)
    assert error == c.experts_run(
        *(shape, expert, 1, c.address(x), H, c.address(ids), c.address(weights), T, K, c.address(y), H),
        *(c.address(memory), memory.nbytes, 1),
    )
    if fields.get("struct_size"):
        file = c.packed(shape_of(ffns, "float32"), arrays)
        assert c.expert_open(c.address(file), file.nbytes, c.Shape().but(**fields), expert[0]) == c.STRUCT
    assert not memory.any()
    assert not any(expert[0].opaque)
    assert (y == 9).all()


def refusals_of_arrays(shape):
    """(shape, changed fields, error in place, error when packed)."""
    odd = (ctypes.c_ssize_t * 2)(4 * H, 3)
    far = (ctypes.c_ssize_t * 2)(4, (1 << 31) + 4)
    apart = (ctypes.c_ssize_t * 2)(8 * H, 8)
    yield shape, {"struct_size": 12}, c.STRUCT, c.STRUCT
    for name in ("up", "down"):
        yield shape, {name: None}, c.NULL, c.NULL
        yield shape, {f"{name}_stride": odd}, c.SIZE, c.ALIGNMENT
        yield shape, {f"{name}_stride": far}, c.SIZE, c.SIZE
        yield shape, {f"{name}_stride": apart}, c.SIZE, None
    for name in ("dtype", "bias_dtype"):
        for value in (-1, 2, 5):
            yield shape, {name: value}, c.OPTION, c.OPTION
    yield shape, {"dtype": c.BF16}, c.OPTION, c.OPTION
    yield shape, {"interleaved": 2}, c.OPTION, c.OPTION
    yield shape.but(gated=0), {"interleaved": 1}, c.OPTION, c.OPTION
    for dtype in (c.BF16, c.I8, c.I4):
        yield shape.but(dtype=dtype), {}, c.OPTION, None
    yield shape.but(dtype=c.F16), {}, c.OPTION, c.OPTION  # not packed
    yield shape.but(dtype=c.F16), {"dtype": c.F16}, None, c.OPTION
    yield shape, {"bias_dtype": c.BF16}, None, c.OPTION


def test_arrays_that_cannot_be_run_are_refused():
    ffns = Ffns.make(1, 1, H, I)
    shape, arrays = shape_of(ffns, "float32"), c.arrays_of(*one(ffns, 0))
    for changed, fields, in_place, packed in refusals_of_arrays(shape):
        expert, memory = c.Expert(), c.aligned(1 << 16)
        if in_place is not None:
            assert c.expert_in_place(changed, arrays.but(**fields), expert) == in_place, fields
            assert not any(expert.opaque)
        if packed is not None:
            assert c.expert_pack(changed, arrays.but(**fields), c.address(memory), memory.nbytes, 1) == packed, fields
            assert not memory.any()
    assert c.expert_size(shape.but(dtype=c.F16), 0) == 0
    assert c.expert_in_place(None, arrays, c.Expert()) == c.NULL
    assert c.expert_in_place(shape, None, c.Expert()) == c.NULL
    assert c.expert_in_place(shape, arrays, None) == c.NULL


def test_packing_refuses_memory_that_does_not_fit():
    ffns = Ffns.make(1, 1, H, I)
    shape, arrays = shape_of(ffns, "float32"), c.arrays_of(*one(ffns, 0))
    n = c.expert_size(shape, 1)
    memory = c.aligned(n + 8)
    assert c.expert_size(shape, 0) == n - 4 * (2 * I + H)
    assert c.expert_pack(None, arrays, c.address(memory), n, 1) == c.NULL
    assert c.expert_pack(shape, None, c.address(memory), n, 1) == c.NULL
    assert c.expert_pack(shape, arrays, None, n, 1) == c.NULL
    assert c.expert_pack(shape, arrays, c.address(memory), n - 1, 1) == c.ROOM
    assert c.expert_pack(shape, arrays, c.address(memory) + 2, n, 1) == c.ALIGNMENT
    assert c.expert_pack(shape, arrays.but(up=arrays.up + 1), c.address(memory), n, 1) == c.ALIGNMENT
    assert c.expert_pack(shape, arrays.but(down_bias=arrays.down_bias + 2), c.address(memory), n, 1) == c.ALIGNMENT
    for threads in (0, -1, 257):
        assert c.expert_pack(shape, arrays, c.address(memory), n, threads) == c.SIZE
    for name in ("up", "down", "up_bias", "down_bias"):
        assert (
            c.expert_pack(shape, arrays.but(**{name: c.address(memory) + n - 4}), c.address(memory), n, 1) == c.OVERLAP
        )
    assert not memory.any()
    assert c.expert_pack(shape, arrays, c.address(memory), n, 1) == c.OK
    assert not memory[n:].any()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [("up", 0, 0, 0), ("up", 0, 2 * I - 1, H - 1), ("down", 0, H - 1, I - 1)])
def test_what_integers_cannot_hold_is_refused(value, at):
    ffns = Ffns.make(1, 1, H, I)
    getattr(ffns, at[0])[at[1:]] = value
    arrays = c.arrays_of(*one(ffns, 0))
    for dtype, error in (("float32", c.OK), ("bfloat16", c.OK), ("int8", c.NOT_FINITE), ("int4", c.NOT_FINITE)):
        memory = c.aligned(c.expert_size(shape_of(ffns, dtype), 1))
        assert c.expert_pack(shape_of(ffns, dtype), arrays, c.address(memory), memory.nbytes, 1) == error
        assert memory.any() == (error == c.OK)


def test_opening_refuses_null_and_odd_addresses():
    file, expert = files_of(Ffns.make(1, 1, H, I), "float32")[0], c.Expert()
    assert c.expert_open(None, file.nbytes, None, expert) == c.NULL
    assert c.expert_open(c.address(file), file.nbytes, None, None) == c.NULL
    assert c.expert_verify(None, 64) == c.NULL
    assert c.expert_seal(None, 64) == c.NULL
    assert c.expert_open(c.address(file) + 1, file.nbytes - 1, None, expert) == c.ALIGNMENT


@pytest.fixture
def call():
    """A call that works, whose arguments a test changes; nothing may be written when it is refused."""
    ffns = Ffns.make(1, E, H, I)
    files = files_of(ffns, "int8")
    shape, experts = c.opened(files)
    x, ids, weights = batch(H)
    y, workspace = np.full((T + 2, H), 9, np.float32), c.aligned(c.workspace_size(shape, E, T, K))
    arguments = {
        "shape": shape,
        "experts": experts,
        "n_experts": E,
        "x": c.address(x),
        "x_stride": H,
        "ids": c.address(ids),
        "weights": c.address(weights),
        "n_tokens": T,
        "top_k": K,
        "y": c.address(y),
        "y_stride": H,
        "workspace": c.address(workspace),
        "workspace_size": workspace.nbytes,
        "n_threads": 2,
    }

    def run(**changed):
        before = ids.copy(), weights.copy(), x.copy()
        y[:] = 9
        error = c.experts_run(*(arguments | changed).values())
        for now, then in zip((ids, weights, x), before, strict=True):
            assert now.tobytes() == then.tobytes()
        assert (y == 9).all() == (error != c.OK or changed.get("n_tokens") == 0)
        return error

    run.arguments, run.kept = arguments, (files, x, ids, weights, y, workspace)
    run.ids, run.experts, run.shape = ids, experts, shape
    return run


def test_a_run_refuses_what_is_not_there(call):
    assert call() == c.OK
    for name in ("shape", "experts", "x", "ids", "weights", "y", "workspace"):
        assert call(**{name: None}) == c.NULL, name
    nothing = dict.fromkeys(("experts", "x", "ids", "weights", "y", "workspace"))
    assert call(n_tokens=0, n_experts=0, workspace_size=0, **nothing) == c.OK


def test_a_run_refuses_sizes_out_of_range(call):
    refused = {
        "n_experts": (-1, 1025),
        "n_tokens": (-1, -(1 << 31)),
        "top_k": (0, -1, (1 << 16) + 1),
        "x_stride": ((1 << 29) + 1, -(1 << 29) - 1, (1 << 63) - 1, -(1 << 63)),
        "y_stride": (H - 1, 0, -H, (1 << 29) + 1, (1 << 63) - 1),
        "n_threads": (0, -1, 257, (1 << 31) - 1),
    }
    for name, values in refused.items():
        for value in values:
            assert call(**{name: value}) == c.SIZE, (name, value)


def test_a_run_refuses_too_small_a_workspace(call):
    least = c.workspace_size(call.shape, E, 1, K)
    for size in (0, 1, 64, least - 1):
        assert call(workspace_size=size) == c.ROOM
    assert call(workspace_size=least) == c.OK
    assert call(n_experts=E - 1, workspace_size=least) in (c.OK, c.ID)


def test_a_run_refuses_ids_that_name_nothing(call):
    for value in (E, -2, (1 << 31) - 1, -(1 << 31)):
        for at in ((0, 0), (T - 1, K - 1)):
            before, call.ids[at] = call.ids[at], value
            assert call() == c.ID
            assert call(workspace_size=c.workspace_size(call.shape, E, 1, K)) == c.ID
            call.ids[at] = before
    assert call(n_experts=2) == c.ID
    assert call() == c.OK


def test_a_run_refuses_experts_that_do_not_belong(call):
    kept = bytes(call.experts[3])
    call.ids[call.ids == 3] = -1
    call.ids[T - 1, K - 1] = 3
    other = c.packed(call.shape.but(hidden_size=H + 1), c.arrays_of(numbers(1, 2 * I, H + 1), numbers(2, H + 1, I)))
    relu = c.packed(call.shape.but(activation=0), c.arrays_of(numbers(1, 2 * I, H), numbers(2, H, I)))
    elsewhere = [c.Expert(), c.Expert(), c.Expert()]
    for file, expert in zip((other, relu), elsewhere[1:], strict=True):
        assert c.expert_open(c.address(file), file.nbytes, None, expert) == c.OK
    for expert in (*map(bytes, elsewhere), b"\xff" * 256, b"\x01" + bytes(255)):
        ctypes.memmove(ctypes.byref(call.experts[3]), expert, 256)
        assert call() == c.EXPERT
        assert call(workspace_size=c.workspace_size(call.shape, E, 1, K)) == c.EXPERT
    call.ids[T - 1, K - 1] = -1  # nobody asks for it
    assert call() == c.OK
    ctypes.memmove(ctypes.byref(call.experts[3]), kept, 256)


def test_a_run_refuses_pointers_that_are_not_aligned(call):
    for name in ("x", "ids", "weights", "y"):
        for off in (1, 2, 3):
            assert call(**{name: call.arguments[name] + off}) == c.ALIGNMENT, name


def test_a_run_refuses_outputs_that_overlap(call):
    n_bytes = {"x": T * H * 4, "ids": T * K * 4, "weights": T * K * 4, "experts": E * 256}
    n_bytes["workspace"], n_bytes["y"] = call.arguments["workspace_size"], T * H * 4
    places = call.arguments | {"experts": ctypes.addressof(call.experts)}
    for written in ("y", "workspace"):
        for other in set(n_bytes) - {written}:
            for place in (places[other] + n_bytes[other] - 4, places[other] + 4 - n_bytes[written], places[other]):
                assert call(**{written: place}) == c.OVERLAP, (written, other)
    beside = np.zeros(3 * T * H, np.float32)
    assert call(x=c.address(beside), y=call.arguments["y"]) == c.OK


# ---------------------------------------------------------------- router


def table_of(weight):
    n_experts, hidden = weight.shape
    table = np.full(c.router_table_size(n_experts, hidden) // 4, 9, np.float32)
    assert (
        c.router_pack(c.address(weight), weight.strides[0] // 4, n_experts, hidden, c.address(table), table.nbytes)
        == c.OK
    )
    return table


def routed(router, x, threads=1):
    ids = np.full((len(x), router.top_k), -7, np.int32)
    weights = np.full((len(x), router.top_k), np.nan, np.float32)
    bad = ctypes.c_int(-1)
    stride = x.strides[0] // 4
    error = c.route(router, c.address(x), stride, len(x), c.address(ids), c.address(weights), bad, threads)
    return error, ids, weights, bad.value


def made(weight, bias=None, correction=None, **options):
    n_experts, hidden = weight.shape
    table = table_of(weight)
    router = c.Router(
        n_experts=n_experts,
        hidden_size=hidden,
        table=c.address(table),
        bias=c.address(bias),
        correction=c.address(correction),
        **options,
    )
    return router, (table, bias, correction)


@pytest.mark.parametrize("kind", c.KINDS)
@pytest.mark.parametrize("n_experts", [1, 8, 16, 33, 200, 1024])
def test_every_kind_routes_as_python_does(kind, n_experts):
    weight, bias = numbers(1, n_experts, 40), numbers(2, n_experts)
    correction = None if kind == "topk-softmax" else numbers(3, n_experts)
    x = numbers(4, 150, 40)
    top_k = min(3, n_experts)
    for renormalize, scale in ((True, 1.0), (False, 2.5)):
        expected = Router.from_array(
            *(weight, bias), kind=kind, top_k=top_k, renormalize=renormalize, scale=scale, correction_bias=correction
        ).route(x)
        router, kept = made(
            *(weight, bias, correction), top_k=top_k, kind=c.KINDS[kind], renormalize=renormalize, scale=scale
        )
        for threads in (1, 2):
            error, ids, weights, _ = routed(router, x, threads)
            assert error == c.OK
            assert np.array_equal(ids, expected.expert_ids)
            assert np.array_equal(weights, expected.expert_weights)
        del kept


@pytest.mark.parametrize("masked", [-math.inf, 0.0])
@pytest.mark.parametrize("group_score", ["max", "top2"])
def test_groups_gating_and_epsilon_are_pythons(masked, group_score):
    weight, correction, x = numbers(1, 32, 24), numbers(2, 32), numbers(3, 70, 24)
    expected = Router.from_array(
        weight,
        kind="sigmoid-topk",
        top_k=4,
        correction_bias=correction,
        n_groups=8,
        topk_groups=3,
        group_score=group_score,
        masked_score=masked,
        epsilon=0.125,
    ).route(x)
    router, kept = made(
        *(weight, None, correction),
        top_k=4,
        kind=2,
        n_groups=8,
        topk_groups=3,
        group_score=int(group_score == "top2"),
        masked_score=masked,
        epsilon=0.125,
    )
    _, ids, weights, _ = routed(router, x)
    assert np.array_equal(ids, expected.expert_ids)
    assert np.array_equal(weights, expected.expert_weights)
    del kept
    taylor = Router.from_array(weight, gating="taylor").route(x)
    router, kept = made(weight, gating=1)
    assert np.array_equal(routed(router, x)[2], taylor.expert_weights)
    assert kept


def test_gen_routers_table_is_used_as_it_is():
    weight = numbers(1, 9, 12)
    assert to_blob(weight)[64:] == table_of(weight).tobytes()
    assert c.router_table_size(9, 12) == 12 * 16 * 4
    wide = np.repeat(weight, 2, axis=0)[::2]
    assert table_of(wide).tobytes() == table_of(weight).tobytes()


def test_a_logit_that_is_not_finite_names_its_token():
    x = numbers(4, 300, 40)
    router, kept = made(numbers(1, 8, 40))
    x[217, 5], x[260, 1] = np.nan, np.inf
    for threads in (1, 2):
        error, _, _, bad = routed(router, x, threads)
        assert (error, bad) == (c.NOT_FINITE, 217)
    ids, weights = np.empty((300, 2), np.int32), np.empty((300, 2), np.float32)
    assert c.route(router, c.address(x), 40, 300, c.address(ids), c.address(weights), None, 1) == c.NOT_FINITE
    assert kept


BAD_ROUTERS = [
    *(({"struct_size": n}, c.STRUCT) for n in (0, 8, 200)),
    *(({name: n}, c.SIZE) for name in ("n_experts", "hidden_size") for n in (0, -1, (1 << 31) - 1)),
    ({"n_experts": 1025}, c.SIZE),
    ({"hidden_size": (1 << 24) + 1}, c.SIZE),
    *(({"top_k": n}, c.SIZE) for n in (0, -1, 9)),
    *(({"kind": n}, c.OPTION) for n in (-1, 5)),
    *(({"gating": n}, c.OPTION) for n in (-1, 2)),
    *(({"kind": kind, "gating": 1}, c.OPTION) for kind in (2, 3, 4)),
    *(({"renormalize": n}, c.OPTION) for n in (-1, 2)),
    *(({"group_score": n}, c.OPTION) for n in (-1, 2)),
    *(({"scale": x}, c.OPTION) for x in (0.0, -1.0, math.nan, math.inf)),
    *(({"epsilon": x}, c.OPTION) for x in (-1e-20, math.nan, math.inf)),
    *(({"masked_score": x}, c.OPTION) for x in (1.0, math.nan, math.inf)),
    ({"kind": 1, "epsilon": 1e-10}, c.OPTION),
    ({"kind": 1, "correction": 64}, c.OPTION),
    *(({"n_groups": n}, c.SIZE) for n in (0, -1, 9, 3)),
    *(({"n_groups": 4, "topk_groups": n}, c.SIZE) for n in (0, 5)),
    *(({"kind": kind, "n_groups": 2, "topk_groups": 2}, c.OPTION) for kind in (1, 4)),
    ({"kind": 2, "n_groups": 8, "topk_groups": 4}, c.SIZE),
    ({"kind": 2, "n_groups": 4, "topk_groups": 1, "top_k": 3}, c.SIZE),
    ({"table": None}, c.NULL),
    ({"table": 65}, c.ALIGNMENT),
    ({"bias": 66}, c.ALIGNMENT),
]


@pytest.mark.parametrize(("fields", "error"), BAD_ROUTERS, ids=str)
def test_a_router_that_contradicts_itself_is_refused(fields, error):
    router, kept = made(numbers(1, 8, 40))
    found, ids, weights, bad = routed(router, numbers(4, 3, 40))
    assert (found, bad) == (c.OK, -1)
    changed = router.but(**fields)
    x = numbers(4, 3, 40)
    before = ids.tobytes(), weights.tobytes()
    assert c.route(changed, c.address(x), 40, 3, c.address(ids), c.address(weights), None, 1) == error
    assert (ids.tobytes(), weights.tobytes()) == before
    assert kept


def test_routing_refuses_bad_arguments():
    router, kept = made(numbers(1, 8, 40))
    x, ids, weights = numbers(4, 3, 40), np.full((3, 2), 9, np.int32), np.full((3, 2), 9, np.float32)
    good = {
        "router": router,
        "x": c.address(x),
        "x_stride": 40,
        "n_tokens": 3,
        "ids": c.address(ids),
        "weights": c.address(weights),
        "bad_token": None,
        "n_threads": 1,
    }
    refused = [
        *(({name: None}, c.NULL) for name in ("router", "x", "ids", "weights")),
        *(({name: good[name] + 2}, c.ALIGNMENT) for name in ("x", "ids", "weights")),
        *(({"n_tokens": n}, c.SIZE) for n in (-1, (1 << 30) + 1)),
        *(({"x_stride": n}, c.SIZE) for n in ((1 << 29) + 1, -(1 << 63))),
        *(({"n_threads": n}, c.SIZE) for n in (0, 257)),
        *(({name: good["x"] + 3 * 40 * 4 - 4}, c.OVERLAP) for name in ("ids", "weights")),
        *(({name: router.table + 16}, c.OVERLAP) for name in ("ids", "weights")),
        ({"ids": good["weights"]}, c.OVERLAP),
    ]
    for changed, error in refused:
        assert c.route(*(good | changed).values()) == error, changed
    assert (ids == 9).all()
    assert (weights == 9).all()
    assert c.route(*(good | {"n_tokens": 0, "x": None, "ids": None, "weights": None}).values()) == c.OK
    assert c.route(*good.values()) == c.OK
    assert kept


def test_packing_a_router_refuses_bad_arguments():
    weight, table = numbers(1, 8, 40), np.zeros((41, 16), np.float32)
    good = (c.address(weight), 40, 8, 40, c.address(table), 40 * 64)
    refused = [
        ({0: None}, c.NULL),
        ({4: None}, c.NULL),
        ({1: (1 << 29) + 1}, c.SIZE),
        *(({2: n}, c.SIZE) for n in (0, -1, 1025)),
        *(({3: n}, c.SIZE) for n in (0, -1, (1 << 24) + 1)),
        ({5: 40 * 64 - 1}, c.ROOM),
        ({0: good[0] + 1}, c.ALIGNMENT),
        ({4: good[4] + 2}, c.ALIGNMENT),
        ({4: good[0]}, c.OVERLAP),
    ]
    for changed, error in refused:
        assert c.router_pack(*(changed.get(i, value) for i, value in enumerate(good))) == error, changed
    assert not table.any()
    assert c.router_pack(*good) == c.OK
    assert not table[40].any()


def test_python_refuses_what_the_header_refuses():
    """The two lists of rules stay one: what C calls an error for a router, Python does not make."""
    names = dict(zip(c.KINDS.values(), c.KINDS, strict=True))
    for fields, error in BAD_ROUTERS:
        options = {name: value for name, value in fields.items() if name not in ("struct_size", "table", "bias")}
        if options.keys() & {"n_experts", "hidden_size", "correction"} or len(options) < len(fields):
            continue
        options["kind"] = names.get(options.get("kind", 0), "none")
        options["gating"] = {0: "exact", 1: "taylor"}.get(options.get("gating", 0), "none")
        options["group_score"] = {0: "max", 1: "top2"}.get(options.get("group_score", 1), "none")
        if options.get("renormalize") in (-1, 2):
            continue  # any truth value will do there
        assert error in (c.SIZE, c.OPTION)
        with pytest.raises(InvalidInput):
            Router.from_array(numbers(1, 8, 40), **options)
