"""Files of floats: read whole, or mapped as read-only pages that all processes share."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from colibri_cli.errors import InvalidInput
from colibri_cli.formats.checked_file import CheckedFile
from colibri_cli.formats.files import unreadable

if TYPE_CHECKING:
    import os


def map_floats(path: str | os.PathLike[str], n_bytes: int, what: str) -> npt.NDArray[np.float32]:
    """Map a file of float32.

    A mapping outlives the file's name, and a new file under that name does not touch it. A file that is cut short in
    place takes its pages along: read them only under a watch (`colibri_cli._core.Watch`).

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
    with CheckedFile(path) as file:
        check_size(file, n_bytes, what)
        try:
            pages = mmap.mmap(file.stream.fileno(), n_bytes, access=mmap.ACCESS_READ)
        except OSError as error:
            raise unreadable(path, error) from error
        except ValueError as error:  # it has shrunk since its size was asked
            raise InvalidInput(expected=f"{n_bytes} bytes ({what})", got="a file that shrank", at=file.name) from error
        return np.frombuffer(pages, "<f4")


def read_floats(path: str | os.PathLike[str], n_bytes: int, what: str) -> npt.NDArray[np.float32]:
    """Read a file of float32 whole.

    Raises
    ------
    UsageError, InvalidInput
        As :func:`map_floats`.
    """
    with CheckedFile(path) as file:
        check_size(file, n_bytes, what)
        return np.frombuffer(file.read(0, n_bytes), "<f4")


def check_size(file: CheckedFile, n_bytes: int, what: str) -> None:
    """Refuse a file that is not exactly ``n_bytes`` long."""
    if file.size != n_bytes:
        raise InvalidInput(expected=f"{n_bytes} bytes ({what})", got=f"{file.size} bytes", at=file.name)
