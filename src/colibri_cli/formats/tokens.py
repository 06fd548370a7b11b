"""Token files (``.bin``): raw little-endian int32 ids, no header."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from colibri_cli.errors import InvalidInput
from colibri_cli.formats.files import write_atomically
from colibri_cli.formats.inputs import describe, read_input

if TYPE_CHECKING:
    import os

    from numpy.typing import ArrayLike, NDArray

_ID_BYTES = 4
_NPY_MAGIC = b"\x93NUMPY"


def read_tokens(path: str | os.PathLike[str]) -> NDArray[np.int32]:
    """Read token ids from a file, or from standard input when ``path`` is ``-``.

    Parameters
    ----------
    path : path-like or "-"
        Raw little-endian int32; an empty file holds no ids.

    Returns
    -------
    ndarray, int32, shape (n_tokens,)
        As they stand in the file; whether they are in the vocabulary is for the model to say.

    Raises
    ------
    UsageError
        The file is missing or cannot be read.
    InvalidInput
        The size is no multiple of 4 bytes or over 1 GiB, or the bytes are plainly of another format.
    """
    return tokens_from_bytes(read_input(path), at=describe(path))


def tokens_from_bytes(data: bytes, *, at: str) -> NDArray[np.int32]:
    """Take token ids out of the bytes of a token file; ``at`` names it in messages."""
    if data.startswith(_NPY_MAGIC):
        hint = "numpy.load(file).astype('<i4').tofile('input.bin') writes the raw ids"
        raise InvalidInput(expected="raw int32 token ids", got="an .npy file", at=at, hint=hint)
    if len(data) % _ID_BYTES:
        hint = "text becomes ids with `colibri tokenize`"
        raise InvalidInput(expected="a multiple of 4 bytes", got=f"{len(data)} bytes", at=at, hint=hint)
    ids = np.frombuffer(data, dtype="<i4").astype(np.int32)
    # Ids below 65,536 stored the wrong way round all end in two zero bytes; real ids practically never do.
    if ids.any() and not (ids & 0xFFFF).any():
        raise InvalidInput(expected="little-endian int32 token ids", got="big-endian ones", at=at)
    return ids


def tokens_to_bytes(ids: ArrayLike) -> bytes:
    """Give the bytes of a token file.

    Raises
    ------
    InvalidInput
        ``ids`` is not one-dimensional, not integer, or holds a value outside int32.
    """
    array = np.asarray(ids)
    if array.size == 0 and array.ndim == 1:
        return b""
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidInput(
            expected="a one-dimensional array of integer ids",
            got=f"{array.dtype} of shape {array.shape}",
            at="ids",
        )
    narrow = array.astype("<i4")
    wrong = np.flatnonzero(narrow != array)
    if wrong.size:
        raise InvalidInput(expected="ids that fit in int32", got=str(array[wrong[0]]), at=f"ids[{wrong[0]}]")
    return narrow.tobytes()


def write_tokens(path: str | os.PathLike[str], ids: ArrayLike) -> None:
    """Write token ids to a file, atomically.

    Parameters
    ----------
    path : path-like
    ids : array_like of int, shape (n_tokens,)

    Raises
    ------
    InvalidInput
        As `tokens_to_bytes`.
    UsageError
        The file cannot be written.
    """
    write_atomically(path, tokens_to_bytes(ids))
