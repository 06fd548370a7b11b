import re
import shutil
import struct
import subprocess
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from colibri_cli.errors import InvalidInput, UsageError
from colibri_cli.formats import router_table

GATE = (np.arange(5 * 3, dtype=np.float32).reshape(5, 3) - 7) / 3
CC = shutil.which("cc")
STRICT = ("-std=c11", "-Wall", "-Wextra", "-Werror", "-pedantic")
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
gates = hnp.arrays(np.float32, st.tuples(st.integers(1, 40), st.integers(1, 9)), elements=FINITE)
needs_cc = pytest.mark.skipif(CC is None, reason="no C compiler")


def bits(values):
    return values.view(np.uint32).tolist()


def blob_at(tmp_path, data):
    path = tmp_path / "gate.bin"
    path.write_bytes(data)
    return path


def sealed(header: bytes, payload: bytes) -> bytes:
    """Put the right checksum into a header, as the documentation says it is made."""
    checksum = zlib.crc32(header[:40] + bytes(4) + header[44:] + payload)
    return header[:40] + struct.pack("<I", checksum) + header[44:] + payload


@given(gate=gates)
@settings(max_examples=40, deadline=None)
def test_a_blob_gives_back_the_bits(gate, tmp_path_factory):
    path = blob_at(tmp_path_factory.mktemp("blob"), router_table.to_blob(gate))
    found = router_table.read_blob(path)
    assert found.shape == gate.shape
    assert found.flags.c_contiguous
    assert bits(found) == bits(gate)


def test_blob_as_documented():
    blob = router_table.to_blob(GATE)
    magic, version, start, n_experts, hidden, width, dtype, size = struct.unpack("<8sIIIIIIQ", blob[:40])
    assert (magic, version, start, dtype) == (b"CLBROUTE", 1, 64, 1)
    assert (n_experts, hidden, width, size) == (5, 3, 16, 3 * 16 * 4)
    assert len(blob) == start + size
    assert blob[44:64] == bytes(20)
    assert blob == sealed(blob[:64], blob[64:])
    table = np.frombuffer(blob, "<f4", offset=64).reshape(hidden, width)
    np.testing.assert_array_equal(table[:, :5], GATE.T)
    assert not table[:, 5:].any()


BLOB = router_table.to_blob(GATE)


def patched(offset: int, new: bytes) -> bytes:
    header = BLOB[:offset] + new + BLOB[offset + len(new) :]
    return sealed(header[:64], header[64:])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "Expected 64 bytes at offset 0, got a file of 0 bytes"),
        (BLOB[:63], "Expected 64 bytes at offset 0, got a file of 63 bytes"),
        (BLOB[:-1], "Expected width 16 and 192 bytes of table, got width 16, a table of 192 bytes and a file of 255"),
        (BLOB + b"\0", "Expected width 16 and 192 bytes of table, .* a file of 257"),
        (b"NOTROUTE" + BLOB[8:], "Expected a router blob, got magic b'NOTROUTE'"),
        (patched(8, b"\x02"), "Expected version 1 .* got version 2, a header of 64 bytes, dtype 1"),
        (patched(12, b"\x80"), "Expected version 1 .* got version 1, a header of 128 bytes"),
        (patched(28, b"\x02"), "Expected version 1 .* got .* dtype 2"),
        (patched(63, b"\x01"), "Expected version 1 .* zeros behind the checksum"),
        (patched(16, bytes(4)), "Expected 1 to 1024 experts .* got 0 experts, hidden size 3"),
        (patched(20, b"\xff\xff\xff\xff"), "Expected 1 to 1024 experts .* got 5 experts, hidden size 4294967295"),
        (patched(24, b"\x20"), "Expected width 16 and 192 bytes of table, got width 32"),
        (patched(32, b"\x00"), "Expected width 16 and 192 bytes of table, got width 16, a table of 0 bytes"),
        (patched(64 + 15 * 4, b"\x01"), "Expected zeros behind the last expert, got other values"),
        (BLOB[:64] + b"\x01" + BLOB[65:], "Expected CRC-32 [0-9a-f]{8}, got [0-9a-f]{8}: the file is damaged"),
    ],
)
def test_a_bad_blob_is_refused(tmp_path, data, message):
    path = blob_at(tmp_path, data)
    with pytest.raises(InvalidInput, match=message) as caught:
        router_table.read_blob(path)
    assert caught.value.at == str(path)


def test_no_byte_of_a_blob_can_change_unseen(tmp_path):
    for index in range(len(BLOB)):
        path = blob_at(tmp_path, BLOB[:index] + bytes([BLOB[index] ^ 0x10]) + BLOB[index + 1 :])
        with pytest.raises(InvalidInput):
            router_table.read_blob(path)


@pytest.mark.parametrize(("n_experts", "width"), [(1, 16), (8, 16), (16, 16), (17, 32), (256, 256)])
def test_width(n_experts, width):
    assert router_table.width_of(n_experts) == width


def test_npy_is_what_numpy_reads(tmp_path):
    data = router_table.to_npy(GATE)
    path = tmp_path / "gate.npy"
    path.write_bytes(data)
    found = np.load(path, allow_pickle=False)
    assert found.dtype == "<f4"
    assert bits(found) == bits(GATE)
    assert (len(data) - GATE.nbytes) % 64 == 0


@pytest.mark.parametrize("name", ["gate", "Gate_2", "a" * 63])
def test_names(name):
    router_table.check_name(name)


@pytest.mark.parametrize(
    "name", ["", "2gate", "ga te", "gate;", "gäte", "gate\n", "_gate", "float", "main", "constexpr", "asm", "a" * 64]
)
def test_bad_names_are_refused(name):
    with pytest.raises(UsageError, match="Expected a C identifier"):
        router_table.check_name(name)


def run(*command, cwd):
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


EDGES = np.array([[0.0, -0.0, 1e-45, -1.1754942e-38], [3.4028235e38, 0.1, -1 / 3, 16777217.0]], np.float32)

PRINT_TABLE = """
#include <stdint.h>
#include <stdio.h>
#include <string.h>
{declaration}
int main(void) {{
    for (int row = 0; row < 4; row++)
        for (int column = 0; column < 16; column++) {{
            uint32_t bits;
            memcpy(&bits, &edges[row][column], sizeof bits);
            printf("%u ", bits);
        }}
    return (uintptr_t)edges % 64 != 0;
}}
"""


@needs_cc
def test_c_source_gives_the_same_bits_64_byte_aligned(tmp_path):
    (tmp_path / "edges.c").write_bytes(router_table.to_c(EDGES, "edges"))
    declaration = "extern const float edges[4][16];"
    (tmp_path / "main.c").write_text(PRINT_TABLE.format(declaration=declaration), encoding="ascii")
    run(CC, *STRICT, "edges.c", "main.c", "-o", "main", cwd=tmp_path)
    found = np.array(run("./main", cwd=tmp_path).split(), dtype=np.uint32).reshape(4, 16)
    assert found[:, :2].T.tolist() == EDGES.view(np.uint32).tolist()
    assert not found[:, 2:].any()


@needs_cc
def test_c_header_gives_the_same_bits_and_may_be_included_twice(tmp_path):
    (tmp_path / "edges.h").write_bytes(router_table.to_header(EDGES, "edges"))
    sizes = '_Static_assert(edges_n_experts == 2 && edges_hidden_size == 4 && edges_width == 16, "sizes");'
    declaration = f'#include "edges.h"\n#include "edges.h"\n{sizes}'
    (tmp_path / "main.c").write_text(PRINT_TABLE.format(declaration=declaration), encoding="ascii")
    run(CC, *STRICT, "main.c", "-o", "main", cwd=tmp_path)
    found = np.array(run("./main", cwd=tmp_path).split(), dtype=np.uint32).reshape(4, 16)
    assert found[:, :2].T.tolist() == EDGES.view(np.uint32).tolist()


@needs_cc
@pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump")
def test_c_source_is_external_and_read_only(tmp_path):
    (tmp_path / "table.c").write_bytes(router_table.to_c(GATE))
    run(CC, *STRICT, "-c", "table.c", "-o", "table.o", cwd=tmp_path)
    symbols = run("nm", "table.o", cwd=tmp_path)
    assert re.findall(r" ([A-Za-z]) (\w+)$", symbols, re.MULTILINE) == [
        ("R", "colibri_router_table"),
        ("R", "colibri_router_table_shape"),
    ]
    sections = run("objdump", "-h", "table.o", cwd=tmp_path)
    (alignment,) = re.findall(r"\.rodata .*\*\*(\d+)", sections)
    assert int(alignment) >= 6


def test_c_source_states_the_sizes():
    text = router_table.to_c(GATE).decode("ascii")
    assert "extern const float colibri_router_table[3][16];" in text
    assert "_Alignas(64) const float colibri_router_table[3][16] = {" in text
    assert "const int colibri_router_table_shape[3] = {5, 3, 16};" in text
