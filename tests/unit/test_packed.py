"""Packed expert files: what they hold, how they run, and what is refused."""

import os
import re
import struct
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from reference import Ffns, integers, numbers

from colibri_cli import Experts, InvalidInput, UsageError, _core
from colibri_cli.formats import packed
from colibri_cli.formats.checked_file import CheckedFile
from colibri_cli.formats.experts import ExpertShape
from colibri_cli.formats.packed import PackedHeader, read_header, verify, write_packed

PAGE = Path(__file__).parents[2] / "docs" / "formats.md"
LOADINGS = ("mmap", "static", "on-demand")
SIZES = ((1, 1), (15, 17), (16, 32), (33, 31), (64, 48))  # around lanes, panels and groups
E, T, K = 3, 7, 2
IDS = np.stack([integers(4, 0, E, T), integers(5, 0, E, T)], axis=1)
WEIGHTS = numbers(6, T, K)
every_dtype = pytest.mark.parametrize("dtype", packed.DTYPES)
every_loading = pytest.mark.parametrize("loading", LOADINGS)


def shape_of(ffns, dtype):
    _, hidden, inter = ffns.down.shape
    return ExpertShape(hidden, inter, ffns.activation, ffns.gated, dtype, ffns.alpha, ffns.beta, ffns.limit)


def kernel_of(shape):
    limit = None if shape.limit is None else float(shape.limit)
    activation, dtype = _core.ACTIVATIONS[shape.activation], _core.DTYPES[shape.dtype]
    sizes = shape.hidden_size, shape.intermediate_size
    return _core.ExpertKernel(*sizes, activation, shape.gated, shape.alpha, shape.beta, limit, 1, 512, dtype)


def pack(ffns, e, dtype):
    """Expert e in panels, and its file's header."""
    shape = shape_of(ffns, dtype)
    biases = [None if b is None else b[e] for b in (ffns.up_bias, ffns.down_bias)]
    expert = kernel_of(shape).pack(ffns.up[e], ffns.down[e], *biases)
    return expert, PackedHeader(shape, any(b is not None for b in biases))


def file_of(expert, header):
    return header.pack(zlib.crc32(expert, zlib.crc32(header.pack()))) + bytes(expert)


def write(ffns, folder, dtype):
    for e in range(len(ffns.up)):
        expert, header = pack(ffns, e, dtype)
        write_packed(folder / f"{e}.bin", header, memoryview(expert))
    return [f"{e}.bin" for e in range(len(ffns.up))]


@pytest.fixture
def file(tmp_path):
    """A sound file, int4 with biases."""
    ffns = Ffns.make(1, 1, 20, 12, limit=7.0, alpha=1.5, beta=1.0)
    return tmp_path / write(ffns, tmp_path, "int4")[0]


# ---------------------------------------------------------------- what a file holds


@pytest.fixture(scope="module")
def read_packed():
    """The reader on the documentation's page, which shares no code with the package."""
    (code,) = re.findall(r"^```python\n(import struct\n.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    names = {"np": np}
    exec(code, names)  # noqa: S102 - our own page
    return names["read_packed"]


def test_codes_are_the_kernels_own():
    codes = {name: code for code, name in enumerate(packed.DTYPES)}
    assert codes == {name: code for name, code in _core.DTYPES.items() if name != "float16"}  # which is not packed
    assert {name: code for code, name in enumerate(packed.ACTIVATIONS)} == _core.ACTIVATIONS


@every_dtype
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("hidden", "inter"), SIZES)
def test_the_reader_of_the_documentation_finds_the_weights(hidden, inter, bias, gated, dtype, read_packed):
    ffns = Ffns.make(1, 1, hidden, inter, bias=bias, gated=gated, activation="relu")
    expert, header = pack(ffns, 0, dtype)
    _, up, down, up_bias, down_bias = read_packed(file_of(expert, header))
    for found, original in ((up, ffns.up[0]), (down, ffns.down[0])):
        w = original.astype(np.float64)
        error = np.abs(found - w)
        if dtype == "float32":
            assert not error.any()
        else:  # half a step at most, but for what int4 clips
            steps = {"bfloat16": 256, "int8": 127, "int4": 15}[dtype]
            assert error.max() <= (3 if dtype == "int4" else 1) * np.abs(w).max() / steps
            assert np.sqrt((error**2).mean()) <= np.abs(w).max() / steps
    if bias:
        np.testing.assert_array_equal(up_bias, ffns.up_bias[0])
        np.testing.assert_array_equal(down_bias, ffns.down_bias[0])
    else:
        assert (up_bias, down_bias) == (None, None)


@every_dtype
@pytest.mark.parametrize("gated", [False, True])
def test_what_that_reader_finds_is_what_runs(gated, dtype, read_packed):
    """The layer in float64 with the weights that the file holds, to within the arithmetic's error."""
    hidden, inter = 70, 45
    ffns = Ffns.make(1, 1, hidden, inter, gated=gated, activation="relu")
    expert, header = pack(ffns, 0, dtype)
    _, *weights = read_packed(file_of(expert, header))
    held = replace(ffns, **dict(zip(("up", "down", "up_bias", "down_bias"), (w[None] for w in weights), strict=True)))
    x = numbers(2, T, hidden)
    run = kernel_of(header.shape).run
    y = run(_core.ExpertSet([expert]), x, np.zeros((T, 1), np.int32), np.ones((T, 1), np.float32))
    expected = held.expert(0, x)
    close = {"float32": 1e-6, "bfloat16": 1e-6, "int8": 2e-4, "int4": 2e-2}[dtype]  # activations have 24, 16 or 8 bits
    assert np.abs(y - expected).max() <= close * np.abs(expected).max()


def test_header_by_hand(file):
    data = file.read_bytes()
    size = 4 * 288 + 4 * 4 + 4 * (24 + 20)  # gate, up, two down panels of a group each; bases; biases
    fields = struct.unpack_from("<8s4I4B3fQI12s", data)
    checksum = zlib.crc32(data[:48] + bytes(4) + data[52:])
    assert fields == (b"CLBEXPRT", 1, 64, 20, 12, 3, 2, 1, 1, 1.5, 1.0, 7.0, size, checksum, bytes(12))
    assert len(data) == 64 + size


def test_a_header_survives(file):
    with CheckedFile(file) as opened:
        header = read_header(opened)
    assert header == PackedHeader(ExpertShape(20, 12, "silu", True, "int4", 1.5, 1.0, 7.0), biased=True)
    assert header.file_size == file.stat().st_size
    verify(file)


@every_dtype
def test_packing_says_the_same_again(dtype):
    """No byte of a payload is left as memory happened to be."""
    ffns = Ffns.make(1, 1, 33, 17, bias=True)
    assert len({bytes(pack(ffns, 0, dtype)[0]) for _ in range(5)}) == 1


# ---------------------------------------------------------------- payloads in the core


@every_dtype
@pytest.mark.parametrize("offset", [0, 1, 2, 63])
def test_a_payload_runs_at_any_address(offset, dtype):
    ffns = Ffns.make(1, 1, 40, 24)
    expert, header = pack(ffns, 0, dtype)
    room = np.zeros(expert.n_bytes + 128, np.uint8)
    start = -room.ctypes.data % 64 + offset
    payload = room[start : start + expert.n_bytes]
    payload[:] = memoryview(expert)
    payload.flags.writeable = False
    kernel = kernel_of(header.shape)
    adopted = kernel.adopt(payload, header.biased)
    assert adopted.in_place
    assert bytes(adopted) == bytes(expert)
    x, ids, weights = numbers(2, T, 40), np.zeros((T, 1), np.int32), np.ones((T, 1), np.float32)
    before, answers = _core.isa(), set()
    try:
        for isa in _core.isa_names():
            _core.use_isa(isa)
            answers |= {kernel.run(_core.ExpertSet([e]), x, ids, weights).tobytes() for e in (expert, adopted)}
    finally:
        _core.use_isa(before)
    assert len(answers) == 1


def test_a_payload_is_kept_alive_and_read_only():
    expert, header = pack(Ffns.make(1, 1, 16, 16), 0, "int8")
    view = memoryview(expert)
    assert (view.readonly, view.format, view.ndim, view.nbytes) == (True, "B", 1, header.payload_size)
    expected = bytes(view)
    del expert
    assert bytes(view) == expected
    with pytest.raises(TypeError):
        view[0] = 1


def test_weights_in_place_are_no_payload():
    ffns = Ffns.make(1, 1, 16, 16)
    with pytest.raises(BufferError, match="in place"):
        memoryview(kernel_of(shape_of(ffns, "float32")).in_place(ffns.up[0], ffns.down[0]))


def test_a_payload_of_another_size_is_refused():
    expert, header = pack(Ffns.make(1, 1, 16, 16), 0, "float32")
    payload = np.frombuffer(expert, np.uint8)
    for wrong in (payload[:-1], payload[:0]):
        with pytest.raises(InvalidInput, match=f"Expected {header.payload_size} bytes"):
            kernel_of(header.shape).adopt(wrong, True)
    with pytest.raises(InvalidInput, match="bytes"):
        kernel_of(header.shape).adopt(payload, False)


def test_out_may_not_be_an_adopted_payload():
    expert, header = pack(Ffns.make(1, 1, 16, 16), 0, "float32")
    kernel = kernel_of(header.shape)
    memory = np.frombuffer(bytearray(expert), np.float32)
    experts = _core.ExpertSet([kernel.adopt(memory.view(np.uint8), True)])
    x, ids, weights = numbers(2, 2, 16), np.zeros((2, 1), np.int32), np.ones((2, 1), np.float32)
    for at in (0, len(memory) - 32):
        with pytest.raises(InvalidInput, match="an overlap with a weight"):
            kernel.run(experts, x, ids, weights, memory[at : at + 32].reshape(2, 16))


@every_dtype
@pytest.mark.parametrize("absent", ["up_bias", "down_bias", "both"])
def test_an_absent_bias_is_zeros(absent, dtype):
    """Zeros in its place have the same bits; one bias alone brings the other, as zeros."""
    ffns = Ffns.make(1, 1, 33, 17)
    biases = {name: None if absent in (name, "both") else getattr(ffns, name)[0] for name in ("up_bias", "down_bias")}
    zeros = {name: np.zeros_like(getattr(ffns, name)[0]) if b is None else b for name, b in biases.items()}
    kernel = kernel_of(shape_of(ffns, dtype))
    without, with_zeros = (kernel.pack(ffns.up[0], ffns.down[0], **b) for b in (biases, zeros))
    if absent == "both":
        assert with_zeros.n_bytes - without.n_bytes == 4 * (2 * 17 + 33)
    else:
        assert bytes(without) == bytes(with_zeros)
    x, ids, weights = -np.abs(numbers(2, T, 33)), np.zeros((T, 1), np.int32), np.ones((T, 1), np.float32)
    one, other = (kernel.run(_core.ExpertSet([e]), x, ids, weights) for e in (without, with_zeros))
    assert one.tobytes() == other.tobytes()


# ---------------------------------------------------------------- a layer of packed files


@every_dtype
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rule", [{}, {"limit": 0.5, "alpha": 1.702, "beta": 1.0}, {"gated": False}], ids=str)
@pytest.mark.parametrize(("hidden", "inter"), SIZES)
def test_the_answer_does_not_depend_on_the_loading(hidden, inter, rule, bias, dtype, tmp_path):
    ffns = Ffns.make(1, E, hidden, inter, bias=bias, **rule)
    names, shape = write(ffns, tmp_path, dtype), shape_of(ffns, dtype)
    x = numbers(2, T, hidden)
    expected = Experts.from_arrays(**ffns.arrays(), dtype=dtype).run(x, IDS, WEIGHTS)
    for loading in LOADINGS:
        experts = Experts.open(tmp_path, loading, 2, shape=shape, files=names)
        assert experts.run(x, IDS, WEIGHTS).tobytes() == expected.tobytes(), loading


@every_loading
def test_what_is_counted(loading, tmp_path):
    ffns = Ffns.make(1, E, 20, 12)
    names, shape = write(ffns, tmp_path, "int8"), shape_of(ffns, "int8")
    experts = Experts.open(tmp_path, loading, 2, shape=shape, files=names)
    experts.preload()
    experts.run(numbers(2, 1, 20), np.int32([[0]]), np.ones((1, 1), np.float32))
    size = (tmp_path / names[0]).stat().st_size
    stats, n = experts.stats(), 1 if loading == "on-demand" else E
    assert stats["resident_bytes"] == n * (size - 64)
    assert stats["in_place_bytes"] == (n * (size - 64) if loading == "mmap" else 0)
    assert stats["bytes_read"] == (0 if loading == "mmap" else n * size)


@every_loading
@every_dtype
def test_raw_files_in_a_layer_of_another_dtype(dtype, loading, tmp_path):
    """They are packed when read, with the layer's numbers: the bits of from_arrays."""
    ffns = Ffns.make(1, E, 20, 12, limit=0.5, alpha=1.702, beta=1.0)
    names = ffns.write(tmp_path)
    experts = Experts.open(tmp_path, loading, shape=shape_of(ffns, dtype), files=names)
    x = numbers(2, T, 20)
    expected = Experts.from_arrays(**ffns.arrays(), dtype=dtype).run(x, IDS, WEIGHTS)
    np.testing.assert_array_equal(experts.run(x, IDS, WEIGHTS), expected)
    experts.preload()
    in_place = loading == "mmap" and dtype == "float32"
    assert (experts.stats()["in_place_bytes"] > 0) == in_place
    assert experts.stats()["bytes_read"] == (0 if in_place else E * experts.shape.n_bytes)


@every_loading
def test_raw_and_packed_files_go_together(loading, tmp_path):
    ffns = Ffns.make(1, E, 20, 12)
    names = write(ffns, tmp_path, "float32")
    (tmp_path / names[1]).write_bytes(ffns.raw(1))
    experts = Experts.open(tmp_path, loading, shape=shape_of(ffns, "float32"), files=names)
    x = numbers(2, T, 20)
    ids, weights = IDS[:, :1], WEIGHTS[:, :1]
    expected = Experts.from_arrays(**ffns.arrays()).run(x, ids, weights)
    np.testing.assert_array_equal(experts.run(x, ids, weights), expected)
    (tmp_path / "raw.bin").write_bytes(ffns.raw(2))
    experts.replace(2, tmp_path / "raw.bin")
    experts.replace(1, tmp_path / names[2])
    assert experts.add(tmp_path / names[1]) == E
    swapped = np.array([0, E, 2], np.int32)[ids]
    np.testing.assert_array_equal(experts.run(x, swapped, weights), expected)


@every_dtype
def test_a_layer_of_arrays_takes_packed_files(dtype, tmp_path):
    ffns = Ffns.make(1, E, 20, 12)
    names = write(ffns, tmp_path, dtype)
    experts = Experts.from_arrays(**ffns.arrays(), dtype=dtype)
    x = numbers(2, T, 20)
    expected = experts.run(x, IDS, WEIGHTS)
    for e, name in enumerate(names):
        experts.replace(e, tmp_path / name)
    np.testing.assert_array_equal(experts.run(x, IDS, WEIGHTS), expected)
    assert experts.stats()["in_place_bytes"] == 0


@every_loading
def test_an_expert_without_biases_joins_those_with(loading, tmp_path):
    ffns, bare = Ffns.make(1, E, 20, 12), Ffns.make(9, E, 20, 12, bias=False)
    names = write(ffns, tmp_path, "bfloat16")
    experts = Experts.open(tmp_path, loading, shape=shape_of(ffns, "bfloat16"), files=names)
    (tmp_path / "bare").mkdir()
    experts.replace(0, tmp_path / "bare" / write(bare, tmp_path / "bare", "bfloat16")[0])
    x, ids, weights = numbers(2, T, 20), np.zeros((T, 1), np.int32), np.ones((T, 1), np.float32)
    expected = Experts.from_arrays(**bare.arrays(), dtype="bfloat16").run(x, ids, weights)
    np.testing.assert_array_equal(experts.run(x, ids, weights), expected)


OTHERS = {
    "hidden_size": 21,
    "intermediate_size": 13,
    "activation": "gelu",
    "gated": False,
    "dtype": "int8",
    "alpha": 1.25,
    "beta": 1.0,
    "limit": 7.0,
}


@every_loading
@pytest.mark.parametrize("field", OTHERS)
def test_an_expert_of_another_shape_is_refused_by_field(field, loading, tmp_path):
    ffns = Ffns.make(1, 1, 20, 12)
    (name,) = write(ffns, tmp_path, "float32")
    shape = replace(shape_of(ffns, "float32"), **{field: OTHERS[field]})
    with pytest.raises(InvalidInput, match=f"Expected {field} {OTHERS[field]}, as the layer has, got .* at .*{name}"):
        Experts.open(tmp_path, loading, shape=shape, files=[name])


@every_loading
def test_a_refused_file_leaves_the_set_as_it_was(loading, file, tmp_path):
    ffns = Ffns.make(1, E, 20, 12)
    experts = Experts.open(tmp_path, loading, shape=shape_of(ffns, "float32"), files=ffns.write(tmp_path))
    x = numbers(2, T, 20)
    before = experts.run(x, IDS, WEIGHTS)
    with pytest.raises(InvalidInput, match="dtype float32"):
        experts.replace(0, file)
    with pytest.raises(InvalidInput, match="dtype float32"):
        experts.add(file)
    np.testing.assert_array_equal(experts.run(x, IDS, WEIGHTS), before)


MANY = """
import os, resource, sys
from colibri_cli import Experts
from colibri_cli.formats.experts import ExpertShape

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
shape = ExpertShape(20, 12, "silu", True, "int8")
before = len(os.listdir("/proc/self/fd"))
held = [Experts.open(sys.argv[1], "mmap", shape=shape, files=["0.bin"] * 1000) for _ in range(4)]
assert len(os.listdir("/proc/self/fd")) == before
mapped = open("/proc/self/maps").read().count("0.bin")
assert mapped == 4000, mapped
del held
assert "0.bin" not in open("/proc/self/maps").read()
"""


def test_mapped_files_keep_no_descriptor(tmp_path):
    write(Ffns.make(1, 1, 20, 12), tmp_path, "int8")
    done = subprocess.run(
        [sys.executable, "-c", MANY, tmp_path],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------- hostile files


def patched(file, offset, data):
    with Path(file).open("r+b") as stream:
        stream.seek(offset)
        stream.write(data)


FIELDS = {
    "version": (8, "<I", (0, 2)),
    "header_size": (12, "<I", (0, 63, 128)),
    "hidden_size": (16, "<I", (0, (1 << 24) + 1, 0xFFFFFFFF)),
    "intermediate_size": (20, "<I", (0, (1 << 24) + 1, 0xFFFFFFFF)),
    "dtype": (24, "<B", (4, 255)),
    "activation": (25, "<B", (5, 255)),
    "gated": (26, "<B", (2, 255)),
    "biased": (27, "<B", (2, 255)),
    "alpha": (28, "<f", (np.nan, np.inf)),
    "beta": (32, "<f", (np.nan, -np.inf)),
    "limit": (36, "<f", (0.0, -1.0, np.nan, -np.inf)),
    "payload_size": (40, "<Q", (0, 1, (1 << 64) - 1)),
    "reserved": (63, "<B", (1,)),
}
CASES = [(field, value) for field, (_, _, values) in FIELDS.items() for value in values]


@pytest.mark.parametrize(("field", "value"), CASES)
def test_a_field_that_is_wrong_is_named(field, value, file):
    offset, code, _ = FIELDS[field]
    patched(file, offset, struct.pack(code, value))
    for read in (verify, opened):
        with pytest.raises(InvalidInput, match=rf"^Expected {field} .* - at .*{file.name}"):
            read(file)


def opened(file):
    shape = ExpertShape(20, 12, "silu", True, "int4", 1.5, 1.0, 7.0)
    return Experts.open(file.parent, shape=shape, files=[file.name])


@pytest.mark.parametrize("field", ["hidden_size", "intermediate_size", "dtype", "gated", "biased"])
def test_fields_that_contradict_the_payload_size(field, file):
    offset, code, _ = FIELDS[field]
    now = struct.unpack_from(code, file.read_bytes(), offset)[0]
    patched(file, offset, struct.pack(code, now - 1 if now in (1, 3) else now + 32))
    with pytest.raises(InvalidInput, match=r"Expected payload_size .*as the other fields say"):
        opened(file)


@pytest.mark.parametrize("change", [-1, 1, 4, 1 << 40])
def test_a_file_of_another_size_is_refused(change, file):
    size = file.stat().st_size
    os.truncate(file, size + change)  # a sparse file where it grows: nothing may try to hold it
    for read in (verify, opened):
        with pytest.raises(InvalidInput, match=f"Expected {size} bytes, as the header says, got {size + change} bytes"):
            read(file)


@pytest.mark.parametrize("size", [8, 63])
def test_a_file_shorter_than_its_header_is_refused(size, file):
    os.truncate(file, size)
    for read in (verify, opened):
        with pytest.raises(InvalidInput, match=f"64 bytes at offset 0, got a file of {size} bytes"):
            read(file)


def test_another_magic_is_no_packed_file(file):
    patched(file, 0, b"CLBROUTE")
    with pytest.raises(InvalidInput, match="Expected magic b'CLBEXPRT', got b'CLBROUTE'"):
        verify(file)
    with pytest.raises(InvalidInput, match="float32, with biases"):  # but a raw one of the wrong size
        opened(file)


def test_damage_behind_the_header_is_verifys_to_find(file):
    size = file.stat().st_size
    for at in (64, size // 2, size - 1):
        before = file.read_bytes()
        patched(file, at, bytes([before[at] ^ 1]))
        opened(file)
        with pytest.raises(InvalidInput, match=r"Expected CRC-32 .* the file is damaged"):
            verify(file)
        file.write_bytes(before)
    verify(file)


def test_verify_needs_little_memory(tmp_path):
    ffns = Ffns.make(1, 1, 700, 1500)
    (name,) = write(ffns, tmp_path, "float32")
    verify(tmp_path / name)
    import tracemalloc

    tracemalloc.start()
    verify(tmp_path / name)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tmp_path / name).stat().st_size > 12e6
    assert peak < 4e6


def test_a_payload_of_another_size_is_not_written(tmp_path):
    expert, header = pack(Ffns.make(1, 1, 20, 12), 0, "int8")
    with pytest.raises(InvalidInput, match="payload"):
        write_packed(tmp_path / "x.bin", header, memoryview(expert)[:-1])
    assert not list(tmp_path.iterdir())
    with pytest.raises(UsageError):
        write_packed(tmp_path / "none" / "x.bin", header, memoryview(expert))
