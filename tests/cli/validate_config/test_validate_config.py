"""Cases as files: good configs have no findings; a bad one has exactly those in the .txt beside it."""

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from command import colibri

from colibri_cli.config import load_config, read_sound
from colibri_cli.errors import InvalidInput
from colibri_cli.validate import validate_file
from colibri_cli.validate.schema_check import load_schema

HERE = Path(__file__).parent
GOOD = sorted((HERE / "good").glob("*.json"))
BAD = sorted((HERE / "bad").glob("*.json"))
EXPECTED = "".join(case.with_suffix(".txt").read_text("utf-8") for case in BAD)
SCRIPT = HERE.parents[2] / "scripts" / "validate_config.py"


@pytest.mark.parametrize("case", GOOD, ids=lambda case: case.stem)
def test_good_config_has_no_findings(case):
    assert validate_file(case) == []
    assert read_sound(case)["schema_version"] == 1


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.stem)
def test_bad_config_has_the_expected_findings(case, monkeypatch):
    monkeypatch.chdir(case.parent)
    found = "".join(f"{finding}\n" for finding in validate_file(case.name))
    assert found == case.with_suffix(".txt").read_text("utf-8")
    with pytest.raises(InvalidInput):
        load_config(case)


def test_every_expectation_has_its_config():
    assert [path.stem for path in sorted((HERE / "bad").glob("*.txt"))] == [case.stem for case in BAD]


def test_command_reports_all_files_at_once():
    done = colibri("validate-config", *(case.name for case in BAD), cwd=HERE / "bad")
    assert done.stdout.decode() == EXPECTED
    assert done.returncode == 1


def test_script_is_the_same_call():
    names = [case.name for case in BAD]
    done = subprocess.run([sys.executable, SCRIPT, *names], check=False, capture_output=True, cwd=HERE / "bad")
    assert done.stdout.decode() == EXPECTED
    assert done.returncode == 1
    assert done.stderr == b""


def test_command_on_good_files():
    done = colibri("validate-config", *GOOD)
    assert (done.returncode, done.stdout) == (0, b"")
    assert done.stderr.decode() == f"no findings in {len(GOOD)} files\n"


def test_command_reads_standard_input():
    done = colibri("validate-config", "-", input=b"[]")
    assert done.stdout == b"<stdin>:1:1: expected object, got array - at $\n"
    assert done.returncode == 1


def test_command_writes_json():
    done = colibri("validate-config", "--format", "json", *BAD)
    document = json.loads(done.stdout)
    jsonschema.Draft202012Validator(load_schema("validate-config")).validate(document)
    assert document["files"] == [str(case) for case in BAD]
    assert len(document["findings"]) == EXPECTED.count("\n")


@pytest.mark.parametrize("output_format", ["text", "json", "github", "sarif"])
def test_unreadable_file_is_exit_2_and_the_others_are_still_checked(tmp_path, output_format):
    case = HERE / "bad" / "top_level_array.json"
    done = colibri("validate-config", "--format", output_format, "missing.json", case, tmp_path)
    assert done.returncode == 2
    assert b"expected object, got array" in done.stdout or output_format == "json"
    assert b"top_level_array.json" in done.stdout
    message = done.stderr.decode()
    assert "missing.json (no such file or directory)" in message
    assert f"{tmp_path / 'config.json'} (no such file or directory)" in message
    assert "Traceback" not in message


def test_no_file_is_a_usage_error():
    assert colibri("validate-config").returncode == 2


def test_hook_runs_the_command():
    hooks = (HERE.parents[2] / ".pre-commit-hooks.yaml").read_text("utf-8")
    assert "entry: colibri validate-config\n" in hooks


def test_a_bundle_means_its_config(tmp_path):
    (tmp_path / "config.json").write_text("[]")
    found = colibri("validate-config", ".", cwd=tmp_path)
    assert (found.returncode, found.stdout) == (1, b"config.json:1:1: expected object, got array - at $\n")


def test_nothing_read_is_no_success(tmp_path):
    done = colibri("validate-config", "none.json", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(b"Expected ")
