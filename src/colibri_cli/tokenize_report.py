"""Results of `colibri tokenize`, rendered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from colibri_cli.report import Column, json_document, table

if TYPE_CHECKING:
    from collections.abc import Sequence

_SCHEMA = "colibri.tokenize/1"
_COLUMNS = (Column("id", number=True, style="dim"), Column("piece", style="bold"))


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids and their pieces, one for each id."""

    ids: list[int]
    pieces: list[str]


def tokens_json(tokens: Tokens) -> bytes:
    """Render tokenized text."""
    return json_document({**_head([tokens]), "ids": tokens.ids, "pieces": tokens.pieces})


def tokens_text(tokens: Tokens, *, terminal: bool) -> str:
    """Show one piece a row with its id."""
    rows = [[str(i), piece] for i, piece in zip(tokens.ids, tokens.pieces, strict=True)]
    return table(_COLUMNS, rows, terminal=terminal)


def lines_json(lines: Sequence[Tokens]) -> bytes:
    """Render text tokenized line by line; a line without tokens is kept."""
    objects = (
        {"line": number, "ids": tokens.ids, "pieces": tokens.pieces} for number, tokens in enumerate(lines, start=1)
    )
    return json_document({**_head(lines), "lines": objects})


def lines_text(lines: Sequence[Tokens], *, terminal: bool) -> str:
    """Show one piece a row with its line and id."""
    rows = [
        [str(number), str(i), piece]
        for number, tokens in enumerate(lines, start=1)
        for i, piece in zip(tokens.ids, tokens.pieces, strict=True)
    ]
    return table([Column("line", number=True), *_COLUMNS], rows, terminal=terminal)


def decoded_json(ids: list[int], text: str) -> bytes:
    """Render ids turned back into text."""
    return json_document({"schema": _SCHEMA, "n_tokens": len(ids), "ids": ids, "text": text})


def _head(lines: Sequence[Tokens]) -> dict[str, object]:
    return {"schema": _SCHEMA, "n_tokens": sum(len(tokens.ids) for tokens in lines)}
