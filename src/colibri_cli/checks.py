"""Checks of single numbers that a caller passes."""

from __future__ import annotations

import math
import struct
from numbers import Integral

from colibri_cli.errors import InvalidInput


def check_integer(name: str, value: object, low: int, high: int) -> int:
    """Return ``value`` as an int if it is an integer in ``low..high``.

    Raises
    ------
    InvalidInput
        It is not.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        raise InvalidInput(expected=f"an integer in {low}..{high}", got=repr(value), at=name)
    return int(value)


def check_float32(name: str, value: float, *, above: float = -math.inf) -> float:
    """Return ``value``, rounded to float32, if that is finite and greater than ``above``.

    Raises
    ------
    InvalidInput
        It is not.
    """
    try:
        narrow: float = struct.unpack("<f", struct.pack("<f", value))[0]
    except (OverflowError, struct.error):
        narrow = math.nan
    if not (math.isfinite(narrow) and narrow > above):
        bound = "" if above == -math.inf else f" above {above:g}"
        raise InvalidInput(expected=f"a finite float32{bound}", got=repr(value), at=name)
    return narrow
