"""A gate as a constant table: C source, C header, mapped blob, .npy.

In C and in the blob the table is ``[hidden_size][width]``: one row a hidden feature, experts side by side,
padded with zeros to `WIDTH_STEP` so that a row is whole cache lines. The bytes depend on the weights (and in
C on the symbol's name) alone.
"""

from __future__ import annotations

import re
import struct
import zlib
from typing import TYPE_CHECKING

import numpy as np

from colibri_cli.errors import InvalidInput, UsageError
from colibri_cli.formats.checked_file import CheckedFile

if TYPE_CHECKING:
    import os

    import numpy.typing as npt

WIDTH_STEP = 16
MAX_EXPERTS = 1024
"""The most that a router chooses from: colibri.h's CLB_MAX_EXPERTS."""
MAX_TABLE = 1 << 24
"""Largest table, in values: 64 MiB of float32."""

DEFAULT_NAME = "colibri_router_table"
MAGIC = b"CLBROUTE"

_VERSION = 1
_FLOAT32 = 1
_HEADER = struct.Struct("<8sIIIIIIQI20s")
_CHECKSUM = slice(40, 44)

# Keywords of C11, C23 and GNU C; `main` cannot be an object.
_RESERVED = re.compile(
    "alignas|alignof|asm|auto|bool|break|case|char|const|constexpr|continue|default|do|double|else|enum|extern"
    "|false|float|for|goto|if|inline|int|long|main|nullptr|register|restrict|return|short|signed|sizeof|static"
    "|static_assert|struct|switch|thread_local|true|typedef|typeof|typeof_unqual|union|unsigned|void|volatile"
    "|while"
)


def width_of(n_experts: int) -> int:
    """Return the row length of a table: ``n_experts`` rounded up to a multiple of `WIDTH_STEP`."""
    return -(-n_experts // WIDTH_STEP) * WIDTH_STEP


def check_size(n_experts: int, hidden_size: int, *, at: str) -> None:
    """Refuse a gate that is empty, that no router takes, or whose table is beyond `MAX_TABLE`.

    Raises
    ------
    InvalidInput
    """
    if not 1 <= n_experts <= MAX_EXPERTS or hidden_size < 1 or width_of(n_experts) * hidden_size > MAX_TABLE:
        raise InvalidInput(
            expected=f"1 to {MAX_EXPERTS} experts and at least one feature, in a table of at most {MAX_TABLE} values",
            got=f"{n_experts} experts, hidden size {hidden_size}",
            at=at,
        )


def check_name(name: str) -> None:
    """Refuse what C does not accept as the name of an external object.

    Raises
    ------
    UsageError
    """
    # Names that begin with an underscore belong to the compiler and its library.
    if not re.fullmatch("[A-Za-z][A-Za-z0-9_]{0,62}", name) or _RESERVED.fullmatch(name):
        raise UsageError(
            expected="a C identifier of at most 63 characters, no keyword, no underscore in front",
            got=repr(name),
            at="--name",
        )


def to_c(gate: npt.NDArray[np.float32], name: str = DEFAULT_NAME) -> bytes:
    """Write a gate as C11 source with one external, read-only, 64-byte-aligned table.

    ``<name>_shape`` follows it, for code that is linked to a table it did not see: n_experts, hidden_size,
    width.

    Parameters
    ----------
    gate : float32 ndarray of shape (n_experts, hidden_size)
        Finite.
    name : str
        Checked by `check_name`.
    """
    n_experts, hidden_size = gate.shape
    width = width_of(n_experts)
    return (
        f"{_title(gate)}\n"
        f"extern const float {name}[{hidden_size}][{width}];\n"
        f"extern const int {name}_shape[3]; /* n_experts, hidden_size, width */\n\n"
        f"const int {name}_shape[3] = {{{n_experts}, {hidden_size}, {width}}};\n\n"
        f"_Alignas(64) const float {name}[{hidden_size}][{width}] = {_initializer(gate)};\n"
    ).encode("ascii")


def to_header(gate: npt.NDArray[np.float32], name: str = DEFAULT_NAME) -> bytes:
    """Write a gate as a C11 header with a ``static const`` table and its sizes as enumerators.

    Parameters
    ----------
    gate, name
        As for `to_c`.
    """
    n_experts, hidden_size = gate.shape
    width = width_of(n_experts)
    return (
        f"{_title(gate)}\n"
        f"#ifndef {name}_INCLUDED\n#define {name}_INCLUDED\n\n"
        f"enum {{ {name}_n_experts = {n_experts}, {name}_hidden_size = {hidden_size}, "
        f"{name}_width = {width} }};\n\n"
        f"static _Alignas(64) const float {name}[{hidden_size}][{width}] = {_initializer(gate)};\n\n"
        f"#endif\n"
    ).encode("ascii")


def to_npy(gate: npt.NDArray[np.float32]) -> bytes:
    """Write a gate as a .npy file, float32 ``[n_experts, hidden_size]``.

    By hand, since the padding of numpy's own header has changed between its releases.
    """
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {gate.shape}, }}"
    text += " " * (-(len(text) + 11) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode("ascii") + _little(gate)


def to_blob(gate: npt.NDArray[np.float32]) -> bytes:
    """Write a gate as a blob that can be mapped: a header of 64 bytes, then the table.

    Parameters
    ----------
    gate : float32 ndarray of shape (n_experts, hidden_size)
    """
    n_experts, hidden_size = gate.shape
    payload = _little(_table(gate))
    fields = (
        MAGIC,
        _VERSION,
        _HEADER.size,
        n_experts,
        hidden_size,
        width_of(n_experts),
        _FLOAT32,
        len(payload),
    )
    checksum = zlib.crc32(payload, zlib.crc32(_HEADER.pack(*fields, 0, b"")))
    return _HEADER.pack(*fields, checksum, b"") + payload


def read_blob(path: str | os.PathLike[str]) -> npt.NDArray[np.float32]:
    """Read a blob that `to_blob` wrote.

    Returns
    -------
    float32 ndarray of shape (n_experts, hidden_size)

    Raises
    ------
    UsageError
        The file is missing or cannot be read.
    InvalidInput
        Another format or version, sizes that contradict each other or the file, or damage.
    """
    with CheckedFile(path) as file:
        return gate_of_blob(file)


def gate_of_blob(file: CheckedFile) -> npt.NDArray[np.float32]:
    """Do what `read_blob` does with a file that is open already."""
    header = file.read(0, _HEADER.size)
    magic, version, start, n_experts, hidden_size, width, dtype, size, checksum, rest = _HEADER.unpack(header)
    at = file.name
    if magic != MAGIC:
        raise InvalidInput(expected="a router blob", got=f"magic {magic!r}", at=at)
    if (version, start, dtype) != (_VERSION, _HEADER.size, _FLOAT32) or any(rest):
        expected = f"version {_VERSION} (a header of {_HEADER.size} bytes, float32, zeros behind the checksum)"
        got = f"version {version}, a header of {start} bytes, dtype {dtype}"
        raise InvalidInput(expected=expected, got=got, at=at)
    check_size(n_experts, hidden_size, at=at)
    wanted = 4 * hidden_size * width_of(n_experts)
    if width != width_of(n_experts) or size != wanted or file.size != start + size:
        raise InvalidInput(
            expected=f"width {width_of(n_experts)} and {wanted} bytes of table",
            got=f"width {width}, a table of {size} bytes and a file of {file.size}",
            at=at,
        )
    payload = file.read(start, size)
    found = zlib.crc32(payload, zlib.crc32(header[: _CHECKSUM.start] + bytes(4) + header[_CHECKSUM.stop :]))
    if found != checksum:
        raise InvalidInput(expected=f"CRC-32 {checksum:08x}", got=f"{found:08x}: the file is damaged", at=at)
    table = np.frombuffer(payload, "<f4").reshape(hidden_size, width)
    if table[:, n_experts:].any():
        raise InvalidInput(expected="zeros behind the last expert", got="other values", at=at)
    return np.ascontiguousarray(table[:, :n_experts].T, dtype=np.float32)


def _table(gate: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    n_experts, hidden_size = gate.shape
    table = np.zeros((hidden_size, width_of(n_experts)), np.float32)
    table[:, :n_experts] = gate.T
    return table


def _little(values: npt.NDArray[np.float32]) -> bytes:
    return values.astype("<f4", copy=False).tobytes()


def _title(gate: npt.NDArray[np.float32]) -> str:
    n_experts, hidden_size = gate.shape
    width = width_of(n_experts)
    return (
        f"/* Router table: {n_experts} experts, padded with zeros to {width}; hidden size {hidden_size}.\n"
        f"   Written by colibri gen-router: change the weights, not this file. */"
    )


def _initializer(gate: npt.NDArray[np.float32]) -> str:
    rows = []
    for row in _table(gate).tolist():
        values = [_literal(value) for value in row]
        lines = [", ".join(values[start : start + 8]) for start in range(0, len(values), 8)]
        rows.append("    {" + ",\n     ".join(lines) + "}")
    return "{\n" + ",\n".join(rows) + "\n}"


def _literal(value: float) -> str:
    """Return the exact value as a hexadecimal float constant of C: every compiler reads the same bits."""
    mantissa, exponent = value.hex().split("p")
    return f"{mantissa.rstrip('0').rstrip('.')}p{exponent}f"
