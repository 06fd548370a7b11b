"""JSON text to tokens, forgiving: what is not JSON becomes a token, or a gap, that carries its flaws."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

_LEXEME = re.compile(
    r"""(?P<space>[ \t\r\n]+)
      | (?P<mark>[{}\[\]:,])
      | (?P<string>"[^"\\\r\n]*(?:\\[^\r\n][^"\\\r\n]*)*(?P<double>")?
                  |'[^'\\\r\n]*(?:\\[^\r\n][^'\\\r\n]*)*(?P<single>')?)
      | (?P<comment>//[^\r\n]* | \#[^\r\n]* | /\*.*?(?:\*/|(?P<endless>\Z)))
      | (?P<stray>[\s\x00-\x1f\x7f\ufeff\u200b]+)
      | (?P<word>(?:(?!//|/\*)[^\s\x00-\x1f\x7f\ufeff\u200b{}\[\]:,"'])+)""",
    re.VERBOSE | re.DOTALL,
)
_LINE = re.compile(r"[^\r\n]*")
_SPECIAL = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\.|[\x00-\x1f]", re.DOTALL
)
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_ESCAPES = {
    '"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t",
}  # fmt: skip
_SHOWN = 60  # characters of the source that a message repeats


class Flaw(NamedTuple):
    """What should have stood at ``start``, counted in code points from the beginning of the text."""

    start: int
    expected: str
    found: str


class Token(NamedTuple):
    """A lexeme.

    Attributes
    ----------
    kind : str
        One of ``{ } [ ] : ,``; "string"; "unclosed", a string without its last quote; "word", which is a
        number, a literal or anything else; "end".
    start, stop : int
        Code points ``[start, stop)`` of the text.
    value : str or None
        What a string says; None for other kinds and for a string whose content is uncertain.
    flaws : tuple of Flaw
        What is wrong with the string; of the end: a comment without an end, which may have hidden anything.
    gap : tuple of Flaw
        What is wrong between this token and the one in front of it: comments, odd white space.
    """

    kind: str
    start: int
    stop: int
    value: str | None = None
    flaws: tuple[Flaw, ...] = ()
    gap: tuple[Flaw, ...] = ()


def tokenize(text: str) -> list[Token]:
    """Split all of ``text``; the last token has the kind "end" and stands just after the last lexeme."""
    tokens: list[Token] = []
    gap: list[Flaw] = []
    swallowed: list[Flaw] = []
    at = last = 0
    while match := _LEXEME.match(text, at):
        start, at = match.span()
        if match.lastgroup == "comment":
            if match["endless"] is None:
                gap.append(Flaw(start, "no comment", shown(match[0])))
            else:
                swallowed.append(Flaw(start, "no comment, and '*/' where one ends", shown(match[0])))
        elif match.lastgroup == "stray":
            gap.append(Flaw(start, "a space, a tab or a line end", f"U+{ord(match[0][0]):04X}"))
        elif match.lastgroup != "space":
            if match.lastgroup == "string":
                token = _string(text, match, tuple(gap))
            else:
                token = Token(match["mark"] or "word", start, at, gap=tuple(gap))
            tokens.append(token)
            at = last = token.stop
            gap.clear()
    tokens.append(Token("end", last, last, flaws=tuple(swallowed), gap=tuple(gap)))
    return tokens


def shown(text: str) -> str:
    """Return source text fit for a message: one line, printable, not too long."""
    return printable(text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…")


def printable(text: str) -> str:
    """Return a text with what would not print, or would drive a terminal, as escapes."""
    return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)


def _string(text: str, match: re.Match[str], gap: tuple[Flaw, ...]) -> Token:
    start, stop = match.span()
    if match["double"] is None and match["single"] is None:
        return _unclosed_string(text, start, gap)
    body = text[start + 1 : stop - 1]
    flaws = [] if match["double"] else [Flaw(start, "double quotes", "single quotes")]
    certain = True
    parts, done = [], 0
    for special in _SPECIAL.finditer(body):
        meant, expected = _meaning(special[0], match["single"])
        if expected is not None:
            escape = special[0][0] == "\\"
            found = shown(special[0]) if escape else f"U+{ord(special[0]):04X}"
            flaws.append(Flaw(start + 1 + special.start(), expected, found))
            certain = False
        parts += [body[done : special.start()], meant]
        done = special.end()
    value = "".join([*parts, body[done:]])
    # Bytes that are not UTF-8 were decoded to halves of surrogate pairs, and reported then.
    certain = certain and not _HALF_PAIR.search(value)
    return Token("string", start, stop, value if certain else None, tuple(flaws), gap)


def _meaning(special: str, single_quote: str | None) -> tuple[str, str | None]:
    """Return what an escape or a control character stands for, and what was expected if it is wrong."""
    if special[0] != "\\":
        return special, f"the escape {json.dumps(special)[1:-1]}"
    if len(special) == 12:
        high, low = int(special[2:6], 16), int(special[8:], 16)
        return chr(0x10000 + ((high & 0x3FF) << 10) + (low & 0x3FF)), None
    if len(special) == 6:
        code = int(special[2:], 16)
        return chr(code), "both halves of a surrogate pair" if 0xD800 <= code < 0xE000 else None
    if special[1] == single_quote:
        return special[1], None  # the single quotes are the flaw
    return _ESCAPES.get(special[1], special), None if special[1] in _ESCAPES else (
        r"one of the escapes \" \\ \/ \b \f \n \r \t \uXXXX"
    )


def _unclosed_string(text: str, start: int, gap: tuple[Flaw, ...]) -> Token:
    """Close a string on its own line, in front of the punctuation that most likely follows it."""
    match = _LINE.match(text, start + 1)
    line = match[0] if match else ""
    body = line.rstrip(" \t,{[")
    if "{" not in body and "[" not in body:
        body = body.rstrip(" \t,]}")
    stop = start + 1 + len(body)
    flaw = Flaw(start, "a closing quote on the same line", shown(text[start:stop]))
    return Token("unclosed", start, stop, None, (flaw,), gap)
