"""Anything with the buffer protocol or CPU DLPack is an array."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from colibri_cli.errors import InvalidInput


def as_array(name: str, value: object) -> npt.NDArray[Any]:
    """View ``value`` as an array without a copy where it exports one; lists become new arrays.

    Raises
    ------
    InvalidInput
        It is no array, or its memory is not the CPU's.
    """
    try:
        if not isinstance(value, np.ndarray) and hasattr(value, "__dlpack__"):
            return np.from_dlpack(value)
        return np.asarray(value)
    except (AttributeError, TypeError, ValueError, BufferError, RuntimeError) as error:
        raise unreadable(name, value, error) from error


def unreadable(name: str, value: object, error: Exception) -> InvalidInput:
    """Say why a value's memory cannot be read."""
    kind = type(value).__name__ + (f" of {value.dtype}" if hasattr(value, "dtype") else "")
    return InvalidInput(
        expected="an array in CPU memory",
        got=f"{kind} ({error})",
        at=name,
        hint="pass its .detach(): weights are only read" if getattr(value, "requires_grad", False) is True else None,
    )


def finite_float32(name: str, value: object, ndim: int) -> npt.NDArray[np.float32]:
    """View ``value`` as a C-contiguous array of finite float32 numbers, with a copy only where it is not contiguous.

    Raises
    ------
    InvalidInput
        It is of another type or number of dimensions, or the first element that is not finite is named.
    """
    a = as_array(name, value)
    if a.dtype != np.float32 or a.ndim != ndim:
        raise InvalidInput(
            expected=f"float32 with {ndim} dimension{'s' * (ndim > 1)}", got=f"{a.dtype} {a.shape}", at=name
        )
    if not np.isfinite(a).all():
        where = np.argwhere(~np.isfinite(a))[0].tolist()
        raise InvalidInput(expected="finite weights", got=str(a[tuple(where)]), at=f"{name}{where}")
    return np.ascontiguousarray(a)
