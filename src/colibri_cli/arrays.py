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
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
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
