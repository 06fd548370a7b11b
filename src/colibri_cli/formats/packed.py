"""Packed expert files: a header of 64 bytes, then the weights as the kernels read them (docs/formats.md)."""

from __future__ import annotations

import math
import struct
import zlib
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from colibri_cli.errors import InvalidInput
from colibri_cli.formats.checked_file import CheckedFile
from colibri_cli.formats.experts import ExpertShape
from colibri_cli.formats.files import write_atomically

if TYPE_CHECKING:
    import os

MAGIC = b"CLBEXPRT"
DTYPES = ("float32", "bfloat16", "int8", "int4")  # by their codes in the header, as the kernels number them
ACTIVATIONS = ("relu", "relu2", "silu", "gelu", "gelu_tanh")
LARGEST_SIZE = 1 << 24  # hidden or intermediate

_VERSION = 1
_HEADER = struct.Struct("<8sIIIIBBBBfffQI12s")
HEADER_SIZE = _HEADER.size
_CHECKSUM = slice(48, 52)
_PANEL = 16  # outputs side by side
_CHUNK_INPUTS, _INT8_GROUP = 32, 64  # int4 has scales for each chunk, int8 for each group of them
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class PackedHeader:
    """What the header of a packed expert file says.

    Attributes
    ----------
    shape : ExpertShape
        ``alpha``, ``beta`` and ``limit`` are float32 values.
    biased : bool
        Whether both biases follow the weights; an absent one is zeros.
    """

    shape: ExpertShape
    biased: bool

    @property
    def payload_size(self) -> int:
        """Bytes behind the header."""
        shape = self.shape
        return payload_size(
            shape.hidden_size, shape.intermediate_size, gated=shape.gated, dtype=shape.dtype, biased=self.biased
        )

    @property
    def file_size(self) -> int:
        """Bytes of the whole file."""
        return HEADER_SIZE + self.payload_size

    def pack(self, checksum: int = 0) -> bytes:
        """Return the 64 bytes; the file's checksum is taken with 0 in its place."""
        shape = self.shape
        return _HEADER.pack(
            MAGIC,
            _VERSION,
            HEADER_SIZE,
            shape.hidden_size,
            shape.intermediate_size,
            DTYPES.index(shape.dtype),
            ACTIVATIONS.index(shape.activation),
            shape.gated,
            self.biased,
            shape.alpha,
            shape.beta,
            math.inf if shape.limit is None else shape.limit,
            self.payload_size,
            checksum,
            b"",
        )


def payload_size(hidden_size: int, intermediate_size: int, *, gated: bool, dtype: str, biased: bool) -> int:
    """Bytes of the panels up and down, of int4's bases, and of the biases."""
    halves = 2 if gated else 1
    n_up, n_down = -(-intermediate_size // _PANEL) * halves, -(-hidden_size // _PANEL)
    n_bytes = n_up * panel_size(dtype, hidden_size) + n_down * panel_size(dtype, intermediate_size)
    if dtype == "int4":
        n_bytes += 4 * (n_up + n_down)
    return n_bytes + (4 * (halves * intermediate_size + hidden_size) if biased else 0)


def panel_size(dtype: str, n_inputs: int) -> int:
    """Bytes of a panel: 16 outputs of so many inputs."""
    n_chunks, n_groups = -(-n_inputs // _CHUNK_INPUTS), -(-n_inputs // _INT8_GROUP)
    return {
        "float32": 4 * _PANEL * n_inputs,
        "bfloat16": 2 * _PANEL * n_inputs,
        "int8": n_chunks * _CHUNK_INPUTS * _PANEL + n_groups * 2 * _PANEL,
        "int4": n_chunks * (_CHUNK_INPUTS * _PANEL // 2 + 2 * _PANEL),
    }[dtype]


def write_packed(path: str | os.PathLike[str], header: PackedHeader, payload: memoryview) -> None:
    """Write a packed expert file, atomically; the parameters are those of :func:`packed_parts`.

    Raises
    ------
    InvalidInput
        The payload is not of the header's size.
    UsageError
        The file cannot be written; an old one is left in place.
    """
    write_atomically(path, packed_parts(header, payload))


def packed_parts(header: PackedHeader, payload: memoryview) -> tuple[bytes, memoryview]:
    """Return what a packed expert file consists of.

    Parameters
    ----------
    header : PackedHeader
    payload : memoryview
        Contiguous bytes: ``memoryview(expert)`` of a packed ``_core.Expert``.

    Raises
    ------
    InvalidInput
        The payload is not of the header's size.
    """
    if payload.nbytes != header.payload_size:
        raise InvalidInput(expected=f"a payload of {header.payload_size} bytes", got=str(payload.nbytes), at="payload")
    checksum = zlib.crc32(payload, zlib.crc32(header.pack()))
    return header.pack(checksum), payload


def header_for(shape: ExpertShape, file: CheckedFile) -> PackedHeader | None:
    """Check an expert's file against its layer, sizes alone; None: it is raw, which tells nothing of itself.

    Raises
    ------
    InvalidInput
        It is neither a sound packed file of that shape nor as long as a raw one.
    """
    if not is_packed(file):
        file.check_size(shape.n_bytes, shape.file)
        return None
    header = read_header(file)
    check_shape(header, shape, file.name)
    return header


def is_packed(file: CheckedFile) -> bool:
    """Tell by its first bytes whether a file is a packed expert, sound or not."""
    return file.size >= len(MAGIC) and file.read(0, len(MAGIC)) == MAGIC


def read_header(file: CheckedFile) -> PackedHeader:
    """Read and check a header, and the file's size against it; the checksum is `verify`'s.

    Raises
    ------
    InvalidInput
        A field is not as docs/formats.md has it, or contradicts another or the file's size.
    UsageError
        The file cannot be read.
    """
    header, _ = _read_header(file)
    return header


def check_shape(header: PackedHeader, shape: ExpertShape, name: str) -> None:
    """Refuse a packed expert of another shape than its layer's; ``shape``'s numbers are float32 values.

    Raises
    ------
    InvalidInput
        The first field that differs is named.
    """
    for field in fields(ExpertShape):
        wanted, found = getattr(shape, field.name), getattr(header.shape, field.name)
        if found != wanted:
            raise InvalidInput(expected=f"{field.name} {wanted}, as the layer has", got=f"{found}", at=name)


def verify(path: str | os.PathLike[str]) -> None:
    """Read a whole packed expert file and compare its checksum, in constant memory.

    Raises
    ------
    InvalidInput
        The header or the size is wrong, or the checksum differs.
    UsageError
        The file is missing or cannot be read.
    """
    with CheckedFile(path) as file:
        header, checksum = _read_header(file)
        found = zlib.crc32(header.pack())
        for at in range(HEADER_SIZE, file.size, _CHUNK):
            found = zlib.crc32(file.read(at, min(_CHUNK, file.size - at)), found)
        if found != checksum:
            raise InvalidInput(expected=f"CRC-32 {checksum:08x}", got=f"{found:08x}: the file is damaged", at=file.name)


def _read_header(file: CheckedFile) -> tuple[PackedHeader, int]:
    (magic, version, header_size, hidden, inter, dtype, activation, gated, biased, *numbers, size, checksum, rest) = (
        _HEADER.unpack(file.read(0, HEADER_SIZE))
    )
    alpha, beta, limit = numbers
    size_range = f"1 to {LARGEST_SIZE}"
    for field, sound, expected, found in (
        ("magic", magic == MAGIC, repr(MAGIC), repr(magic)),
        ("version", version == _VERSION, str(_VERSION), version),
        ("header_size", header_size == HEADER_SIZE, str(HEADER_SIZE), header_size),
        ("hidden_size", 1 <= hidden <= LARGEST_SIZE, size_range, hidden),
        ("intermediate_size", 1 <= inter <= LARGEST_SIZE, size_range, inter),
        ("dtype", dtype < len(DTYPES), f"0 to {len(DTYPES) - 1}", dtype),
        ("activation", activation < len(ACTIVATIONS), f"0 to {len(ACTIVATIONS) - 1}", activation),
        ("gated", gated <= 1, "0 or 1", gated),
        ("biased", biased <= 1, "0 or 1", biased),
        ("alpha", math.isfinite(alpha), "a finite number", alpha),
        ("beta", math.isfinite(beta), "a finite number", beta),
        ("limit", limit > 0, "a number above 0, or infinity", limit),
        ("reserved", not any(rest), "zeros", rest.hex()),
    ):
        if not sound:
            raise _wrong(file, field, expected, str(found))
    shape = ExpertShape(
        hidden,
        inter,
        ACTIVATIONS[activation],
        bool(gated),
        DTYPES[dtype],
        alpha,
        beta,
        None if limit == math.inf else limit,
    )
    header = PackedHeader(shape, bool(biased))
    if size != header.payload_size:
        raise _wrong(file, "payload_size", f"{header.payload_size}, as the other fields say", str(size))
    if file.size != header.file_size:
        raise InvalidInput(
            expected=f"{header.file_size} bytes, as the header says", got=f"{file.size} bytes", at=file.name
        )
    return header, checksum


def _wrong(file: CheckedFile, field: str, expected: str, found: str) -> InvalidInput:
    return InvalidInput(expected=f"{field} {expected}", got=found, at=file.name)
