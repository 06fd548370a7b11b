"""How results leave: standard output or a file, terminal tables and plain columns, JSON, progress.

Tables are aligned columns, plain in a pipe and styled on a terminal unless ``NO_COLOR`` is set. JSON has one member a
line and one row a line, keys in a fixed order, and each float32 as the shortest decimal that gives it back.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
import time
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from colibri_cli.errors import UsageError
from colibri_cli.formats.files import reason, write_atomically

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

_PATIENCE = 0.5  # seconds before a progress bar appears
_EIGHTHS = " ▏▎▍▌▋▊▉"
_WIDEST = 40  # columns; a longer cell pushes its own row only
_ROWS = 1024  # of JSON, written at a time
_DIGITS = 9  # that tell any float32 from every other
_USUAL = 1e-13, 1e6  # sizes of float32 that many can be rendered of at a time


# Output


def emit(data: str | bytes | Iterator[bytes], output: Path | None = None) -> None:
    """Write a result to a file, atomically, or to standard output; parts are written as they come.

    Raises
    ------
    UsageError
        The file or standard output cannot be written.
    BrokenPipeError
        The reader of standard output has gone.
    """
    if output is not None:
        write_atomically(output, _encoded(data, "utf-8") if isinstance(data, str) else data)
        return
    if sys.stdout is None:
        raise UsageError(expected="an open standard output", got="a closed one", at="standard output")
    whole = _encoded(data, sys.stdout.encoding) if isinstance(data, str) else data
    try:
        sys.stdout.flush()
        for part in (whole,) if isinstance(whole, bytes) else whole:
            _write(part)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        discard_stdout()
        raise unwritable(error) from error


def unwritable(error: OSError) -> UsageError:
    """Describe a standard output that could not be written."""
    return UsageError(expected="a writable standard output", got=reason(error), at="standard output")


def _write(data: bytes) -> None:
    rest = memoryview(data)
    while rest:  # with PYTHONUNBUFFERED a write may stop short without an error
        written = sys.stdout.buffer.write(rest)
        if written is None:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        rest = rest[written:]


def discard_stdout() -> None:
    """Let what is still buffered go nowhere, so that the interpreter's last flush cannot fail."""
    if sys.stdout is None:
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def on_terminal(output: Path | None = None) -> bool:
    """Whether a result goes to a person's terminal."""
    return output is None and sys.stdout is not None and sys.stdout.isatty()


def printable(text: str) -> str:
    """Spell out control characters, so that data cannot steer a terminal or break a row."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def steps(total: int, label: str) -> Iterator[int]:
    """Count ``range(total)``; when it takes long a terminal shows a progress bar, unless ``-q`` is given."""
    started = drawn = time.monotonic()
    wanted = sys.stderr is not None and sys.stderr.isatty()
    wanted = wanted and logging.getLogger(__package__).isEnabledFor(logging.INFO)
    bar: Any = None
    try:
        for i in range(total):
            yield i
            now = time.monotonic()
            if wanted and bar is None and now - started > _PATIENCE:
                bar = _progress_bar(label, total)
            if bar is not None and now - drawn > 0.1:
                # Drawn between steps, never by a thread: that would disturb what is being timed.
                bar.update(bar.task_ids[0], completed=i + 1, refresh=True)
                drawn = now
    finally:
        if bar is not None:
            bar.stop()


def _progress_bar(label: str, total: int) -> Any:
    from rich.console import Console
    from rich.progress import Progress

    bar = Progress(console=Console(stderr=True), transient=True, auto_refresh=False)
    bar.add_task(label, total=total)
    bar.start()
    return bar


def _encoded(text: str, encoding: str | None) -> bytes:
    return text.encode(encoding or "utf-8", "backslashreplace")


# JSON


def json_document(members: Mapping[str, object]) -> bytes:
    """Render one JSON object, a member a line; the rows of an iterator stand on lines of their own."""
    return b"".join(json_parts(members))


def json_parts(members: Mapping[str, object]) -> Iterator[bytes]:
    """Render as `json_document`, a part at a time, so that a large document need not be held."""
    before = "{\n"
    for key, value in members.items():
        yield _encoded(f"{before}{_json(key)}: ", "utf-8")
        if isinstance(value, Iterator):
            yield from _array_parts(value)
        else:
            yield _encoded(_json(value), "utf-8")
        before = ",\n"
    yield b"\n}\n"


def _array_parts(rows: Iterator[object]) -> Iterator[bytes]:
    before, after = "[\n", "[]"
    while some := list(islice(rows, _ROWS)):
        yield _encoded(before + ",\n".join(f"  {_json(row)}" for row in some), "utf-8")
        before, after = ",\n", "\n]"
    yield _encoded(after, "utf-8")


def json_lines(rows: Iterable[object]) -> Iterator[bytes]:
    """Render JSON objects, one a line, some lines at a time."""
    rows = iter(rows)
    while some := list(islice(rows, _ROWS)):
        yield _encoded("".join(f"{_json(row)}\n" for row in some), "utf-8")


def floats(values: NDArray[np.float32]) -> Any:
    """Give each float32 as the double whose shortest decimal is the float32's own.

    Parameters
    ----------
    values : ndarray of float32, any shape
        Finite.

    Returns
    -------
    list of float, nested as ``values``
    """
    import numpy as np

    single = values.ravel()
    wide = single.astype(np.float64)
    size = np.abs(wide)
    usual = (size >= _USUAL[0]) & (size < _USUAL[1])
    before_point = np.floor(np.log10(np.where(usual, size, 1))).astype(int)
    powers = np.array([float(f"1e{i}") for i in range(23)])  # every power of ten that a double holds exactly
    found = np.full_like(wide, np.nan)
    for digits in range(_DIGITS, 0, -1):
        # A whole number over an exact power of ten is the double nearest to that decimal.
        power = powers[np.clip(digits - 1 - before_point, 0, 22)]
        decimal = np.rint(wide * power) / power
        np.copyto(found, decimal, where=usual & (decimal.astype(np.float32) == single))
    for i in np.flatnonzero(np.isnan(found)):
        found[i] = float(str(single[i]))
    return found.reshape(values.shape).tolist()


# A lone surrogate (an undecodable file name) leaves as \udcXX in the bytes, which is JSON's own escape.
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, check_circular=False)


def _json(value: object) -> str:
    return _ENCODER.encode(value)


# Tables


@dataclass(frozen=True, slots=True)
class Column:
    """A table's column.

    Attributes
    ----------
    header : str
    number : bool
        Aligned right.
    style : str or mapping
        rich's style on a terminal; a mapping gives one for each cell's text.
    """

    header: str
    number: bool = False
    style: str | Mapping[str, str] = ""


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]], *, terminal: bool) -> str:
    """Render rows of cells in aligned columns, with styles and a rule under the header on a terminal."""
    grid = [[column.header for column in columns], *([printable(cell) for cell in row] for row in rows)]
    widths = [min(max(map(_width, cells)), _WIDEST) for cells in zip(*grid, strict=True)]
    paint = _painter(terminal=terminal)

    def line(cells: Sequence[str], styles: Iterable[str]) -> str:
        padded = (
            _padded(cell, width, paint(cell, style), right=column.number)
            for cell, width, style, column in zip(cells, widths, styles, columns, strict=True)
        )
        return "  ".join(padded).rstrip() + "\n"

    header, *body = grid
    parts = [line(header, ["bold"] * len(columns))]
    if terminal:
        parts.append(paint("─" * (sum(widths) + 2 * len(widths) - 2), "dim") + "\n")
    parts += (line(row, map(_style, columns, row)) for row in body)
    return "".join(parts)


def bar(share: float, width: int) -> str:
    """Draw a share, 0 to 1, of ``width`` columns in eighths; more than nothing is never drawn as nothing."""
    eighths = round(share * width * 8)
    if share > 0:
        eighths = max(eighths, 1)
    whole, rest = divmod(eighths, 8)
    return "█" * whole + (_EIGHTHS[rest] if rest else "")


def _padded(cell: str, width: int, painted: str, *, right: bool) -> str:
    space = " " * (width - _width(cell))
    return space + painted if right else painted + space


def _width(text: str) -> int:
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(unicodedata.combining(c) > 0 for c in text)


def _style(column: Column, cell: str) -> str:
    return column.style if isinstance(column.style, str) else column.style.get(cell, "")


def _painter(*, terminal: bool) -> Callable[[str, str], str]:
    # NO_COLOR means no bold and no dim either: not one escape sequence.
    if not terminal or os.environ.get("NO_COLOR"):
        return lambda text, _: text
    from rich.console import Console
    from rich.style import Style

    if Console().color_system is None:
        return lambda text, _: text
    return lambda text, style: Style.parse(style).render(text)
