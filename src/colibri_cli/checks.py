"""Checks of the single values that a caller passes."""

from __future__ import annotations

import math
import reprlib
import struct
from numbers import Integral
from typing import TYPE_CHECKING

from colibri_cli.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Iterable


def check_integer(name: str, value: object, low: int, high: int) -> int:
    """Return ``value`` as an int if it is an integer in ``low..high``.

    Raises
    ------
    InvalidInput
        It is not.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        raise InvalidInput(expected=f"an integer in {low}..{high}", got=shown(value), at=name)
    return int(value)


def check_float(name: str, value: object, *, least: float) -> float:
    """Return ``value`` as a float if it is finite and at least ``least``.

    Raises
    ------
    InvalidInput
        It is not.
    """
    try:
        number = float(value)  # type: ignore[arg-type]  # what it does not take, it refuses
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(value, str | bytes) or not (math.isfinite(number) and number >= least):
        raise InvalidInput(expected=f"a number of at least {least:g}", got=shown(value), at=name)
    return number


def check_float32(name: str, value: float, *, above: float = -math.inf) -> float:
    """Return ``value``, rounded to float32, if that is finite and greater than ``above``.

    Raises
    ------
    InvalidInput
        It is not.
    """
    try:
        narrow: float = struct.unpack("<f", struct.pack("<f", value))[0]
    except (OverflowError, TypeError, struct.error):
        narrow = math.nan
    if not (math.isfinite(narrow) and narrow > above):
        bound = "" if above == -math.inf else f" above {above:g}"
        raise InvalidInput(expected=f"a finite float32{bound}", got=shown(value), at=name)
    return narrow


def check_choice(name: str, value: object, choices: Iterable[str]) -> str:
    """Return ``value`` if it is one of the words in ``choices``.

    Raises
    ------
    InvalidInput
        It is not.
    """
    words = tuple(choices)
    if not isinstance(value, str) or value not in words:
        raise InvalidInput(expected=f"one of {', '.join(words)}", got=shown(value), at=name)
    return value


def check_kind(name: str, value: object, kind: type) -> None:
    """Refuse a value that is not an object of the class.

    Raises
    ------
    InvalidInput
        It is not.
    """
    if not isinstance(value, kind):
        raise InvalidInput(expected=f"an object of {kind.__name__}", got=shown(value), at=name)


def shown(value: object) -> str:
    """Say what a value is in a few words, whatever it is."""
    try:
        return reprlib.repr(value)
    except ValueError:  # an integer of thousands of digits
        return f"a very large {type(value).__name__}"
