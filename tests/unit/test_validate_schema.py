"""The schemas, and what the check makes of jsonschema's errors: each has its place, none gets lost or is an echo."""

import copy
import json
from dataclasses import fields
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_cli.config import BalanceConfig, ModelConfig, RouterConfig
from colibri_cli.formats.layers import LayerRouter, LayerShared
from colibri_cli.layer_bundle import LayerBundle
from colibri_cli.validate import RULES, validate_text
from colibri_cli.validate.json_parser import parse
from colibri_cli.validate.schema_check import check, load_schema

CONFIG, LAYERS = load_schema("config"), load_schema("layers")
GOOD = json.loads((Path(__file__).parents[1] / "cli/validate_config/good/as_shipped.json").read_text("utf-8"))
PLACES = [(key,) for key in GOOD] + [
    (key, inner) for key in ("router", "balance") for inner in GOOD[key]
] + [("classes", 0), ("classes", 4)]  # fmt: skip
ANYTHING = st.sampled_from(
    [None, True, False, 0, 1, -1, 2, 2.0, 2.5, 31, 32, 64, 1e3, 1024, 1025, 65536, 65537, 1e30, "", "x", "silu",
     "exact", "experts/{i}.bin", "experts/.bin/", "noun", "\x00", "é" * 256, "é" * 257, [], ["a"], ["a", "a"], {},
     {"kind": 1}]
)  # fmt: skip


@pytest.mark.parametrize("name", ["config", "layers", "validate-config"])
def test_schemas_are_valid_themselves(name):
    jsonschema.Draft202012Validator.check_schema(load_schema(name))


def parts(schema):
    yield schema
    for inner in [*schema.get("properties", {}).values(), *([schema["items"]] if "items" in schema else [])]:
        yield from parts(inner)


def test_config_schema_uses_only_what_the_check_has_words_for():
    known = {
        "type",
        "const",
        "enum",
        "pattern",
        "required",
        "properties",
        "additionalProperties",
        "items",
        "uniqueItems",
    }
    pairs = [{"minimum", "maximum"}, {"minLength", "maxLength"}, {"minItems", "maxItems"}]
    notes = {"$schema", "$id", "title", "description"}
    for schema in (*parts(CONFIG), *parts(LAYERS)):
        assert set(schema) <= known.union(*pairs) | notes
        assert "type" in schema
        assert all(len(pair & set(schema)) in (0, 2) for pair in pairs)
        assert schema.get("additionalProperties", False) is False
        assert ("additionalProperties" in schema) == ("object" in schema["type"])
        assert set(schema.get("required", [])) == set(schema.get("properties", []))


def test_config_schema_and_config_classes_have_the_same_keys():
    properties = CONFIG["properties"]
    assert [field.name for field in fields(ModelConfig)] == list(properties)
    assert [field.name for field in fields(RouterConfig)] == list(properties["router"]["properties"])
    assert [field.name for field in fields(BalanceConfig)] == list(properties["balance"]["properties"])
    properties = LAYERS["properties"]
    assert [field.name for field in fields(LayerBundle)] == list(properties)
    assert [field.name for field in fields(LayerRouter)] == list(properties["router"]["properties"])
    assert [field.name for field in fields(LayerShared)] == list(properties["shared"]["properties"])


def test_output_schema_knows_the_rules():
    finding = load_schema("validate-config")["properties"]["findings"]["items"]
    assert finding["properties"]["rule"]["enum"] == list(RULES)


def faults(text):
    return [(fault.pointer, fault.expected, fault.found) for fault in check(parse(text), CONFIG)[0]]


def with_source(key, source):
    """Return the text of a config that has a JSON source text for a value."""
    return json.dumps({**GOOD, key: "@"}, ensure_ascii=False).replace('"@"', source)


def pointers(config):
    return {pointer for pointer, _, _ in faults(json.dumps(config))}


def pointers_of_jsonschema(config):
    return {error.json_path for error in jsonschema.Draft202012Validator(CONFIG).iter_errors(config)}


@pytest.mark.parametrize("place", [place for place in PLACES if place[0] != "classes" or len(place) == 1], ids=str)
def test_missing_key(place):
    config = copy.deepcopy(GOOD)
    *way, key = place
    del (config[way[0]] if way else config)[key]
    assert faults(json.dumps(config)) == [(".".join(["$", *way]), f'the key "{key}"', "none")]


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(PLACES), ANYTHING, min_size=1, max_size=3))
def test_no_error_of_jsonschema_gets_lost_and_none_is_added(changes):
    config = copy.deepcopy(GOOD)
    for (key, *inner), shared in changes.items():
        value = copy.deepcopy(shared)  # another change may go into it
        if not inner:
            config[key] = value
        elif isinstance(config[key], dict) or (isinstance(config[key], list) and len(config[key]) == 5):
            config[key][inner[0]] = value
    found, expected = pointers(config), pointers_of_jsonschema(config)
    # Of repeated elements jsonschema names the array, this check the second of the two; an unknown key is named
    # by its object there.
    classes = config["classes"]
    if isinstance(classes, list) and len({str(name) for name in classes}) < len(classes):
        found = {"$.classes" if pointer.startswith("$.classes[") else pointer for pointer in found}
        expected = {"$.classes" if pointer.startswith("$.classes[") else pointer for pointer in expected}
    assert {pointer.removesuffix(".kind") for pointer in found} == {p.removesuffix(".kind") for p in expected}


@pytest.mark.parametrize(
    ("config", "place"),
    [
        ({"model_type": "olmoe", "hidden_size": 2048}, "config.json:1:16"),
        ({"model_type": "olmoe", "task": "moe-layers"}, None),
        ({"model_type": "olmoe", "schema_version": 1}, None),
        ({"model_type": 5}, None),
        ([{"model_type": "olmoe"}], None),
    ],
    ids=str,
)
def test_a_checkpoints_config_gets_one_finding(config, place):
    found = validate_text(json.dumps(config))
    if place is None:
        assert found
        assert not [finding for finding in found if "colibri pack" in finding.expected]
    else:
        words = "expected a bundle's config, as colibri pack makes it, got a checkpoint's, \"olmoe\" - at $.model_type"
        assert [str(finding) for finding in found] == [f"{place}: {words}"]


def test_unknown_key_is_named_where_jsonschema_names_its_object():
    config = {**GOOD, "seed": 1}
    assert pointers(config) == {"$.seed"}
    assert pointers_of_jsonschema(config) == {"$"}


@pytest.mark.parametrize(("key", "value"), [("artifact", "experts/{i}.bin\n"), ("classes", ["noun\n"])])
def test_pattern_does_not_forgive_a_last_line_end(key, value):
    assert {pointer.removesuffix("[0]") for pointer in pointers({**GOOD, key: value})} == {f"$.{key}"}


def test_every_value_of_a_duplicate_key_is_checked():
    text = with_source("router", '{"kind": 1, "gating": "x", "kind": "topk-softmax", "gating": "exact"}')
    text = '{"router": {"kind": true}, ' + text[1:]
    assert faults(text) == [
        ("$.router.kind", "string", "boolean"),
        ("$.router", 'the key "gating"', "none"),
        ("$.router.kind", "string", "integer"),
        ("$.router.gating", '"exact" or "taylor"', '"x"'),
    ]


@pytest.mark.parametrize(
    ("key", "source", "expected"),
    [
        ("top_k", "9" * 5000, "1 to 1024"),
        ("top_k", "-" + "9" * 4300, "1 to 1024"),
        ("top_k", "1e308", "1 to 1024"),
        ("top_k", "1e400", "integer"),
        ("top_k", "2.5", "integer"),
        ("top_k", "true", "integer"),
        ("schema_version", "9" * 5000, "1"),
        ("schema_version", "true", "integer"),
        ("balance", json.dumps(GOOD["balance"]).replace("1.8", "9" * 5000), "1 to 1024"),
        ("balance", json.dumps(GOOD["balance"]).replace("1.8", "-1e400"), "1 to 1024"),
        ("balance", json.dumps(GOOD["balance"]).replace("1.8", "true"), "number"),
    ],
    ids=lambda value: value[:20],
)
def test_no_number_is_too_odd(key, source, expected):
    assert [fault[1] for fault in faults(with_source(key, source))] == [expected]


@pytest.mark.parametrize("source", ["8", "8.0", "0.8e1", "80e-1"])
def test_an_integer_is_one_however_it_is_written(source):
    assert faults(with_source("n_experts", source)) == []


def test_deepest_nesting_at_a_known_key():
    for source in ("[" * 63 + "]" * 63, '{"a":' * 62 + "{}" + "}" * 62):
        kind = "array" if source[0] == "[" else "object"
        assert faults(with_source("tokenizer", source)) == [("$.tokenizer", "string", kind)]


def test_too_many_elements_that_differ_in_type_are_one_fault_and_soon_found():
    source = f'["a", {", ".join(map(str, range(20_000)))}]'
    assert faults(with_source("classes", source)) == [("$.classes", "1 to 1024 elements", "20001 elements")]


def test_elements_around_a_syntax_error_are_compared_but_not_counted():
    repeated = ("$.classes[2]", "unique values", '"b" again, first at $.classes[0]')
    assert faults(with_source("classes", '["b", 01, "b"]')) == [repeated]
    assert faults(with_source("classes", "[01]")) == []
    assert faults(with_source("classes", "[]")) == [("$.classes", "1 to 1024 elements", "0 elements")]


def test_an_object_around_a_syntax_error_lacks_no_keys():
    assert faults(with_source("router", '{"kind" "exact" "taylor"}')) == []
    assert faults(with_source("router", "{}")) == [
        ("$.router", 'the key "kind"', "none"),
        ("$.router", 'the key "gating"', "none"),
    ]
