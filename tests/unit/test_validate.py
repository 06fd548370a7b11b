"""Findings as the library returns them: files of a bundle, unreadable configs, damaged text."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_cli.errors import UsageError
from colibri_cli.validate import LARGEST_CONFIG, Finding, validate_file, validate_files, validate_text

CASES = Path(__file__).parents[1] / "cli" / "validate_config"
SHIPPED = Path(__file__).parents[2] / "models" / "config.json"
TEXT = SHIPPED.read_text("utf-8")
SIZES = {
    "vocab_size": 7, "hidden_size": 3, "intermediate_size": 2, "n_experts": 2, "top_k": 1, "n_classes": 5, "context": 1,
}  # fmt: skip
FILES = {
    "tokenizer.model": 1,
    "embedding.bin": 4 * 7 * 3,
    "context.bin": 4 * 3 * 3 * 3,
    "router_weights.bin": 4 * 2 * 3,
    "head.bin": 4 * (5 * 3 + 5),
    "experts/expert_0.bin": 4 * (2 * 3 + 2 + 3 * 2 + 3),
    "experts/expert_1.bin": 4 * (2 * 3 + 2 + 3 * 2 + 3),
}


@pytest.fixture
def bundle(tmp_path):
    """The smallest bundle whose sizes all differ, one key a line."""
    (tmp_path / "experts").mkdir()
    for name, size in FILES.items():
        (tmp_path / name).write_bytes(bytes(size))
    return write(tmp_path, {})


def write(directory, changes):
    config = {**json.loads(TEXT), **SIZES, **changes}
    config["balance"]["candidates"] = 2
    (directory / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return directory


def files(bundle):
    return [(f.pointer, f.expected, f.found) for f in validate_file(bundle / "config.json", check_files=True)]


def test_shipped_bundle_is_sound():
    assert validate_file(SHIPPED, check_files=True) == []


def test_files_of_a_sound_bundle(bundle):
    assert files(bundle) == []


@pytest.mark.parametrize(
    ("name", "pointer"),
    [
        ("embedding.bin", "$.vocab_size"),
        ("context.bin", "$.context"),
        ("router_weights.bin", "$.n_experts"),
        ("head.bin", "$.n_classes"),
        ("experts/expert_1.bin", "$.artifact"),
    ],
)
@pytest.mark.parametrize("change", [-1, 1, 4])
def test_file_of_another_size(bundle, name, pointer, change):
    (bundle / name).write_bytes(bytes(FILES[name] + change))
    assert files(bundle) == [(pointer, f"{FILES[name]} bytes in {name}", f"{FILES[name] + change} bytes")]


@pytest.mark.parametrize("name", FILES)
def test_missing_file(bundle, name):
    (bundle / name).unlink()
    ((_, expected, found),) = files(bundle)
    assert (expected, found) == (f"the file {name}", "no such file or directory")


def test_finding_about_a_file_stands_at_the_value_of_its_key(bundle):
    (bundle / "head.bin").unlink()
    (finding,) = validate_file(bundle / "config.json", check_files=True)
    line = (bundle / "config.json").read_text("utf-8").splitlines()[finding.line - 1]
    assert (line[: finding.column - 1], finding.rule) == (' "n_classes": ', "files")


def test_no_expert_at_all_is_one_finding(bundle):
    for expert in (bundle / "experts").iterdir():
        expert.unlink()
    expected = "2 expert files, experts/expert_0.bin to experts/expert_1.bin"
    assert files(bundle) == [("$.artifact", expected, "none of them")]


def test_what_is_not_a_file(bundle):
    (bundle / "head.bin").unlink()
    (bundle / "head.bin").mkdir()
    (bundle / "embedding.bin").unlink()
    os.mkfifo(bundle / "embedding.bin")
    assert files(bundle) == [
        ("$.vocab_size", "the file embedding.bin", "a pipe or a device"),
        ("$.n_classes", "the file head.bin", "a directory"),
    ]


def test_no_context_needs_no_mixer(bundle):
    (bundle / "context.bin").unlink()
    assert files(write(bundle, {"context": 0})) == []


def test_gated_experts_are_larger(bundle):
    write(bundle, {"gated": True, "activation": "silu"})
    size = 4 * (4 * 3 + 4 + 3 * 2 + 3)
    for expert in (0, 1):
        (bundle / f"experts/expert_{expert}.bin").write_bytes(bytes(size))
    assert files(bundle) == []


def test_files_are_checked_as_far_as_the_config_is_sound(bundle):
    (bundle / "head.bin").unlink()
    (bundle / "experts/expert_1.bin").unlink()
    assert files(write(bundle, {"hidden_size": "3", "dtype": "int8"})) == [
        ("$.hidden_size", "integer", "string"),
        ("$.dtype", '"float32"', '"int8"'),
        ("$.artifact", "the file experts/expert_1.bin", "no such file or directory"),
    ]


def test_a_path_that_leaves_the_bundle_is_not_looked_at(bundle):
    assert files(write(bundle, {"tokenizer": "../none", "artifact": "experts/../../{i}.bin"})) == [
        ("$.tokenizer", "a path inside the bundle", "../none"),
        ("$.artifact", "a path inside the bundle", "experts/../../{i}.bin"),
    ]


def test_files_need_a_directory():
    with pytest.raises(UsageError, match="--files"):
        validate_file("-", check_files=True)


def test_missing_config_and_directory(tmp_path):
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(UsageError):
            validate_file(path)


def test_unreadable_files_do_not_stop_the_others(tmp_path):
    bad = CASES / "bad" / "top_level_array.json"
    validation = validate_files([tmp_path / "a.json", bad, tmp_path / "b.json"])
    assert [finding.file for finding in validation.findings] == validation.files == [str(bad)]
    with pytest.raises(UsageError) as raised:
        validation.raise_unreadable()
    assert "a.json" in str(raised.value)
    assert "b.json" in str(raised.value)


def test_too_large_a_file_is_a_finding(tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(b" " * (LARGEST_CONFIG + 1))
    (finding,) = validate_file(path)
    assert (finding.line, finding.column, finding.expected) == (1, 1, f"at most {LARGEST_CONFIG:,} bytes")
    with path.open("r+b") as stream:
        stream.truncate(1 << 40)  # sparse: must not be read
    assert len(validate_file(path)) == 1


def test_text_form():
    finding = Finding("config.json", 12, 15, "$.artifact", "string", "array", "schema")
    assert str(finding) == "config.json:12:15: expected string, got array - at $.artifact"


def test_hostile_file_name_prints_on_one_line(tmp_path):
    path = os.fsencode(tmp_path) + b"/a\n\x1b[31m\xff.json"
    Path(os.fsdecode(path)).write_text("[]", encoding="utf-8")
    (finding,) = validate_file(os.fsdecode(path))
    assert str(finding).isprintable()
    assert str(finding).endswith("a\\u000a\\u001b[31m\ufffd.json:1:1: expected object, got array - at $")


def test_text_and_bytes_are_alike():
    assert validate_text(TEXT) == validate_text(TEXT.encode()) == []
    assert validate_text("\ufeff" + TEXT) == validate_text(b"\xef\xbb\xbf" + TEXT.encode()) != []
    assert [f.found for f in validate_text(TEXT.replace("noun", "\ud83d"))] == ["0xED 0xA0 0xBD"]


def is_json(text):
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


LAYOUTS = st.sampled_from([TEXT, json.dumps(json.loads(TEXT)), TEXT.replace("\n", "\r\n")])
CHARACTERS = st.sampled_from("{}[],:\"'\\/#-+.0xe \n\t\x00\ufeff\u00e9") | st.characters(exclude_categories=["Cs"])


@settings(max_examples=300, deadline=None)
@given(LAYOUTS, st.data())
def test_one_damaged_character_is_found_and_has_few_echoes(text, data):
    at = data.draw(st.integers(0, len(text) - 1))
    insert = data.draw(st.just("") | CHARACTERS)
    damaged = text[:at] + insert + text[at + data.draw(st.integers(0 if insert else 1, 1)) :]
    findings = validate_text(damaged)
    if not is_json(damaged):
        assert 1 <= len(findings) <= 4
        assert any(finding.rule == "syntax" for finding in findings)


def test_damage_does_not_hide_what_stands_elsewhere():
    text = TEXT.replace('"n_experts": 8', "\"n_experts\": '8'").replace('"top_k": 2,', '"top_k": 2')
    text = text.replace('"window": 64', '"window": 0')
    assert [(f.pointer, f.rule) for f in validate_text(text)] == [
        ("$.n_experts", "syntax"),
        ("$.n_experts", "schema"),
        ("$", "syntax"),
        ("$.balance.window", "schema"),
    ]
