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
from typing import TYPE_CHECKING, Any

from colibri_cli.errors import UsageError
from colibri_cli.formats.files import write_atomically

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    import numpy as np

_PATIENCE = 0.5  # seconds before a progress bar appears
_EIGHTHS = " ▏▎▍▌▋▊▉"
_WIDEST = 40  # columns; a longer cell pushes its own row only


# Output


def emit(data: str | bytes, output: Path | None = None) -> None:
    """Write a result to a file, atomically, or to standard output.

    Raises
    ------
    UsageError
        The file or standard output cannot be written.
    BrokenPipeError
        The reader of standard output has gone.
    """
    if output is not None:
        write_atomically(output, data if isinstance(data, bytes) else _encoded(data, "utf-8"))
        return
    if sys.stdout is None:
        raise UsageError(expected="an open standard output", got="a closed one", at="standard output")
    try:
        sys.stdout.flush()
        rest = memoryview(data if isinstance(data, bytes) else _encoded(data, sys.stdout.encoding))
        while rest:  # with PYTHONUNBUFFERED a write may stop short without an error
            written = sys.stdout.buffer.write(rest)
            if written is None:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            rest = rest[written:]
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        discard_stdout()
        got = (error.strerror or str(error)).lower()
        raise UsageError(expected="a writable standard output", got=got, at="standard output") from error


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
    parts = []
    for key, value in members.items():
        if isinstance(value, Iterator):
            rows = ",\n".join(f"  {_json(row)}" for row in value)
            parts.append(f"{_json(key)}: [\n{rows}\n]" if rows else f"{_json(key)}: []")
        else:
            parts.append(f"{_json(key)}: {_json(value)}")
    return _encoded("{\n" + ",\n".join(parts) + "\n}\n", "utf-8")


def json_lines(rows: Iterable[object]) -> bytes:
    """Render JSON objects, one a line."""
    return _encoded("".join(f"{_json(row)}\n" for row in rows), "utf-8")


def floats(values: Iterable[np.float32]) -> list[float]:
    """Give each float32 as the double whose shortest decimal is the float32's own."""
    return [float(str(value)) for value in values]


# A lone surrogate (an undecodable file name) leaves as \udcXX in the bytes, which is JSON's own escape.
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


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
