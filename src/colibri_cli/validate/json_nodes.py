"""JSON values that know where they stand in their text."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import NamedTuple

from colibri_cli.validate.json_tokens import printable

_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LONGEST_KEY = 60  # characters of a key in a pointer


class Fault(NamedTuple):
    """Something wrong in a document.

    Attributes
    ----------
    start : int
        Where, in code points from the beginning of the text.
    pointer : str
        The value it concerns, as in ``$.classes[0]``; for a syntax error the innermost value around it.
    expected, found : str
        The contract and the fact.
    rule : str
        "syntax", "duplicate-key", "schema", "consistency" or "files".
    """

    start: int
    pointer: str
    expected: str
    found: str
    rule: str


@dataclass(slots=True)
class Node:
    """A value and where it stands.

    Attributes
    ----------
    kind : str
        JSON's type: "object", "array", "string", "integer", "number", "boolean", "null"; or "damaged" where
        the text is not JSON. As in JSON Schema, a number without a fraction is an integer however it is
        written: 8, 8.0 and 8e0.
    start : int
        The first character, in code points from the beginning of the text.
    source : str
        A scalar's source text, shortened for messages; empty for objects and arrays.
    scalar : str, int, float, bool or None
        The value of a scalar. An integer too long for Python is an infinite float.
    items : list of Node
        An array's elements.
    members : list of Member
        An object's, in order, duplicates too.
    keys : dict of str to int
        An object's keys and where each stands first.
    whole : bool
        No syntax error has swallowed elements or members.
    """

    kind: str
    start: int
    source: str = ""
    scalar: str | float | bool | None = None
    items: list[Node] = field(default_factory=list)
    members: list[Member] = field(default_factory=list)
    keys: dict[str, int] = field(default_factory=dict)
    whole: bool = True

    def plain(self) -> object:
        """Return the value as `json.loads` would; of a duplicate key the last value counts."""
        if self.kind == "object":
            return {member.key: member.value.plain() for member in self.members}
        if self.kind == "array":
            return [item.plain() for item in self.items]
        return self.scalar


class Member(NamedTuple):
    """A key, where its first character stands, and its value."""

    key: str
    start: int
    value: Node


class Lines:
    """Line numbers of a text; lines end with LF or CRLF."""

    def __init__(self, text: str) -> None:
        self.starts = [0, *(match.end() for match in re.finditer("\n", text))]

    def position(self, offset: int) -> tuple[int, int]:
        """Return line and column of an offset, both from 1, the column in code points."""
        line = bisect_right(self.starts, offset)
        return line, offset - self.starts[line - 1] + 1


def child(pointer: str, key: str | int) -> str:
    """Return the pointer to a member or an element of the value at ``pointer``."""
    if isinstance(key, int):
        return f"{pointer}[{key}]"
    if len(key) > _LONGEST_KEY:
        key = key[: _LONGEST_KEY - 1] + "…"
    if _PLAIN_KEY.fullmatch(key):
        return f"{pointer}.{key}"
    return f"{pointer}[{printable(json.dumps(key, ensure_ascii=False))}]"
