"""The forgiving parser against the standard library's: same values, same verdict, and the places right."""

import json
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from colibri_cli.validate.json_nodes import Lines
from colibri_cli.validate.json_parser import parse

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
)
KEYS = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=20
)
# Text made of JSON's own pieces comes close to JSON far more often than random characters do.
PIECES = st.sampled_from(
    ["{", "}", "[", "]", ",", ":", '"', "'", '"a"', '"b":', "1", "-0", "01", "1e5", "true", "NaN", "x", "\\", "\\u00",
     " ", "\n", "\t", "\x00", "\ufeff", "\u00a0", "//", "/*", "*/", "#", "é", "🐦"]
)  # fmt: skip
NEARLY_JSON = st.lists(PIECES, max_size=30).map("".join)


def nodes(node):
    yield node
    for child in [*node.items, *(member.value for member in node.members)]:
        yield from nodes(child)


def accepted(text):
    """Whether the standard library takes the text for JSON, without its extensions and with keys unique."""

    def refuse(name):
        raise ValueError(name)

    def unique(pairs):
        if len(dict(pairs)) < len(pairs):
            raise ValueError("duplicate key")
        return dict(pairs)

    try:
        json.loads(text, parse_constant=refuse, object_pairs_hook=unique)
    except ValueError:
        return False
    return True


@settings(max_examples=150, deadline=None)
@given(VALUES, st.sampled_from([None, 0, 2]), st.booleans())
def test_values_and_places_are_those_of_the_standard_library(value, indent, ascii_only):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    document = parse(text)
    assert document.faults == []
    assert document.balanced
    assert document.root.plain() == json.loads(text)
    decoder = json.JSONDecoder()
    for node in nodes(document.root):
        assert decoder.raw_decode(text, node.start)[0] == node.plain()
        for member in node.members:
            assert decoder.raw_decode(text, member.start)[0] == member.key


@settings(max_examples=400, deadline=None)
@given(NEARLY_JSON)
@example('{"b":"b":1}')
@example("[[}]")
@example('{"b":1}}')
def test_verdict_is_that_of_the_standard_library(text):
    document = parse(text)
    assert (document.faults == []) == accepted(text)
    assert all(0 <= fault.start <= len(text) for fault in document.faults)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=40))
def test_any_bytes_give_a_document(data):
    assert parse(data).faults or accepted(data.decode())


@settings(max_examples=50, deadline=None)
@given(st.text("ab🐦\n\r\t", max_size=30), st.data())
def test_position_counts_lines_and_code_points(text, data):
    offset = data.draw(st.integers(0, len(text)))
    before = text[:offset].split("\n")
    assert Lines(text).position(offset) == (len(before), len(before[-1]) + 1)


@pytest.mark.parametrize("text", ["[" * 100_000, "[" * 100_000 + "]" * 100_000, '{"a":' * 100_000])
def test_deep_nesting_is_one_fault(text):
    (fault,) = parse(text).faults
    assert (fault.expected, fault.found) == ("at most 64 levels of nesting", "more")


def test_deepest_nesting():
    assert parse("[" * 64 + "]" * 64).faults == []


def test_too_deep_a_value_does_not_hide_the_rest():
    document = parse('{"a": ' + "[" * 100 + "]" * 100 + ', "b": 01}')
    assert [fault.pointer for fault in document.faults] == ["$.a" + "[0]" * 63, "$.b"]


@pytest.mark.parametrize(
    ("source", "kind", "value"),
    [
        ("8", "integer", 8),
        ("8.0", "integer", 8),
        ("1e3", "integer", 1000),
        ("-0", "integer", 0),
        ("1.5e0", "number", 1.5),
        ("1e999", "number", float("inf")),
        ("9" * 5000, "integer", float("inf")),
    ],
)
def test_numbers(source, kind, value):
    document = parse(source)
    assert (document.faults, document.root.kind, document.root.scalar) == ([], kind, value)


def test_pointer_of_a_hostile_key_is_short_and_printable():
    document = parse('{"' + "k" * 100_000 + '": 01, "a\\u001b[31m": 01, "\\ud83d\\udc26": 01}')
    pointers = [fault.pointer for fault in document.faults]
    assert pointers[0] == '$["' + "k" * 59 + '…"]'
    assert re.fullmatch(r"[ -~]+", pointers[1])
    assert pointers[2] == '$["🐦"]'
