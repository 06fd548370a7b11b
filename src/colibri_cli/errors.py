"""One tree of errors; each carries the exit code of the command that meets it."""

from __future__ import annotations


class ColibriError(Exception):
    """Base of every error that Colibri raises on purpose.

    Parameters
    ----------
    expected, got, at : str
        The contract, the fact and the place, as in
        ``Expected a multiple of 4 bytes, got 7 bytes - at input.bin``.
    hint : str, optional
        What the reader can do about it; a line of its own.
    """

    exit_code = 1

    def __init__(self, *, expected: str, got: str, at: str, hint: str | None = None) -> None:
        self.expected = expected
        self.got = got
        self.at = at
        self.hint = hint
        message = f"Expected {expected}, got {got} - at {at}"
        super().__init__(message if hint is None else f"{message}\nhint: {hint}")

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.expected, self.got, self.at, self.hint)


class InvalidInput(ColibriError, ValueError):
    """An array, a file or a config that breaks its contract (exit code 1)."""


class UsageError(ColibriError):
    """A request that cannot be run: wrong flags, a missing file, an absent instruction set (exit code 2)."""

    exit_code = 2


def _rebuild(kind: type[ColibriError], expected: str, got: str, at: str, hint: str | None) -> ColibriError:
    return kind(expected=expected, got=got, at=at, hint=hint)
