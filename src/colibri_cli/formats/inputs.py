"""Reading what a user names: a path, or ``-`` for standard input, never more than a stated size."""

from __future__ import annotations

import codecs
import os
import stat
import sys
from pathlib import Path
from typing import IO

from colibri_cli.errors import InvalidInput, UsageError
from colibri_cli.formats.files import unreadable

STDIN = "-"
LIMIT = 1 << 30  # bytes; /dev/zero or a sparse file must not fill the memory


def read_input(path: str | os.PathLike[str], *, limit: int = LIMIT) -> bytes:
    """Read a whole file, or all of standard input when ``path`` is ``-``.

    Raises
    ------
    UsageError
        The file is missing, is a directory or cannot be read; standard input is closed.
    InvalidInput
        There are more than ``limit`` bytes; of a regular file none is read then.
    """
    if os.fspath(path) == STDIN and sys.stdin is None:
        raise UsageError(expected="an open standard input", got="a closed one", at=describe(path))
    try:
        if os.fspath(path) == STDIN:
            return _bounded(sys.stdin.buffer, describe(path), limit)
        with _opened(path) as stream:
            return _bounded(stream, describe(path), limit)
    except OSError as error:
        raise unreadable(describe(path), error) from error


def read_text(path: str | os.PathLike[str]) -> str:
    """Read UTF-8 text from a file or, for ``-``, standard input; a byte order mark in front is dropped.

    Raises
    ------
    UsageError, InvalidInput
        As `read_input`; also InvalidInput, naming the byte, when the text is not UTF-8.
    """
    data = read_input(path)
    text = data.removeprefix(codecs.BOM_UTF8)
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        raise InvalidInput(
            expected="text in UTF-8",
            got=f"the byte 0x{text[error.start]:02x} ({error.reason})",
            at=f"{describe(path)}, byte {error.start + len(data) - len(text)}",
            hint="this is UTF-16: convert it with `iconv -f UTF-16 -t UTF-8`" if utf16 else None,
        ) from error


def split_lines(text: str) -> list[str]:
    r"""Cut text at ``\n``, ``\r\n`` and ``\r`` only; a line end at the very end begins no further line."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return lines if lines[-1] else lines[:-1]


def describe(path: str | os.PathLike[str]) -> str:
    """Name an input in a message."""
    return "standard input" if os.fspath(path) == STDIN else os.fspath(path)


def _opened(path: str | os.PathLike[str]) -> IO[bytes]:
    try:
        return Path(path).open("rb")
    except ValueError as error:  # a null character, which no file's name holds
        raise UsageError(expected="a readable file", got="a name that no file can have", at=repr(path)) from error


def _bounded(stream: IO[bytes], name: str, limit: int) -> bytes:
    status = os.fstat(stream.fileno())
    size = status.st_size if stat.S_ISREG(status.st_mode) else 0
    data = bytearray()  # grows with what is there, not with what is allowed
    while size <= limit and len(data) <= limit and (part := stream.read(min(max(size, 1 << 16), limit) + 1)):
        data += part
    if max(size, len(data)) > limit:
        got = f"{size:,} bytes" if size > limit else "more"
        raise InvalidInput(expected=f"at most {limit:,} bytes", got=got, at=name)
    return bytes(data)
