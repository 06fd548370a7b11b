"""The schemas, and the package's own check of a config against jsonschema's verdict."""

import copy
import json
from dataclasses import fields
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_cli.config import BalanceConfig, ModelConfig, RouterConfig
from colibri_cli.validate import RULES
from colibri_cli.validate.json_parser import parse
from colibri_cli.validate.schema_check import check, load_schema

CONFIG = load_schema("config")
GOOD = json.loads((Path(__file__).parents[1] / "cli/validate_config/good/as_shipped.json").read_text("utf-8"))
PLACES = [(key,) for key in GOOD] + [
    (key, inner) for key in ("router", "balance") for inner in GOOD[key]
] + [("classes", 0), ("classes", 4)]  # fmt: skip
ANYTHING = st.sampled_from(
    [None, True, False, 0, 1, -1, 2, 2.0, 2.5, 31, 32, 64, 1e3, 1024, 1025, 65536, 65537, 1e30, "", "x", "silu",
     "exact", "experts/{i}.bin", "experts/.bin/", "noun", "\x00", "é" * 256, "é" * 257, [], ["a"], ["a", "a"], {},
     {"kind": 1}]
)  # fmt: skip


@pytest.mark.parametrize("name", ["config", "validate-config"])
def test_schemas_are_valid_themselves(name):
    jsonschema.Draft202012Validator.check_schema(load_schema(name))


def parts(schema):
    yield schema
    for inner in [*schema.get("properties", {}).values(), *([schema["items"]] if "items" in schema else [])]:
        yield from parts(inner)


def test_config_schema_uses_only_what_the_check_knows():
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
    for schema in parts(CONFIG):
        assert set(schema) <= known.union(*pairs) | notes
        assert "type" in schema
        assert all(len(pair & set(schema)) in (0, 2) for pair in pairs)
        assert schema.get("additionalProperties", False) is False
        assert ("additionalProperties" in schema) == (schema["type"] == "object")
        assert set(schema.get("required", [])) == set(schema.get("properties", []))


def test_config_schema_and_config_classes_have_the_same_keys():
    properties = CONFIG["properties"]
    assert [field.name for field in fields(ModelConfig)] == list(properties)
    assert [field.name for field in fields(RouterConfig)] == list(properties["router"]["properties"])
    assert [field.name for field in fields(BalanceConfig)] == list(properties["balance"]["properties"])


def test_output_schema_knows_the_rules():
    finding = load_schema("validate-config")["properties"]["findings"]["items"]
    assert finding["properties"]["rule"]["enum"] == list(RULES)


def pointers(config):
    faults, _ = check(parse(json.dumps(config)), CONFIG)
    return {fault.pointer for fault in faults}


def pointers_of_jsonschema(config):
    return {error.json_path for error in jsonschema.Draft202012Validator(CONFIG).iter_errors(config)}


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_missing_value(place):
    config = copy.deepcopy(GOOD)
    *way, last = place
    inner = config[way[0]] if way else config
    del inner[last]
    assert pointers(config) == pointers_of_jsonschema(config)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(PLACES), ANYTHING, min_size=1, max_size=3))
def test_verdict_on_changed_values_is_that_of_jsonschema(changes):
    config = copy.deepcopy(GOOD)
    for (key, *inner), value in changes.items():
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


def test_unknown_key_is_named_where_jsonschema_names_its_object():
    config = {**GOOD, "seed": 1}
    assert pointers(config) == {"$.seed"}
    assert pointers_of_jsonschema(config) == {"$"}


def test_pattern_does_not_forgive_a_last_line_end():
    assert pointers({**GOOD, "artifact": "experts/{i}.bin\n"}) == {"$.artifact"}
