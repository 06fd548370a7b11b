"""A file opened for reading, whose every read is checked against its real size first."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Self

from colibri_cli.errors import InvalidInput, UsageError
from colibri_cli.formats.files import unreadable

if TYPE_CHECKING:
    from io import BufferedReader
    from types import TracebackType

_SHORTER = "a shorter file than it was when opened"


class CheckedFile:
    """A regular file; nothing is allocated for bytes that it does not hold.

    Parameters
    ----------
    path : path-like
        The file. Use the object as a context manager.

    Attributes
    ----------
    name : str
        The path, for messages.
    size : int
        Bytes.
    stream : BufferedReader
        The file itself, for a reader that seeks on its own.

    Raises
    ------
    UsageError
        The file is missing, cannot be read, or is not a regular file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.name = os.fspath(path)
        try:
            # Asked before opening: opening a named pipe would wait for its writer.
            if not stat.S_ISREG(Path(path).stat().st_mode):
                got = "a directory" if Path(path).is_dir() else "a pipe or a device"
                raise UsageError(expected="a regular file", got=got, at=self.name)
            self.stream: BufferedReader = Path(path).open("rb")  # noqa: SIM115 # __exit__ closes it
        except OSError as error:
            raise unreadable(path, error) from error
        except ValueError as error:  # a null character, or one that the file system's encoding lacks
            raise UsageError(
                expected="a readable file", got="a name that no file can have", at=repr(self.name)
            ) from error
        self.size = os.fstat(self.stream.fileno()).st_size

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stream.close()

    def check_size(self, n_bytes: int, what: str) -> None:
        """Refuse a file that is not exactly ``n_bytes`` long; ``what`` says what that size stands for."""
        if self.size != n_bytes:
            raise InvalidInput(expected=f"{n_bytes} bytes ({what})", got=f"{self.size} bytes", at=self.name)

    def read(self, offset: int, size: int) -> bytes:
        """Read exactly ``size`` bytes at ``offset``.

        Raises
        ------
        InvalidInput
            The file does not hold that many bytes there.
        UsageError
            The operating system refuses.
        """
        expected = f"{size} bytes at offset {offset}"
        if offset < 0 or not 0 <= size <= self.size - offset:
            raise InvalidInput(expected=expected, got=f"a file of {self.size} bytes", at=self.name)
        try:
            self.stream.seek(offset)
            data = self.stream.read(size)
        except OSError as error:
            raise unreadable(self.name, error) from error
        if len(data) != size:
            raise InvalidInput(expected=expected, got=_SHORTER, at=self.name)
        return data

    def read_into(self, memory: memoryview, offset: int) -> None:
        """Fill ``memory`` with the bytes at ``offset``, which it must not reach behind.

        Raises
        ------
        InvalidInput
            The file does not hold that many bytes there any more.
        UsageError
            The operating system refuses.
        """
        try:
            self.stream.seek(offset)
            n_read = self.stream.readinto(memory)
        except OSError as error:
            raise unreadable(self.name, error) from error
        if n_read != memory.nbytes:
            raise InvalidInput(expected=f"{memory.nbytes} bytes at offset {offset}", got=_SHORTER, at=self.name)
