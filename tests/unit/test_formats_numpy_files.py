import io
import struct
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from colibri_cli.errors import InvalidInput
from colibri_cli.formats.checkpoint import open_checkpoint

GATES = Path(__file__).parents[1] / "data" / "gates"
FULL = np.load(GATES / "full.npy")
COARSE = np.load(GATES / "coarse.npy")
NPY = (GATES / "full.npy").read_bytes()


def read(path):
    with open_checkpoint(path) as tensors:
        return {tensor.name: tensor.read() for tensor in tensors}


@pytest.mark.parametrize(
    ("name", "key", "expected"),
    [
        ("full.npy", "", FULL),
        ("coarse.npy", "", COARSE),
        ("float16.npy", "", COARSE),
        ("float64.npy", "", FULL),
        ("fortran_order.npy", "", FULL),
        ("big_endian.npy", "", FULL),
        ("stored.npz", "gate", FULL),
    ],
)
def test_what_numpy_saved_comes_back_bit_for_bit(name, key, expected):
    found = read(GATES / name)[key]
    assert found.dtype == np.float32
    np.testing.assert_array_equal(np.ascontiguousarray(found).view(np.uint32), expected.view(np.uint32))


def test_compressed_members_are_listed_and_read():
    with open_checkpoint(GATES / "compressed.npz") as tensors:
        gate, ids = tensors
        assert (ids.name, ids.shape, ids.dtype) == ("ids", (5,), "int64")
        np.testing.assert_array_equal(gate.read(), FULL)


arrays = hnp.arrays(
    st.sampled_from(["<f4", ">f4", "<f2", "<f8"]),
    hnp.array_shapes(min_dims=0, min_side=0, max_side=4),
    elements=st.floats(width=16),
)


@given(values=arrays, version=st.sampled_from([(1, 0), (2, 0), (3, 0)]), fortran=st.booleans())
@settings(max_examples=60, deadline=None)
def test_every_version_and_layout_is_read(values, version, fortran, tmp_path_factory):
    path = tmp_path_factory.mktemp("files") / "gate.npy"
    with path.open("wb") as stream:
        np.lib.format.write_array(stream, np.asfortranarray(values) if fortran else values, version)
    np.testing.assert_array_equal(read(path)[""], values.astype(np.float32))


def npy(header, data=b"", version=b"\x01\x00"):
    text = header.encode("latin-1")
    return b"\x93NUMPY" + version + struct.pack("<H", len(text)) + text + data


def described(shape="(8, 32)", descr="'<f4'", order="False"):
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}}}"


BAD_NPY = [
    (NPY[:-1], r"Expected 1152 bytes \(128 of header, then float32 \[8, 32\]\), got 1151 bytes"),
    (NPY + b"x", "Expected 1152 bytes .* got 1153 bytes"),
    (NPY[:100], "Expected a .npy header, got EOF"),
    (b"\x93NUMPY", "Expected a .npy header, got EOF"),
    (npy(described(), version=b"\x09\x00"), "Expected a .npy header, got version 9.0"),
    (npy("{"), "Expected a .npy header, got"),
    (npy("(" * 5000), "Expected a .npy header, got"),
    (npy("-" * 9000 + "1"), "Expected a .npy header, got"),
    (npy("{}"), "Expected a .npy header, got Header does not contain the correct keys"),
    (npy("__import__('os').system('true')"), "Expected a .npy header, got"),
    (npy(described(descr="'nonsense'")), "Expected a .npy header, got descr is not a valid dtype descriptor"),
    (npy(described(descr="'|O'"), bytes(2048)), "Expected an array of numbers, got one of pickled Python objects"),
    (npy(described(shape="(8, -32)")), r"Expected a shape of sizes, got \(8, -32\)"),
    (npy(described(shape="(True, 32)")), r"Expected a shape of sizes, got \(True, 32\)"),
    (npy(described(shape=f"({2**63},)")), "Expected a shape of sizes"),
    (npy(described(shape=str((1,) * 65))), "Expected a shape of sizes"),
    (npy(described(shape=f"({2**40}, {2**40})")), r"Expected \d+ bytes .*, got \d+ bytes"),
]


@pytest.mark.parametrize(("data", "message"), BAD_NPY)
def test_a_hostile_npy_is_one_clear_error(tmp_path, data, message):
    path = tmp_path / "gate.npy"
    path.write_bytes(data)
    with pytest.raises(InvalidInput, match=message) as caught:
        read(path)
    assert caught.value.at == str(path)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize(("data", "message"), BAD_NPY)
def test_a_hostile_member_is_one_clear_error(tmp_path, data, message, method):
    path = tmp_path / "gate.npz"
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("gate.npy", data)
    with pytest.raises(InvalidInput, match=message) as caught:
        read(path)
    assert caught.value.at == f"{path}: gate.npy"


def zipped(members, method=zipfile.ZIP_DEFLATED):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return stream.getvalue()


def with_field(data, offset, value):
    """Change a little-endian 16- or 32-bit field of the central directory's first entry."""
    position = data.index(b"PK\x01\x02") + offset
    return data[:position] + value + data[position + len(value) :]


ZEROS = npy(described(shape="(8, 32)"), bytes(1024))
GOOD = zipped([("gate.npy", ZEROS)])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (GOOD[:-1], "Expected a whole zip archive, got"),
        (GOOD[:40], "Expected a whole zip archive, got file is not a zip file"),
        (zipped([("gate.txt", b"")]), "Expected members with names ending in .npy, got another one"),
        (zipped([("gate.npy", b"")]), "Expected a .npy header, got EOF"),
        (zipped([("gate.npy", ZEROS)], zipfile.ZIP_LZMA), "Expected a stored or deflated member, got .* method 14"),
        (with_field(GOOD, 8, b"\x01\x00"), "Expected a plain member, got an encrypted one"),
        (with_field(GOOD, 16, b"\x01\x02\x03\x04"), "Expected CRC-32 04030201, got [0-9a-f]{8}: the member is damaged"),
        (with_field(GOOD, 20, b"\xff\xff\xff\x00"), r"Expected \d+ bytes at offset \d+, got a file of"),
        (with_field(GOOD, 24, b"\xff\xff\xff\x00"), "Expected 1092 bytes .*, got 16777215 bytes"),
        (with_field(GOOD, 42, b"\x05\x00\x00\x00"), "Expected a local file header, got"),
        (with_field(GOOD, 42, b"\xff\xff\xff\x7f"), "Expected 30 bytes at offset 2147483647"),
        (GOOD[:38] + b"\xff" * 8 + GOOD[46:], "Expected a deflated member, got error -3"),
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_hostile_archive_is_one_clear_error(tmp_path, data, message):
    path = tmp_path / "gate.npz"
    path.write_bytes(data)
    with pytest.raises(InvalidInput, match=message):
        read(path)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_name_given_twice_is_refused(tmp_path):
    path = tmp_path / "gate.npz"
    path.write_bytes(zipped([("gate.npy", ZEROS), ("gate.npy", NPY)]))
    with pytest.raises(InvalidInput, match="Expected each member once, got a second one of this name"):
        read(path)


def test_a_bomb_is_measured_before_it_is_inflated(tmp_path):
    # 64 MiB of zeros behind the size of a small gate: a megabyte must be room enough to find out.
    bomb = zipped([("gate.npy", npy(described(), bytes(1 << 26)))])
    assert len(bomb) < 1 << 17
    honest = tmp_path / "honest.npz"
    honest.write_bytes(bomb)
    lying = tmp_path / "lying.npz"
    lying.write_bytes(with_field(bomb, 24, struct.pack("<I", len(ZEROS))))
    tracemalloc.start()
    try:
        for path, message in ((honest, "Expected 1092 bytes .*, got 67108932 bytes"), (lying, "got more")):
            with pytest.raises(InvalidInput, match=message):
                read(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
