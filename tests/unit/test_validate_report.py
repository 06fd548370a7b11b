"""Findings in their four formats."""

import json
from urllib.parse import unquote

import jsonschema
import pytest

from colibri_cli import __version__
from colibri_cli.validate import RULES, Finding, Validation
from colibri_cli.validate.report import FORMATS, render
from colibri_cli.validate.schema_check import load_schema

FINDINGS = [
    Finding("a b/config.json", 12, 15, "$.artifact", "string", "array", "schema"),
    Finding("/x/50%,:é.json", 1, 1, '$["50%\\r,:"]', "a known key", '"50%\r\n,:"', "syntax"),
]
FOUND = Validation([finding.file for finding in FINDINGS], FINDINGS, [])
NOTHING = Validation(["config.json"], [], [])


def test_text():
    lines = render(FOUND, "text").splitlines()
    assert lines[0] == "a b/config.json:12:15: expected string, got array - at $.artifact"
    assert render(NOTHING, "text") == ""


def test_json_has_the_findings_and_obeys_its_schema():
    validator = jsonschema.Draft202012Validator(load_schema("validate-config"))
    for validation in (FOUND, NOTHING):
        document = json.loads(render(validation, "json"))
        validator.validate(document)
        assert document["files"] == validation.files
    document = json.loads(render(FOUND, "json"))
    assert [Finding(**finding) for finding in document["findings"]] == FINDINGS


def test_github_commands_are_one_line_each_and_can_be_read_back():
    lines = render(FOUND, "github").splitlines()
    assert lines[0] == (
        "::error file=a b/config.json,line=12,col=15,title=schema::expected string, got array - at $.artifact"
    )
    _, properties, message = lines[1].split("::")
    read = dict(part.split("=") for part in properties.removeprefix("error ").split(","))
    assert unquote(read["file"]) == FINDINGS[1].file
    assert unquote(message) == FINDINGS[1].message
    assert render(NOTHING, "github") == ""


def test_sarif():
    log = json.loads(render(FOUND, "sarif"))
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]
    driver = run["tool"]["driver"]
    assert driver["version"] == __version__
    assert [rule["id"] for rule in driver["rules"]] == list(RULES)
    assert run["columnKind"] == "unicodeCodePoints"
    for result, finding in zip(run["results"], FINDINGS, strict=True):
        assert driver["rules"][result["ruleIndex"]]["id"] == result["ruleId"] == finding.rule
        assert result["message"]["text"] == finding.message
        place = result["locations"][0]["physicalLocation"]
        assert place["region"] == {"startLine": finding.line, "startColumn": finding.column}
    uris = [r["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for r in run["results"]]
    assert uris == ["a%20b/config.json", "file:///x/50%25%2C%3A%C3%A9.json"]
    assert json.loads(render(NOTHING, "sarif"))["runs"][0]["results"] == []


@pytest.mark.parametrize("output_format", ["json", "sarif"])
def test_machine_formats_are_ascii(output_format):
    assert output_format in FORMATS
    assert render(FOUND, output_format).isascii()
