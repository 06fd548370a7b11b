"""NumPy's .npy and .npz files; their headers are parsed by numpy, their sizes checked here."""

from __future__ import annotations

import math
import tokenize
import warnings
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np

from colibri_cli.errors import InvalidInput
from colibri_cli.formats.tensor import (
    MAX_DIMENSIONS,
    MAX_NAME,
    MAX_TENSORS,
    Tensor,
    shown,
    shown_shape,
    to_float32,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from colibri_cli.formats.archive import Archive
    from colibri_cli.formats.checked_file import CheckedFile

MAGIC = np.lib.format.MAGIC_PREFIX
_HEAD = 1 << 14  # numpy itself refuses headers above 10,000 characters
_HEADER_ERRORS = (ValueError, TypeError, SyntaxError, RecursionError, MemoryError, tokenize.TokenError)


def read_npy(file: CheckedFile) -> list[Tensor]:
    """List the one, nameless tensor of a .npy file.

    Raises
    ------
    InvalidInput
        A damaged header, an array of Python objects, or another size than the header states.
    """
    head = file.read(0, min(file.size, _HEAD))
    return [_tensor("", head, file.size, file.read, at=file.name)]


def read_npz(file: CheckedFile, archive: Archive) -> list[Tensor]:
    """List the tensors of a .npz file, stored or compressed.

    Raises
    ------
    InvalidInput
        As `read_npy`; or a member that is no .npy file.
    """
    names = archive.names()
    if len(names) > MAX_TENSORS:
        raise InvalidInput(expected=f"at most {MAX_TENSORS} tensors", got=f"{len(names)}", at=file.name)
    tensors = []
    for name in names:
        at = f"{file.name}: {shown(name)}"
        if not name.endswith(".npy") or len(name) > MAX_NAME:
            raise InvalidInput(expected="members with names ending in .npy", got="another one", at=at)

        def read(offset: int, size: int, name: str = name) -> bytes:
            return archive.read(name, offset + size)[offset:]

        head = archive.head(name, _HEAD)
        tensors.append(_tensor(name.removesuffix(".npy"), head, archive.size(name), read, at=at))
    return tensors


def _tensor(name: str, head: bytes, file_size: int, read: Callable[[int, int], bytes], *, at: str) -> Tensor:
    """Describe an array from the first bytes of its file; ``read(offset, size)`` gets its values."""
    stream = BytesIO(head)
    try:
        with warnings.catch_warnings(action="ignore"):  # that Python 2 wrote the file, odd escapes
            shape, fortran_order, dtype = _header(stream)
    except _HEADER_ERRORS as error:
        got = shown(str(error).partition("\n")[0])
        raise InvalidInput(expected="a .npy header", got=got, at=at) from error
    if dtype.hasobject:
        raise InvalidInput(expected="an array of numbers", got="one of pickled Python objects", at=at)
    if len(shape) > MAX_DIMENSIONS or not all(type(size) is int and 0 <= size < 1 << 63 for size in shape):
        raise InvalidInput(expected="a shape of sizes", got=shown(repr(shape)), at=at)
    start = stream.tell()
    size = math.prod(shape) * dtype.itemsize
    if start + size != file_size:
        raise InvalidInput(
            expected=f"{start + size} bytes ({start} of header, then {dtype.name} {shown_shape(shape)})",
            got=f"{file_size} bytes",
            at=at,
        )
    return Tensor(name, shape, dtype.name, partial(_read, read, start, size, shape, dtype, fortran_order))


def _header(stream: BytesIO) -> tuple[tuple[int, ...], bool, np.dtype[np.generic]]:
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(stream)
    if version in ((2, 0), (3, 0)):  # 2.0 has a longer length; 3.0 adds names of fields, which no tensor has
        return np.lib.format.read_array_header_2_0(stream)
    raise ValueError(f"version {version[0]}.{version[1]}")


def _read(
    read: Callable[[int, int], bytes],
    start: int,
    size: int,
    shape: tuple[int, ...],
    dtype: np.dtype[np.generic],
    fortran_order: bool,
) -> npt.NDArray[np.float32]:
    values = np.frombuffer(read(start, size), dtype)
    return to_float32(values.reshape(shape, order="F" if fortran_order else "C"), dtype.name)
