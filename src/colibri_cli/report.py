"""Results to terminal tables, plain columns and JSON: computed once, rendered twice.

Tables are aligned columns, plain in a pipe and styled on a terminal unless ``NO_COLOR`` is set. JSON has one member a
line and one row a line, keys in a fixed order, and each float32 as the shortest decimal that gives it back.
"""

from __future__ import annotations

import errno
import io
import json
import logging
import math
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

    from colibri_cli.model import Inference
    from colibri_cli.tokenizer import Word
    from colibri_cli.words import WordAnswer

_PATIENCE = 0.5  # seconds before a progress bar appears
_EIGHTHS = " ▏▎▍▌▋▊▉"
_WIDEST = 40  # columns; a longer cell pushes its own row only
_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_red", "bright_cyan", "bright_green")


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


# colibri tokenize


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids and their pieces, one for each id."""

    ids: list[int]
    pieces: list[str]


def tokens_json(tokens: Tokens) -> bytes:
    """Render tokenized text."""
    return json_document({**_tokenize_head([tokens]), "ids": tokens.ids, "pieces": tokens.pieces})


def tokens_text(tokens: Tokens, *, terminal: bool) -> str:
    """Show one piece a row with its id."""
    rows = [[str(i), piece] for i, piece in zip(tokens.ids, tokens.pieces, strict=True)]
    return table(_TOKEN_COLUMNS, rows, terminal=terminal)


def lines_json(lines: Sequence[Tokens]) -> bytes:
    """Render text tokenized line by line; a line without tokens is kept."""
    objects = (
        {"line": number, "ids": tokens.ids, "pieces": tokens.pieces} for number, tokens in enumerate(lines, start=1)
    )
    return json_document({**_tokenize_head(lines), "lines": objects})


def lines_text(lines: Sequence[Tokens], *, terminal: bool) -> str:
    """Show one piece a row with its line and id."""
    rows = [
        [str(number), str(i), piece]
        for number, tokens in enumerate(lines, start=1)
        for i, piece in zip(tokens.ids, tokens.pieces, strict=True)
    ]
    return table([Column("line", number=True), *_TOKEN_COLUMNS], rows, terminal=terminal)


def decoded_json(ids: list[int], text: str) -> bytes:
    """Render ids turned back into text."""
    return json_document({"schema": "colibri.tokenize/1", "n_tokens": len(ids), "ids": ids, "text": text})


def _tokenize_head(lines: Sequence[Tokens]) -> dict[str, object]:
    return {"schema": "colibri.tokenize/1", "n_tokens": sum(len(tokens.ids) for tokens in lines)}


_TOKEN_COLUMNS = (Column("id", number=True, style="dim"), Column("piece", style="bold"))


# colibri infer


@dataclass(frozen=True, slots=True)
class Answer:
    """What `colibri infer` found, ready for every format.

    Attributes
    ----------
    task : str
    classes : tuple of str
    inference : Inference
    words : list of Word
        They cover every token in order.
    pieces : list of str
        One for each token.
    """

    task: str
    classes: tuple[str, ...]
    inference: Inference
    words: list[Word]
    pieces: list[str]


@dataclass(frozen=True, slots=True)
class Latency:
    """How long each of several equal runs took.

    Attributes
    ----------
    milliseconds : list of float
    """

    milliseconds: list[float]

    def percentile(self, percent: float) -> float:
        """Give the nearest-rank percentile, a time that was measured."""
        ranked = sorted(self.milliseconds)
        return ranked[max(math.ceil(percent / 100 * len(ranked)), 1) - 1]


def infer_text(answer: Answer, latency: Latency | None, *, by_piece: bool, terminal: bool) -> str:
    """Show a row a word (or piece), each expert's load, the whole input's classes and the latency."""
    columns = [
        Column("piece" if by_piece else "word", style="bold"),
        Column("experts", style="dim"),
        Column("class", style=_colours(answer.classes)),
        Column("probability", number=True),
    ]
    top_k = answer.inference.routing.expert_ids.shape[1]
    rows = [
        [
            found.word.text,
            _experts_cell(found.experts, top_k),
            answer.classes[found.label],
            f"{found.probabilities[found.label]:.3f}",
        ]
        for found in _answers(answer, by_piece=by_piece)
    ]
    parts = [
        table(columns, rows, terminal=terminal),
        load_table(answer.inference.routing.load.tolist(), terminal=terminal),
        _prediction_table(answer, terminal=terminal),
    ]
    if latency is not None:
        columns = [Column(header, number=True) for header in ("runs", "P50 ms", "P99 ms")]
        times = [f"{latency.percentile(percent):.3f}" for percent in (50, 99)]
        parts.append(table(columns, [[str(len(latency.milliseconds)), *times]], terminal=terminal))
    return "\n".join(parts)


def load_table(load: Sequence[int], *, terminal: bool) -> str:
    """Show the tokens each expert got, as a bar beside the numbers."""
    columns = [
        Column("expert", number=True),
        Column("tokens", number=True),
        Column("share", number=True),
        Column("load", style="cyan"),
    ]
    total, most = max(sum(load), 1), max(*load, 1)
    body = [
        [str(expert), str(tokens), f"{tokens / total:.3f}", bar(tokens / most, 40)]
        for expert, tokens in enumerate(load)
    ]
    return table(columns, body, terminal=terminal)


def _experts_cell(experts: Sequence[tuple[int, np.float32]], top_k: int) -> str:
    shown = " ".join(f"{expert}:{weight:.2f}" for expert, weight in experts[:top_k])
    return f"{shown} +{len(experts) - top_k}" if len(experts) > top_k else shown


def _prediction_table(answer: Answer, *, terminal: bool) -> str:
    columns = [
        Column("class", style=_colours(answer.classes)),
        Column("probability", number=True),
        Column("whole input", style="cyan"),
    ]
    shares = answer.inference.predict().tolist()
    body = [[name, f"{share:.3f}", bar(share, 40)] for name, share in zip(answer.classes, shares, strict=True)]
    return table(columns, body, terminal=terminal)


def _colours(classes: Sequence[str]) -> dict[str, str]:
    return {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(classes)}


def infer_json(answer: Answer, run: Mapping[str, object], latency: Latency | None) -> bytes:
    """Render everything: words, pieces, load and prediction; ``run`` tells how and how fast."""
    inference = answer.inference
    pooled = inference.predict()
    label = int(pooled.argmax())
    shares = floats(pooled)
    if latency is not None:
        times = {f"p{percent}_ms": round(latency.percentile(percent), 6) for percent in (50, 99)}
        run = {**run, "latency": {"runs": len(latency.milliseconds), **times}}
    return json_document(
        {
            "schema": "colibri.infer/1",
            "task": answer.task,
            "classes": list(answer.classes),
            "n_tokens": len(answer.pieces),
            "n_words": len(answer.words),
            "prediction": {
                "class": answer.classes[label],
                "probability": shares[label],
                "probabilities": shares,
            },
            "load": inference.routing.load.tolist(),
            "words": _objects(answer, by_piece=False),
            "pieces": _objects(answer, by_piece=True),
            "run": run,
        }
    )


def infer_jsonl(answer: Answer, *, by_piece: bool) -> bytes:
    """Render one JSON object a word (or piece)."""
    entries = _objects(answer, by_piece=by_piece)
    return json_lines({"schema": "colibri.infer/1", **entry} for entry in entries)


def infer_npy(inference: Inference) -> bytes:
    """Give the probabilities, float32 ``(n_tokens, n_classes)``, as the bytes of an ``.npy`` file."""
    import numpy as np

    buffer = io.BytesIO()
    np.save(buffer, inference.probabilities, allow_pickle=False)
    return buffer.getvalue()


def _objects(answer: Answer, *, by_piece: bool) -> Iterator[dict[str, object]]:
    for found in _answers(answer, by_piece=by_piece):
        word = found.word
        if by_piece:
            name: dict[str, object] = {"piece": word.text, "id": int(answer.inference.ids[word.start])}
        else:
            name = {"word": word.text, "start": word.start, "stop": word.stop}
        yield {**name, **_answer_object(answer, found)}


def _answers(answer: Answer, *, by_piece: bool) -> Iterator[WordAnswer]:
    from colibri_cli.tokenizer import Word
    from colibri_cli.words import word_answers

    pieces = [Word(piece, i, i + 1) for i, piece in enumerate(answer.pieces)] if by_piece else []
    return word_answers(answer.inference, pieces or answer.words)


def _answer_object(answer: Answer, found: WordAnswer) -> dict[str, object]:
    shares = floats(found.probabilities)
    weights = floats(weight for _, weight in found.experts)
    return {
        "class": answer.classes[found.label],
        "probability": shares[found.label],
        "probabilities": shares,
        "experts": [
            {"id": expert, "weight": weight} for (expert, _), weight in zip(found.experts, weights, strict=True)
        ],
    }
