"""Files of floats: read whole, or mapped as read-only pages that all processes share."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from colibri_cli.errors import InvalidInput
from colibri_cli.formats.checked_file import CheckedFile

if TYPE_CHECKING:
    import os


class MappedFile:
    """The pages of a file of float32.

    A mapping outlives the file's name, and a new file under that name does not touch it. A file that is cut short in
    place takes its pages along, and reading them would end the process: :meth:`check` before each use.

    Parameters
    ----------
    path : path-like
    n_bytes : int
        The size it must have.
    what : str
        What that size stands for, for the message.

    Raises
    ------
    UsageError
        The file is missing, cannot be read, or is not a regular file.
    InvalidInput
        It has another size.
    """

    def __init__(self, path: str | os.PathLike[str], n_bytes: int, what: str) -> None:
        with CheckedFile(path) as file:
            check_size(file, n_bytes, what)
            self._pages = mmap.mmap(file.stream.fileno(), n_bytes, access=mmap.ACCESS_READ)
            self.name = file.name
        self.floats: npt.NDArray[np.float32] = np.frombuffer(self._pages, "<f4")

    def check(self) -> None:
        """Refuse pages that the file no longer holds.

        Raises
        ------
        InvalidInput
            The file has been cut short.
        """
        size = self._pages.size()
        if size < self.floats.nbytes:
            raise InvalidInput(
                expected=f"{self.floats.nbytes} bytes, as when it was mapped",
                got=f"a file cut to {size}",
                at=self.name,
                hint="to change a file that is in use, write a new one and rename it",
            )

    def touch(self) -> None:
        """Bring every page into memory."""
        self.check()
        self._pages.madvise(mmap.MADV_WILLNEED)
        self.floats[:: mmap.PAGESIZE // self.floats.itemsize].max()


def read_floats(path: str | os.PathLike[str], n_bytes: int, what: str) -> npt.NDArray[np.float32]:
    """Read a file of float32 whole.

    Raises
    ------
    UsageError, InvalidInput
        As :class:`MappedFile`.
    """
    with CheckedFile(path) as file:
        check_size(file, n_bytes, what)
        return np.frombuffer(file.read(0, n_bytes), "<f4")


def check_size(file: CheckedFile, n_bytes: int, what: str) -> None:
    """Refuse a file that is not exactly ``n_bytes`` long."""
    if file.size != n_bytes:
        raise InvalidInput(expected=f"{n_bytes} bytes ({what})", got=f"{file.size} bytes", at=file.name)
