"""Reading and writing whole files: checked sizes in, temporary file and rename out."""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from colibri_cli.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

TEMPORARY = ".colibri-"
"""What the names of files that are not whole yet begin with."""

# What the system says as a sentence, said as a thing that one can get.
_REASONS = {
    errno.EIO: "an input or output error",
    errno.EISDIR: "a directory",
    errno.ENAMETOOLONG: "a name that is too long",
    errno.ENOTDIR: "a file where a folder should be",
    errno.EROFS: "a read-only file system",
}


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Read a whole file.

    Raises
    ------
    UsageError
        The file is missing, is a directory or cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Tell whether a folder is there; a name that none can have is that of no folder."""
    return os.path.isdir(path)  # noqa: PTH112  # Path.is_dir raises for such names


def unreadable(path: str | os.PathLike[str], error: OSError) -> UsageError | MemoryError:
    """Describe a file that could not be opened, read or mapped; where memory was wanting, the file is not to blame."""
    if error.errno == errno.ENOMEM:
        return MemoryError(f"no memory to read or map {os.fspath(path)}")
    return UsageError(expected="a readable file", got=reason(error), at=os.fspath(path))


def reason(error: OSError) -> str:
    """Say what the system refused, to stand after "got" in a message."""
    return _REASONS.get(error.errno or 0) or (error.strerror or str(error)).lower()


def write_atomically(
    path: str | os.PathLike[str], data: bytes | memoryview | Iterable[bytes | memoryview], *, durable: bool = False
) -> None:
    """Write ``data``, whole or in parts, so that a reader sees the old file or the new one, never a part.

    A path that exists and is not a regular file (``/dev/stdout``, a named pipe) is written to directly. ``durable``:
    also after a power cut; what is in the folder's list of names is the caller's to sync.

    Raises
    ------
    UsageError
        The folder is missing, the path is a directory, the disk is full, ...; the old file is left in place.
    """
    target = Path(path)
    parts = (data,) if isinstance(data, bytes | memoryview) else data
    try:
        if target.exists() and not target.is_file() and not target.is_dir():
            with target.open("wb") as stream:
                stream.writelines(parts)
            return
        target = Path(os.path.realpath(target))  # a symbolic link keeps pointing at the file that is replaced
        temporary = target.with_name(TEMPORARY + secrets.token_hex(8))
        with temporary.open("xb") as stream:  # with the permissions that the umask leaves
            pass
        try:
            if target.exists():
                temporary.chmod(target.stat().st_mode & 0o777)
            with temporary.open("r+b") as stream:
                stream.writelines(parts)
                if durable:
                    stream.flush()
                    os.fsync(stream.fileno())
            temporary.replace(target)
        except BaseException:
            temporary.unlink()
            raise
    except OSError as error:
        raise UsageError(expected="a writable file", got=reason(error), at=os.fspath(path)) from error
