"""Reading config.json: values of the right type and range, or an error that names the key."""

from __future__ import annotations

import math
from dataclasses import dataclass

from colibri_cli.errors import InvalidInput
from colibri_cli.formats.tensor import shown


@dataclass(frozen=True, slots=True)
class Key:
    """A setting that config.json gives.

    Attributes
    ----------
    names : str or tuple of str
        What models call it; those that are there must agree.
    default : object
        What transformers takes where none is there; None: it must be there.
    null : object
        What transformers makes of ``null``; None: refused.
    """

    names: str | tuple[str, ...]
    default: bool | int | float | str | None = None
    null: bool | int | float | None = None

    @property
    def all_names(self) -> tuple[str, ...]:
        """The names, whether one or several."""
        return (self.names,) if isinstance(self.names, str) else self.names


class Settings:
    """The members of config.json that describe the text model.

    Parameters
    ----------
    members : dict
    at : str
        Where they are, for messages: a path, and the member that holds them.
    """

    def __init__(self, members: dict[str, object], at: str) -> None:
        self._members = members
        self.at = at

    def where(self, name: str) -> str:
        """Name the place of a setting."""
        return f"{self.at}.{name}"

    def get(self, name: str) -> object:
        """Return a member as it is; None where there is none."""
        return self._members.get(name)

    def integer(self, key: Key, low: int, high: int) -> int:
        """Return an integer in ``low..high``.

        Raises
        ------
        InvalidInput
            It is missing, or something else.
        """
        name, value = self._find(key)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int or not low <= value <= high:
            raise self._refused(name, f"an integer in {low}..{high}", value)
        return value

    def number(self, key: Key) -> float:
        """Return a finite number.

        Raises
        ------
        InvalidInput
            It is missing, or something else.
        """
        name, value = self._find(key)
        if type(value) not in (int, float) or not abs(value) < math.inf:  # type: ignore[arg-type]  # a number
            raise self._refused(name, "a finite number", value)
        try:
            return float(value)  # type: ignore[arg-type]  # a number
        except OverflowError as error:
            raise self._refused(name, "a finite number", value) from error

    def boolean(self, key: Key) -> bool:
        """Return true or false; ``null`` is false, as in Python.

        Raises
        ------
        InvalidInput
            It is missing, or something else.
        """
        name, value = self._find(Key(key.names, key.default, False))
        if type(value) is not bool:
            raise self._refused(name, "true or false", value)
        return value

    def word(self, key: Key) -> str:
        """Return a string.

        Raises
        ------
        InvalidInput
            It is missing, or something else.
        """
        name, value = self._find(key)
        if not isinstance(value, str):
            raise self._refused(name, "a string", value)
        return value

    def members(self, name: str, kind: type[str | int], length: int | None = None) -> list[str] | list[int] | None:
        """Return an array of strings or integers; None where there is none.

        Raises
        ------
        InvalidInput
            It is something else, or of another length.
        """
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or any(type(member) is not kind for member in value):
            raise self._refused(name, f"an array of {'strings' if kind is str else 'integers'}", value)
        if length is not None and len(value) != length:
            raise self._refused(name, f"{length} members, one a layer", value)
        return value

    def _find(self, key: Key) -> tuple[str, object]:
        found = [(name, self._members[name]) for name in key.all_names if name in self._members]
        if not found:
            if key.default is None:
                got = "no such key"
                raise InvalidInput(expected=" or ".join(key.all_names), got=got, at=self.at)
            return key.all_names[0], key.default
        name, value = found[0]
        for other, again in found[1:]:
            if again != value:
                raise InvalidInput(
                    expected=f"{name} and {other} to agree", got=f"{_json(value)} and {_json(again)}", at=self.at
                )
        return name, key.null if value is None else value

    def _refused(self, name: str, expected: str, value: object) -> InvalidInput:
        return InvalidInput(expected=expected, got=_json(value), at=self.where(name))


def _json(value: object) -> str:
    """Say what a value is, as JSON writes it and in a few words."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case int() if abs(value) > 1 << 64:
            return "a very large integer"
        case int() | float():
            return str(value)
        case str():
            return f'"{shown(value)}"'
        case list():
            return f"an array of {len(value)}"
    return "an object"
