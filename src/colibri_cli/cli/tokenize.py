"""``colibri tokenize``: text to token ids, and back."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from colibri_cli.cli.options import check_output, format_for, refuse_terminal
from colibri_cli.errors import UsageError

if TYPE_CHECKING:
    from colibri_cli.tokenizer import Tokenizer


class TokenFormat(StrEnum):
    """How ids are written."""

    BIN = "bin"
    JSON = "json"
    TEXT = "text"


_ENDINGS = {".bin": TokenFormat.BIN, ".json": TokenFormat.JSON, ".txt": TokenFormat.TEXT}


def tokenize(
    source: Annotated[
        str,
        typer.Argument(metavar="FILE|-", help="UTF-8 text (a .bin with --decode); - is standard input."),
    ] = "-",
    tokenizer: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="A sentencepiece model; default: the built-in bundle's."),
    ] = None,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write here instead of standard output.")] = None,
    output_format: Annotated[
        TokenFormat | None,
        typer.Option(
            "--format",
            help="Default: what FILE's ending says; else text on a terminal and bin in a pipe or file.",
        ),
    ] = None,
    decode: Annotated[bool, typer.Option("--decode", help="Turn ids back into text.")] = False,
    lines: Annotated[bool, typer.Option("--lines", help="Keep line boundaries (JSON, a row a line).")] = False,
) -> None:
    """Turn text into token ids, or ids back into text.

    A .bin file is raw little-endian int32 ids without a header.
    """
    if decode and lines:
        raise UsageError(expected="--decode or --lines", got="both", at="the command line")
    if source == "-" and sys.stdin is not None and sys.stdin.isatty():
        typer.echo("Reading from the terminal; Ctrl-D ends the input.", err=True)

    from colibri_cli import report

    text = decode or (report.on_terminal(output) and not lines)
    default = TokenFormat.TEXT if text else TokenFormat.JSON if lines else TokenFormat.BIN
    chosen = output_format or format_for(output, _ENDINGS, default, strict=True)
    check_output(output)
    if chosen is TokenFormat.BIN and (decode or lines):
        kept = "text" if decode else "line boundaries"
        raise UsageError(expected="--format json or text", got="bin, which holds no " + kept, at="--format")
    if chosen is TokenFormat.BIN and output is None:
        refuse_terminal("bin")
    render = _decoded if decode else _lines if lines else _encoded
    result = render(source, _open(tokenizer), chosen, terminal=report.on_terminal(output))
    report.emit(result, output)


def _open(path: Path | None) -> "Tokenizer":
    from colibri_cli.tokenizer import Tokenizer

    if path is None:
        from colibri_cli.model import builtin_bundle

        path = builtin_bundle() / "tokenizer.model"
    return Tokenizer(path)


def _encoded(source: str, tokenizer: "Tokenizer", chosen: TokenFormat, *, terminal: bool) -> str | bytes:
    from colibri_cli import tokenize_report
    from colibri_cli.formats.inputs import read_text
    from colibri_cli.formats.tokens import tokens_to_bytes

    ids = tokenizer.encode(read_text(source))
    if chosen is TokenFormat.BIN:
        return tokens_to_bytes(ids)
    tokens = tokenize_report.Tokens(ids.tolist(), tokenizer.pieces(ids))
    return (
        tokenize_report.tokens_json(tokens)
        if chosen is TokenFormat.JSON
        else tokenize_report.tokens_text(tokens, terminal=terminal)
    )


def _lines(source: str, tokenizer: "Tokenizer", chosen: TokenFormat, *, terminal: bool) -> str | bytes:
    from colibri_cli import tokenize_report
    from colibri_cli.formats.inputs import read_text, split_lines

    encoded = [tokenizer.encode(line) for line in split_lines(read_text(source))]
    lines = [tokenize_report.Tokens(ids.tolist(), tokenizer.pieces(ids)) for ids in encoded]
    return (
        tokenize_report.lines_json(lines)
        if chosen is TokenFormat.JSON
        else tokenize_report.lines_text(lines, terminal=terminal)
    )


def _decoded(source: str, tokenizer: "Tokenizer", chosen: TokenFormat, *, terminal: bool) -> str | bytes:
    from colibri_cli import tokenize_report
    from colibri_cli.formats.tokens import read_tokens
    from colibri_cli.report import printable

    ids = read_tokens(source)
    text = tokenizer.decode(ids)
    if chosen is TokenFormat.JSON:
        return tokenize_report.decoded_json(ids.tolist(), text)
    if terminal:
        text = "\n".join(map(printable, text.split("\n")))
    return f"{text}\n"
