"""The JSON Schemas (draft 2020-12) that the package ships, and the check of a text against the config's.

The library jsonschema checks. Here its errors get their words and their places in the text, and those that a syntax
error may have caused are left out. The words are those for the keywords that the config's schema uses.
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
    from collections.abc import Iterable, Iterator

    from jsonschema.exceptions import ErrorTree, ValidationError

    from colibri_cli.validate.json_nodes import Node
    from colibri_cli.validate.json_parser import Document

Schema = Mapping[str, Any]
TASKS = {"token-classification": "config", "moe-layers": "layers"}  # and the schemas of their configs
SCHEMAS = Path(__file__).parents[1] / "schema"

_BOUNDS = ("minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems")
# What can be wrong with a value itself, without its parts; the first of them is reported.
_KEYWORDS = ("type", "const", "enum", *_BOUNDS, "pattern")
_SUGGESTIONS = 100  # objects with more members than this get none: they are slow to find


def load_schema(name: str) -> Schema:
    """Return the schema ``<name>.schema.json``."""
    schema: Schema = json.loads((SCHEMAS / f"{name}.schema.json").read_bytes())
    return schema


def schema_of(document: Document) -> Schema:
    """Return the schema of a config's task; of an unknown one, that most of whose keys the config has.

    Such a config is told all tasks, and whatever else is wrong with it.
    """
    keys = document.root.keys
    tasks = {m.value.scalar for m in document.root.members if m.key == "task" and m.value.kind == "string"}
    schemas = {task: load_schema(name) for task, name in TASKS.items() if not tasks & TASKS.keys() or task in tasks}
    schema = max(schemas.values(), key=lambda schema: len(keys & schema["properties"].keys()))
    if len(schemas) == 1:
        return schema
    task = schema["properties"]["task"]
    known = {key: value for key, value in task.items() if key != "const"} | {"enum": list(TASKS)}
    return {**schema, "properties": {**schema["properties"], "task": known}}


def check(document: Document, schema: Schema) -> tuple[list[Fault], dict[str, Node]]:
    """Check a document against a schema.

    Returns
    -------
    faults : list of Fault
        Everything that breaks the schema and is not the consequence of a syntax error.
    sound : dict of str to Node
        By pointer, the values that obey the schema themselves, whatever is inside them.
    """
    places = _Places(document)
    places.value(document.root, schema, places.errors(document.root, schema), "$")
    return places.faults, places.sound


class _Places:
    """A walk over a document along its schema and jsonschema's errors."""

    def __init__(self, document: Document) -> None:
        from jsonschema import Draft202012Validator, validators

        ours = {"pattern": _pattern, "uniqueItems": _unique_items}
        self._validator = validators.extend(Draft202012Validator, ours)  # type: ignore[no-untyped-call] # its stub
        self._balanced = document.balanced
        self._reported = {fault.start for fault in document.faults}
        self.faults: list[Fault] = []
        self.sound: dict[str, Node] = {}

    def errors(self, node: Node, schema: Schema) -> ErrorTree:
        from jsonschema.exceptions import ErrorTree

        return ErrorTree(self._validator(schema).iter_errors(node.plain()))

    def value(self, node: Node, schema: Schema, tree: ErrorTree, pointer: str) -> None:
        if node.kind == "damaged":
            return
        if node.kind in _types(schema):
            tree.errors.pop("type", None)  # an integer too long for Python is an infinite float; its bounds refuse it
        if node.whole:
            keyword = next((keyword for keyword in _KEYWORDS if keyword in tree.errors), None)
            if keyword is not None:
                self._fault(node.start, pointer, *_words(keyword, node, schema))
                return
            self.sound[pointer] = node
        self._members(node, schema, tree, pointer)
        if "items" in schema:
            self._elements(node, schema["items"], tree, pointer)

    def _fault(self, start: int, pointer: str, expected: str, found: str) -> None:
        self.faults.append(Fault(start, pointer, expected, found, "schema"))

    def _members(self, node: Node, schema: Schema, tree: ErrorTree, pointer: str) -> None:
        properties: Mapping[str, Schema] = schema.get("properties", {})
        last = {member.key: member for member in node.members}  # of a duplicate key, the one jsonschema was shown
        for member in node.members:
            key, start, value = member
            here = child(pointer, key)
            if key in properties:
                inner = tree[key] if member is last[key] else self.errors(value, properties[key])
                self.value(value, properties[key], inner, here)
            elif "additionalProperties" in tree.errors and self._balanced and start not in self._reported:
                similar = _suggestion(key, properties) if len(node.members) <= _SUGGESTIONS else ""
                self._fault(start, here, f"a known key{similar}", shown(json.dumps(key, ensure_ascii=False)))
        if "required" in tree.errors and self._balanced and node.whole:
            for key in schema["required"]:
                if key not in node.keys:
                    self._fault(node.start, pointer, f'the key "{key}"', "none")

    def _elements(self, node: Node, schema: Schema, tree: ErrorTree, pointer: str) -> None:
        for index, item in enumerate(node.items):
            here = child(pointer, index)
            self.value(item, schema, tree[index], here)
            repeated = tree[index].errors.get("uniqueItems")
            if repeated is not None and here in self.sound:
                found = f"{item.source} again, first at {child(pointer, repeated.validator_value)}"
                self._fault(item.start, here, "unique values", found)


def _pattern(_validator: object, pattern: str, instance: object, _schema: Schema) -> Iterator[ValidationError]:
    """Check a pattern; jsonschema's own lets ``$`` match in front of a last line end, which JSON Schema does not."""
    from jsonschema.exceptions import ValidationError

    if isinstance(instance, str) and not re.search(re.sub(r"\$$", r"\\Z", pattern), instance):
        yield ValidationError("no match")


def _unique_items(_validator: object, unique: bool, instance: object, _schema: Schema) -> Iterator[ValidationError]:
    """Yield an error for each repeated string, with the index of the first as its ``validator_value``.

    jsonschema's own check does not tell which elements they are, and takes minutes where thousands differ in type.
    """
    from jsonschema.exceptions import ValidationError

    first: dict[str, int] = {}
    for index, item in enumerate(instance if unique and isinstance(instance, list) else ()):
        if isinstance(item, str) and first.setdefault(item, index) != index:
            yield ValidationError("repeated", path=[index], validator_value=first[item])


def _suggestion(key: str, known: Iterable[str]) -> str:
    from difflib import get_close_matches  # not needed to load a sound config

    similar = get_close_matches(key[:64], known, n=1)
    return f' (similar: "{similar[0]}")' if similar else ""


def _types(schema: Schema) -> list[str]:
    types = schema["type"]
    return [types] if isinstance(types, str) else types


def _words(keyword: str, node: Node, schema: Schema) -> tuple[str, str]:
    """Return what a keyword expects and what was found."""
    found = node.source or node.kind
    if keyword == "type":
        types = _types(schema)
        return " or ".join(types), found if (types, node.kind) == (["integer"], "number") else node.kind
    if keyword == "pattern":
        return f"a string that matches {schema['pattern']}", found
    if keyword in ("const", "enum"):
        *others, last = map(json.dumps, schema.get("enum", [schema.get("const")]))
        return f"{', '.join(others)} or {last}" if others else last, found
    lowest, highest = (schema[bound + keyword[3:]] for bound in ("min", "max"))  # a schema gives both
    if keyword in ("minItems", "maxItems"):
        return f"{lowest} to {highest} elements", f"{len(node.items)} elements"
    if keyword in ("minLength", "maxLength"):
        return f"{lowest} to {highest} characters", f"{len(str(node.scalar))} characters"
    return f"{lowest} to {highest}", found
