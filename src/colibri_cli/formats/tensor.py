"""What every checkpoint reader returns: tensors that are described but not read yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

MAX_INDEX_BYTES = 1 << 25
"""Largest index (a pickle, a JSON header) that is read: room for some 100,000 tensors."""

MAX_TENSORS = 1 << 18
MAX_DIMENSIONS = 64
MAX_NAME = 1024

# Little-endian dtype in which the bits of each floating type are read.
_RAW = {"float64": "<f8", "float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor in a file.

    Attributes
    ----------
    name : str
        Dotted path inside the file; empty when the file holds one nameless tensor.
    shape : tuple of int
    dtype : str
        ``"float32"``, ``"bfloat16"``, ``"int64"``, ...
    read : callable
        Reads the values as float32 of that shape; valid for the dtypes of `is_floating`. The caller
        checks the shape first: views may be far larger than the file.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], npt.NDArray[np.float32]]


def is_floating(dtype: str) -> bool:
    """Tell whether `to_float32` converts this dtype."""
    return dtype in _RAW


def raw_dtype(dtype: str, *, big_endian: bool = False) -> np.dtype[np.generic]:
    """Return the numpy dtype that holds the bits of a floating dtype."""
    raw: np.dtype[np.generic] = np.dtype(_RAW[dtype])
    return raw.newbyteorder(">") if big_endian else raw


def to_float32(raw: npt.NDArray[np.generic], dtype: str) -> npt.NDArray[np.float32]:
    """Convert bits read with `raw_dtype` to float32.

    float64 is rounded to nearest, ties to even; what is beyond float32 becomes infinite.
    """
    if dtype == "bfloat16":
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # infinities and NaNs are the caller's to refuse
        return raw.astype(np.float32)


def shown(name: str) -> str:
    """Return a name from a file as it is safe to print: short, one line, no control characters."""
    if len(name) > 120:
        name = f"{name[:117]}..."
    return name if name.isascii() and name.isprintable() else ascii(name)[1:-1]


def shown_shape(shape: tuple[int, ...]) -> str:
    """Return ``[8, 128]``."""
    return f"[{', '.join(map(str, shape))}]"
