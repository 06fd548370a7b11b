"""The JSON Schemas (draft 2020-12) that the package ships, and the check of a text against the config's.

The check is written here, for the keywords that that schema uses, and serves ``colibri validate-config`` and every
`load_config` alike. The library jsonschema would need as much code around it, to turn its errors into places and
to leave out what a syntax error may have swallowed; and importing it was measured at 80 to 130 ms, which every
``colibri infer`` would pay. The tests hold this check to jsonschema's verdict.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colibri_cli.validate.json_nodes import Fault, child
from colibri_cli.validate.json_tokens import shown

if TYPE_CHECKING:
    from collections.abc import Iterable

    from colibri_cli.validate.json_nodes import Node
    from colibri_cli.validate.json_parser import Document

Schema = Mapping[str, Any]
SCHEMAS = Path(__file__).parents[1] / "schema"

# By type: the two bounds, which a schema gives together, and their unit.
_RANGES = {
    "integer": ("minimum", "maximum", ""),
    "number": ("minimum", "maximum", ""),
    "string": ("minLength", "maxLength", " characters"),
    "array": ("minItems", "maxItems", " elements"),
}
_SUGGESTIONS = 100  # objects with more members than this get none: they are slow to find


def load_schema(name: str) -> Schema:
    """Return the schema ``<name>.schema.json``."""
    schema: Schema = json.loads((SCHEMAS / f"{name}.schema.json").read_bytes())
    return schema


def check(document: Document, schema: Schema) -> tuple[list[Fault], dict[str, Node]]:
    """Check a document against a schema.

    Returns
    -------
    faults : list of Fault
        Everything that breaks the schema and is not the consequence of a syntax error.
    sound : dict of str to Node
        By pointer, the values that obey the schema themselves, whatever is inside them.
    """
    checker = _Checker(document)
    checker.value(document.root, schema, "$")
    return checker.faults, checker.sound


class _Checker:
    def __init__(self, document: Document) -> None:
        self.faults: list[Fault] = []
        self.sound: dict[str, Node] = {}
        self._balanced = document.balanced
        self._reported = {fault.start for fault in document.faults}

    def value(self, node: Node, schema: Schema, pointer: str) -> None:
        if node.kind == "damaged" or (not node.whole and node.kind != schema["type"]):
            return
        broken = _broken(node, schema)
        if broken is not None:
            self._fault(node.start, pointer, *broken)
            return
        if node.whole:
            self.sound[pointer] = node
        if node.kind == "object":
            self._members(node, schema, pointer)
        if node.kind == "array":
            self._elements(node, schema, pointer)

    def _fault(self, start: int, pointer: str, expected: str, found: str) -> None:
        self.faults.append(Fault(start, pointer, expected, found, "schema"))

    def _members(self, node: Node, schema: Schema, pointer: str) -> None:
        properties: Mapping[str, Schema] = schema.get("properties", {})
        for member in node.members:
            here = child(pointer, member.key)
            if member.key in properties:
                self.value(member.value, properties[member.key], here)
            elif self._balanced and member.start not in self._reported:
                expected = "a known key"
                if len(node.members) <= _SUGGESTIONS:
                    expected += _suggestion(member.key, properties)
                self._fault(member.start, here, expected, shown(json.dumps(member.key, ensure_ascii=False)))
        if node.whole and self._balanced:
            for key in schema.get("required", ()):
                if key not in node.keys:
                    self._fault(node.start, pointer, f'the key "{key}"', "none")

    def _elements(self, node: Node, schema: Schema, pointer: str) -> None:
        first: dict[object, int] = {}
        for index, item in enumerate(node.items):
            here = child(pointer, index)
            self.value(item, schema.get("items", {}), here)
            if schema.get("uniqueItems") and here in self.sound and item.scalar is not None:
                if item.scalar in first:
                    found = f"{item.source} again, first at {child(pointer, first[item.scalar])}"
                    self._fault(item.start, here, "unique values", found)
                first.setdefault(item.scalar, index)


def _suggestion(key: str, known: Iterable[str]) -> str:
    from difflib import get_close_matches  # not needed to load a sound config

    similar = get_close_matches(key[:64], known, n=1)
    return f' (similar: "{similar[0]}")' if similar else ""


def _broken(node: Node, schema: Schema) -> tuple[str, str] | None:
    """Return what was expected and what was found if a value itself, without its parts, breaks the schema."""
    kind, found = schema["type"], node.source or node.kind
    if node.kind != kind and (node.kind, kind) != ("integer", "number"):
        return kind, node.kind
    allowed = [schema["const"]] if "const" in schema else schema.get("enum", [node.scalar])
    if node.scalar not in allowed:
        *others, last = map(json.dumps, allowed)
        return f"{', '.join(others)} or {last}" if others else last, found
    if kind in _RANGES:
        lowest, highest, unit = _RANGES[kind]
        size: Any = {"array": len(node.items), "string": len(str(node.scalar))}.get(kind, node.scalar)
        if lowest in schema and node.whole and not schema[lowest] <= size <= schema[highest]:
            return f"{schema[lowest]} to {schema[highest]}{unit}", f"{size}{unit}" if unit else found
    # Where Python's $ also matches in front of a last line end, JSON Schema's does not.
    pattern: str = schema.get("pattern", "")
    if pattern and not re.search(re.sub(r"\$$", r"\\Z", pattern), str(node.scalar)):
        return f"a string that matches {pattern}", found
    return None
