"""Reading and writing whole files: checked sizes in, temporary file and rename out."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from colibri_cli.errors import UsageError


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


def unreadable(path: str | os.PathLike[str], error: OSError) -> UsageError:
    """Describe a file that could not be opened or read."""
    return UsageError(expected="a readable file", got=(error.strerror or str(error)).lower(), at=os.fspath(path))


def write_atomically(path: str | os.PathLike[str], data: bytes | memoryview) -> None:
    """Write ``data`` so that a reader sees the old file or the new one, never a part.

    A path that exists and is not a regular file (``/dev/stdout``, a named pipe) is written to directly.

    Raises
    ------
    UsageError
        The folder is missing, the path is a directory, the disk is full, ...; the old file is left in place.
    """
    target = Path(path)
    try:
        if target.exists() and not target.is_file() and not target.is_dir():
            with target.open("wb") as stream:
                stream.write(data)
            return
        target = target.resolve()  # a symbolic link keeps pointing at the file that is replaced
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        temporary = Path(name)
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(data)
            mode = target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~_umask()
            temporary.chmod(mode)
            temporary.replace(target)
        except BaseException:
            temporary.unlink()
            raise
    except OSError as error:
        raise UsageError(
            expected="a writable file",
            got=(error.strerror or str(error)).lower(),
            at=os.fspath(path),
        ) from error


def _umask() -> int:
    # Python can only read the mask by setting it.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
