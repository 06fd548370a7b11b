"""Safetensors checkpoints: a length, a JSON header and one buffer without holes."""

from __future__ import annotations

import json
import math
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from colibri_cli.errors import InvalidInput
from colibri_cli.formats.tensor import (
    MAX_DIMENSIONS,
    MAX_INDEX_BYTES,
    MAX_NAME,
    MAX_TENSORS,
    Tensor,
    raw_dtype,
    shown,
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


def read(file: CheckedFile) -> list[Tensor]:
    """List the tensors of a safetensors file.

    Parameters
    ----------
    file : CheckedFile
        Stays open while tensors are read.

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
    tensors: list[Tensor] = []
    spans: list[tuple[int, int, str]] = []
    for name, entry in _header(file, length).items():
        if name == "__metadata__":
            continue
        at = f"{file.name}: {shown(name)}"
        code, shape, begin, end = _entry(name, entry, at)
        size, odd_bits = divmod(math.prod(shape) * _BITS[code], 8)
        if odd_bits or end - begin != size:
            expected = f"{math.prod(shape) * _BITS[code] / 8:g} bytes for {code} {list(shape)}"
            raise InvalidInput(expected=expected, got=f"{end - begin} bytes", at=f"{at}.data_offsets")
        spans.append((begin, end, at))
        read = partial(_read, file, start + begin, shape, code)
        tensors.append(Tensor(name, shape, _FLOATING.get(code, code.lower()), read))

    position = 0
    for begin, end, at in sorted(spans):
        if begin != position:
            expected = f"offset {position}, where the tensor before ends"
            raise InvalidInput(expected=expected, got=f"offset {begin}", at=f"{at}.data_offsets")
        position = end
    if start + position != file.size:
        raise InvalidInput(expected=f"a file of {start + position} bytes", got=f"{file.size} bytes", at=file.name)
    return tensors


def _header(file: CheckedFile, length: int) -> dict[str, object]:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        members = dict(pairs)
        if len(members) != len(pairs):
            (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
            raise InvalidInput(expected="each key once", got=f"{shown(twice)} twice", at=f"{file.name}: header")
        return members

    try:
        header = json.loads(file.read(8, length).decode(), object_pairs_hook=unique)
    except InvalidInput:
        raise
    except (ValueError, RecursionError) as error:  # ValueError: also text that is not UTF-8
        raise InvalidInput(expected="a header in JSON", got=shown(str(error)), at=f"{file.name}: header") from error
    if not isinstance(header, dict):
        got = f"a {type(header).__name__}"
        raise InvalidInput(expected="a JSON object", got=got, at=f"{file.name}: header")
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


def _read(file: CheckedFile, offset: int, shape: tuple[int, ...], code: str) -> npt.NDArray[np.float32]:
    data = file.read(offset, math.prod(shape) * _BITS[code] // 8)
    dtype = _FLOATING[code]
    return to_float32(np.frombuffer(data, raw_dtype(dtype)).reshape(shape), dtype)
