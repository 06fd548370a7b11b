"""Files mapped as read-only pages that all processes share, or read into memory that suits the kernels."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import TYPE_CHECKING

import numpy as np

from colibri_cli.formats.checked_file import CheckedFile
from colibri_cli.formats.files import unreadable

if TYPE_CHECKING:
    import numpy.typing as npt

_CACHE_LINE, _HUGE_PAGE = 64, 1 << 21

# Python's own mmap keeps a descriptor for each mapping, and a process may have no more than some 1,000 of them: fewer
# than a model has experts.
_libc = ctypes.CDLL(None, use_errno=True)
_mmap, _munmap = _libc.mmap, _libc.munmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


def map_pages(file: CheckedFile) -> npt.NDArray[np.uint8]:
    """Map a whole file that is not empty; the array holds the mapping, and no descriptor.

    A mapping outlives the file's name, and a new file under that name does not touch it. A file that is cut short in
    place takes its pages along: read them only under a watch (`colibri_cli._core.Watch`).

    Raises
    ------
    UsageError
        The system refuses.
    MemoryError
        There are no addresses left, or too many mappings.
    """
    start = _mmap(None, file.size, mmap.PROT_READ, mmap.MAP_SHARED, file.stream.fileno(), 0)
    if start == _FAILED:
        code = ctypes.get_errno()
        raise unreadable(file.name, OSError(code, os.strerror(code)))
    memory = (ctypes.c_uint8 * file.size).from_address(start)
    weakref.finalize(memory, _munmap, start, file.size).atexit = False  # other threads may read until the very end
    return np.frombuffer(memoryview(memory).toreadonly(), np.uint8)


def map_floats(path: str | os.PathLike[str], n_bytes: int, what: str) -> npt.NDArray[np.float32]:
    """Map a file of float32, as :func:`map_pages` does.

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
        file.check_size(n_bytes, what)
        return map_pages(file).view("<f4")


def read_floats(path: str | os.PathLike[str], n_bytes: int, what: str) -> npt.NDArray[np.float32]:
    """Read a file of float32 whole.

    Raises
    ------
    UsageError, InvalidInput
        As :func:`map_floats`.
    """
    with CheckedFile(path) as file:
        file.check_size(n_bytes, what)
        return np.frombuffer(file.read(0, n_bytes), "<f4")


def read_aligned(file: CheckedFile, offset: int) -> npt.NDArray[np.uint8]:
    """Read what follows ``offset`` into memory that begins with a cache line, or a huge page where it fills some.

    Raises
    ------
    UsageError, InvalidInput
        As ``CheckedFile.read``.
    """
    n_bytes = file.size - offset
    alignment = _HUGE_PAGE if n_bytes >= _HUGE_PAGE else _CACHE_LINE
    room = np.empty(n_bytes + alignment, np.uint8)
    start = -room.ctypes.data % alignment
    memory = room[start : start + n_bytes]
    file.read_into(memory.data, offset)
    return memory
