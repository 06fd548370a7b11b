"""Arrays of trained weights: float32, float16, or bfloat16 as its bits in uint16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from colibri_cli.arrays import as_array, unreadable
from colibri_cli.dlpack import bfloat16_bits
from colibri_cli.errors import InvalidInput

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Weights:
    """An array, and what its elements are.

    Attributes
    ----------
    name : str
        For messages.
    array : ndarray of float32, float16, or uint16 for bfloat16
    dtype : {"float32", "bfloat16", "float16"}
    shared : bool
        Whether it is somebody else's memory, and not a copy made on the way here.
    """

    name: str
    array: npt.NDArray[Any]
    dtype: str
    shared: bool

    def float32(self, index: int) -> npt.NDArray[np.float32]:
        """Return the values at an index of the first dimension, exact and aligned; a view where they are that."""
        values: npt.NDArray[np.float32]
        array = self.array[index]
        if self.dtype == "bfloat16":
            values = np.left_shift(array, 16, dtype=np.uint32).view(np.float32)
        elif self.dtype == "float16":
            values = array.astype(np.float32)
        elif array.flags.aligned and all(stride % array.itemsize == 0 for stride in array.strides):
            values = array
        else:
            values = array.copy()
        return values


def as_weights(name: str, value: object, shape: tuple[int, ...] | None = None) -> Weights:
    """View ``value`` without a copy where it exports its memory.

    Parameters
    ----------
    name : str
    value
        A buffer, a CPU DLPack tensor, an ml_dtypes array, or weights; a list becomes a new array.
    shape : tuple of int, optional
        What it must be; default: any three dimensions.

    Raises
    ------
    InvalidInput
        It is no array in CPU memory, or of another dtype or shape.
    """
    if isinstance(value, Weights):
        array, dtype = value.array, value.dtype
    else:
        array, dtype = _view(name, value)
    if dtype not in DTYPES or (array.ndim != 3 if shape is None else array.shape != shape):
        raise InvalidInput(
            expected=f"{', '.join(DTYPES[:-1])} or {DTYPES[-1]}, {'3 dimensions' if shape is None else shape}",
            got=f"{dtype} {array.shape}",
            at=name,
        )
    return Weights(name, array, dtype, value.shared if isinstance(value, Weights) else _exports(value))


def _view(name: str, value: object) -> tuple[npt.NDArray[Any], str]:
    if not isinstance(value, np.ndarray) and hasattr(value, "__dlpack__"):
        try:
            bits = bfloat16_bits(value)
        except (AttributeError, TypeError, ValueError, BufferError, RuntimeError) as error:
            raise unreadable(name, value, error) from error
        if bits is not None:
            return bits, "bfloat16"
    array = as_array(name, value)
    if array.dtype.name == "bfloat16":  # ml_dtypes' own type, whose elements are 16 bits
        return array.view(np.uint16), "bfloat16"
    return array, str(array.dtype)


def _exports(value: object) -> bool:
    if isinstance(value, np.ndarray) or hasattr(value, "__dlpack__"):
        return True
    try:
        memoryview(value).release()  # type: ignore[arg-type]  # what exports no buffer is refused
    except TypeError:
        return False
    return True
