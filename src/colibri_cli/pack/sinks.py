"""Where packed files go: to the disk, or beside those that are there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from colibri_cli.errors import InvalidInput
from colibri_cli.formats.checked_file import CheckedFile
from colibri_cli.formats.files import write_atomically

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_PART = 1 << 22  # bytes read back at a time


class Sink(Protocol):
    """Takes the files of one layer; several threads may call it."""

    def put(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        """Take a file, by its name in the layer's folder."""


@dataclass(frozen=True, slots=True)
class Files:
    """Writes them into the layer's folder."""

    folder: Path

    def put(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        """Write a file; see `write_atomically`."""
        write_atomically(self.folder / name, parts)


@dataclass(frozen=True, slots=True)
class SameFiles:
    """Compares them with those that are in the layer's folder."""

    folder: Path

    def put(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        """Read a file back.

        Raises
        ------
        InvalidInput
            It differs.
        UsageError
            It is missing or cannot be read.
        """
        with CheckedFile(self.folder / name) as file:
            n_bytes = sum(memoryview(part).nbytes for part in parts)
            if file.size != n_bytes:
                raise _differs(file, f"{n_bytes} bytes", f"{file.size} bytes")
            offset = 0
            for part in parts:
                view = memoryview(part).cast("B")
                for first in range(0, len(view), _PART):
                    wanted = view[first : first + _PART]
                    if file.read(offset, len(wanted)) != wanted:
                        raise _differs(file, "what the checkpoint packs to", f"other bytes near offset {offset}")
                    offset += len(wanted)


def _differs(file: CheckedFile, expected: str, got: str) -> InvalidInput:
    return InvalidInput(
        expected=expected, got=got, at=file.name, hint="the file is damaged, or the checkpoint is another one"
    )
