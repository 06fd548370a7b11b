"""docs/benchmarks.md is what its generator makes of the committed run, and the generator leaves nothing out."""

import importlib.util
import json
import subprocess
import sys
from copy import deepcopy
from importlib.resources import files
from itertools import pairwise
from pathlib import Path

import jsonschema
import pytest

from colibri_cli.bench.comparison import Baseline
from colibri_cli.bench.report import duration

ROOT = Path(__file__).parents[2]
SCRIPT, RUN = ROOT / "scripts" / "benchmarks_page.py", ROOT / "docs" / "benchmarks" / "results.json"


@pytest.fixture(scope="module")
def generator():
    spec = importlib.util.spec_from_file_location("benchmarks_page", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run():
    return json.loads(RUN.read_text("utf-8"))


def test_the_page_is_the_generators():
    done = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_run_is_one_of_this_bench(run):
    schema = json.loads(files("colibri_cli").joinpath("schema/bench.schema.json").read_text())
    jsonschema.validate(run, schema)
    assert Baseline.read(RUN).times


def test_every_time_error_and_loss_is_on_the_page(generator, run):
    text = generator.page(run, "## What did not help\n\nthis\n")
    for case in run["cases"]:
        for arm in case["arms"]:
            assert (duration(arm["p50_ns"]) if arm["status"] == "timed" else arm["reason"]) in text
        assert all(f" {arm['rms_error']:.1e}" in text for arm in run["cases"][-1]["arms"] if "rms_error" in arm)
    assert all(f"- {cell['case']}, " in text for cell in run["behind"])
    assert all(f"### {shape['name']}: " in text for shape in run["shapes"])
    assert text.endswith("## What did not help\n\nthis\n")


def test_losses_wrong_and_failed_arms_are_told(generator, run):
    changed = deepcopy(run)
    changed["behind"] = [{"case": "x-int8-1", "threads": 2, "rival": "ggml q8_0", "ahead": 0.501}]
    arms = changed["cases"][0]["arms"]
    for arm, status in zip(arms, ("wrong", "failed"), strict=False):
        arm |= {"status": status, "reason": f"it is {status}"}
        del arm["p50_ns"]
    text = generator.page(changed, "")
    assert "Behind in 1 of these cells:\n\n- x-int8-1, 2 threads: 0.50 of ggml q8_0\n" in text
    assert f"{arms[0]['name']}, wrong: it is wrong.\n" in text
    assert f"{arms[1]['name']}, failed: it is failed.\n" in text
    changed["behind"] = []
    assert "Behind in none of these cells." in generator.page(changed, "")


def test_the_command_repeats_the_run(generator, run):
    words = generator._command(run).split()
    assert words[:2] == ["colibri", "bench"]
    assert words[words.index("--against") + 1] == ",".join(run["against"])
    assert [b for a, b in pairwise(words) if a == "--shape"] == [s["name"] for s in run["shapes"]]
    shrunk = {**run, "shapes": [{**run["shapes"][0], "name": "deepseek-v3-of-16"}]}
    assert "--shape deepseek-v3 --experts 16 --" in generator._command(shrunk)


def test_a_stale_page_is_an_exit_code(generator, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(generator, "PAGE", tmp_path / "benchmarks.md")
    monkeypatch.setattr(sys, "argv", ["benchmarks_page.py", "--check"])
    assert generator.main() == 1
    assert "is stale" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["benchmarks_page.py"])
    assert generator.main() == 0
    assert generator.PAGE.read_bytes() == (ROOT / "docs" / "benchmarks.md").read_bytes()
