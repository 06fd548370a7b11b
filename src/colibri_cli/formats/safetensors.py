"""Safetensors checkpoints: a length, a JSON header and one buffer without holes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from colibri_cli.errors import InvalidInput
from colibri_cli.formats.json_objects import read_object
from colibri_cli.formats.tensor import (
    MAX_DIMENSIONS,
    MAX_INDEX_BYTES,
    MAX_NAME,
    MAX_TENSORS,
    Tensor,
    raw_dtype,
    shown,
    shown_shape,
    to_float32,
)

if TYPE_CHECKING:
    import numpy.typing as npt

    from colibri_cli.formats.checked_file import CheckedFile

_FLOATING = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_BITS = {
    **dict.fromkeys(["C64", "F64", "I64", "U64"], 64),
    **dict.fromkeys(["F32", "I32", "U32"], 32),
    **dict.fromkeys(["F16", "BF16", "I16", "U16"], 16),
    **dict.fromkeys(["BOOL", "I8", "U8", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ", "F8_E8M0"], 8),
    **dict.fromkeys(["F6_E2M3", "F6_E3M2"], 6),
    "F4": 4,
}


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a tensor lies in a file.

    Attributes
    ----------
    code : str
        The format's name for the dtype: ``"F32"``, ``"BF16"``, ``"F8_E4M3"``, ...
    shape : tuple of int
    begin, end : int
        Offsets of its bytes from the start of the file.
    """

    code: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def n_bytes(self) -> int:
        """Size of its bytes."""
        return self.end - self.begin


def read(file: CheckedFile) -> list[Tensor]:
    """List the tensors of a safetensors file.

    Parameters
    ----------
    file : CheckedFile
        Stays open while tensors are read.

    Raises
    ------
    InvalidInput
        As `entries`.
    """
    return [
        Tensor(name, entry.shape, _FLOATING.get(entry.code, entry.code.lower()), partial(_read, file, entry))
        for name, entry in entries(file).items()
    ]


def entries(file: CheckedFile) -> dict[str, Entry]:
    """Say where each tensor of a safetensors file lies; only the header is read.

    Raises
    ------
    InvalidInput
        The header is damaged or huge, names a tensor twice, or describes sizes and offsets that do not
        fill the buffer exactly.
    """
    length = int.from_bytes(file.read(0, 8), "little")
    if not 2 <= length <= min(file.size - 8, MAX_INDEX_BYTES):
        raise InvalidInput(
            expected=f"a header of 2 to {min(file.size - 8, MAX_INDEX_BYTES)} bytes",
            got=f"{length} bytes",
            at=f"{file.name}: its first 8 bytes",
        )
    start = 8 + length
    found: dict[str, Entry] = {}
    for name, member in _header(file, length).items():
        if name == "__metadata__":
            continue
        at = f"{file.name}: {shown(name)}"
        code, shape, begin, end = _entry(name, member, at)
        size, odd_bits = divmod(math.prod(shape) * _BITS[code], 8)
        if odd_bits or end - begin != size:
            needed = f"{size + odd_bits / 8:g} bytes" if size < 1 << 1000 else "more bytes than there are"
            expected = f"{needed} for {code} {shown_shape(shape)}"
            raise InvalidInput(expected=expected, got=f"{end - begin} bytes", at=f"{at}.data_offsets")
        found[name] = Entry(code, shape, start + begin, start + end)

    position = start
    for name, entry in sorted(found.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            expected = f"offset {position - start}, where the tensor before ends"
            at = f"{file.name}: {shown(name)}.data_offsets"
            raise InvalidInput(expected=expected, got=f"offset {entry.begin - start}", at=at)
        position = entry.end
    if position != file.size:
        raise InvalidInput(expected=f"a file of {position} bytes", got=f"{file.size} bytes", at=file.name)
    return found


def _header(file: CheckedFile, length: int) -> dict[str, object]:
    header = read_object(file.read(8, length), f"{file.name}: header", "a header in JSON")
    if len(header) > MAX_TENSORS:
        got = f"{len(header)}"
        raise InvalidInput(expected=f"at most {MAX_TENSORS} tensors", got=got, at=f"{file.name}: header")
    return header


def _entry(name: str, entry: object, at: str) -> tuple[str, tuple[int, ...], int, int]:
    """Return dtype code, shape, begin and end of a tensor, each of the right type and range."""
    if len(name) > MAX_NAME:
        got = f"{len(name)}"
        raise InvalidInput(expected=f"a name of at most {MAX_NAME} characters", got=got, at=at)
    match entry:
        case {"dtype": str(code), "shape": [*sizes], "data_offsets": [begin, end], **rest} if not rest:
            numbers = [*sizes, begin, end] if len(sizes) <= MAX_DIMENSIONS else [None]
            if all(type(number) is int and 0 <= number < 1 << 63 for number in numbers) and begin <= end:
                if code in _BITS:
                    return code, tuple(sizes), begin, end
                expected = f"a dtype of {', '.join(_BITS)}"
                raise InvalidInput(expected=expected, got=shown(code), at=f"{at}.dtype")
    raise InvalidInput(expected="dtype, shape and data_offsets of a tensor", got="something else", at=at)


def _read(file: CheckedFile, entry: Entry) -> npt.NDArray[np.float32]:
    data = file.read(entry.begin, entry.n_bytes)
    dtype = _FLOATING[entry.code]
    return to_float32(np.frombuffer(data, raw_dtype(dtype)).reshape(entry.shape), dtype)
