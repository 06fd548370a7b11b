"""``colibri bench`` as a user runs it: quick, since what it finds is not judged here."""

import json
import os
import signal
import subprocess
import sys
import time
from importlib.resources import files
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from command import colibri

from colibri_cli import Router, _core
from colibri_cli.bench import CASES
from colibri_cli.bench.peers import MODULES, OURS, find
from colibri_cli.bench.shapes import SHAPES
from colibri_cli.cli import main
from colibri_cli.cli.bench import _GROUPS, _PEERS, _SHAPES, _complete_case, _complete_shape
from colibri_cli.topology import describe

SCHEMA = json.loads(files("colibri_cli").joinpath("schema/bench.schema.json").read_text())


def document(data: bytes) -> dict:
    parsed = json.loads(data)
    jsonschema.validate(parsed, SCHEMA)
    return parsed


def test_everything_quickly():
    done = colibri("bench", "--quick", "--threads", "1", "--format", "json")
    assert (done.returncode, done.stderr) == (0, b"")
    found = document(done.stdout)
    assert [case["name"] for case in found["cases"]] == [
        *("routing-512", "routing-1", "softmax", "dispatch", "expert-call-0", "expert-call-1", "python-call-1"),
        *("layer-1", "layer-16", "layer-512", "model-16", "model-512"),
    ]
    arms = {(case["name"], arm["name"]): arm for case in found["cases"] for arm in case["arms"]}
    assert arms["softmax", "taylor"]["error"] < 0.003
    assert "ratio" in arms["softmax", "numpy"]
    assert 0 < arms["model-16", "mmap"]["outside_share"] < 1
    assert all(arm["threads"] == 1 for arm in arms.values())


def test_help_and_completion_name_every_group():
    assert {case.rsplit("-", 1)[0] for case in CASES} == set(_GROUPS.split(", "))
    assert _complete_case("layer") == ["layer", "layer-1", "layer-16", "layer-512"]
    assert _GROUPS in " ".join(colibri("bench", "--help").stdout.decode().split())


def test_help_and_completion_name_every_shape_and_peer():
    assert _SHAPES.split(", ") == list(SHAPES)
    assert [OURS, *_PEERS.split(", ")] == list(MODULES)
    assert _complete_shape("o") == ["olmoe"]


def test_runs_without_an_arm_in_common_are_an_error(earlier: Path):
    done = colibri("bench", "--quick", "--case", "dispatch", "--compare", earlier)
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"Expected an earlier run that has an arm of this one" in done.stderr


def test_a_case_as_text():
    done = colibri("bench", "--quick", "--case", "dispatch", "--case", "expert-call-0")
    assert (done.returncode, done.stderr) == (0, b"")
    lines = done.stdout.decode().splitlines()
    assert lines[0].split()[:6] == ["case", "arm", "threads", "P50", "P99", "P99.9"]
    assert [line.split()[:3] for line in lines[1:3]] == [
        ["dispatch", "colibri", "1"],
        ["expert-call-0", "colibri", "1"],
    ]
    assert "64 calls between two clock reads" in done.stdout.decode()
    assert "taken off" in done.stdout.decode()


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "earlier.json"
    done = colibri("bench", "--quick", "--case", "expert-call-1", "--output", path)
    assert (done.returncode, done.stdout) == (0, b"")
    document(path.read_bytes())
    return path


@pytest.mark.parametrize(("factor", "code", "verdict"), [(1e-3, 1, "slower"), (1e3, 0, "faster")])
def test_a_regression_is_an_exit_code(earlier: Path, tmp_path: Path, factor: float, code: int, verdict: str):
    before = json.loads(earlier.read_bytes())
    for arm in before["cases"][0]["arms"]:
        arm.update({key: arm[key] * factor for key in ("p50_ns", "low_ns", "high_ns")})
    path = tmp_path / "before.json"
    path.write_text(json.dumps(before))
    done = colibri("bench", "--quick", "--case", "expert-call-1", "--compare", path, "--format", "json")
    assert done.returncode == code
    assert [change["verdict"] for change in document(done.stdout)["comparison"]["changes"]] == [verdict]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--case", "nothing"], 2, b"Expected one of routing-512"),
        (["--threads", "1,2"], 2, b"Expected one number of threads without --shape or --against"),
        (["--tokens", "1"], 2, b"--tokens without them"),
        (["--plot", "x.png"], 2, b"--plot without them"),
        (["--case", "layer", "--shape", "olmoe"], 2, b"got both"),
        (["--self-test", "--shape", "olmoe"], 2, b"an option of measuring"),
        (["--shape", "llama"], 2, b"Expected one of token-classifier, olmoe"),
        (["--shape", "olmoe", "--experts", "7"], 2, b"Expected 8 to 64 experts for olmoe"),
        (["--shape", "olmoe", "--dtype", "fp8"], 2, b"Expected one of float32"),
        (["--shape", "olmoe", "--threads", "1,0"], 2, b"--threads"),
        (["--against", "tensorflow"], 2, b"Expected one of torch, onnxruntime, ggml"),
        (["--shape", "olmoe", "--plot", "x.pdf"], 2, b"Expected a file ending in .png or .svg"),
        (["--shape", "olmoe", "--output", "none/x.json"], 2, b"no such folder"),
        (["--judge"], 2, b"--judge without it"),
        (["--self-test", "--quick"], 2, b"an option of measuring"),
        (["--self-test", "--case", "dispatch"], 2, b"an option of measuring"),
        (["--compare", "none.json"], 2, b"no such file"),
        (["--compare", "bad.json"], 1, b"Expected JSON of colibri.bench/1"),
        (["--threads", "0"], 2, b"--threads"),
        (["--format", "xml"], 2, b"--format"),
    ],
)
def test_what_cannot_be_run(tmp_path: Path, arguments: list[str], code: int, message: bytes):
    (tmp_path / "bad.json").write_text("{}")
    done = colibri("bench", *arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (code, b"")
    assert message in done.stderr
    assert b"Traceback" not in done.stderr


SHORT_RUN = ("bench", "--shape", "token-classifier", "--tokens", "1,3", "--dtype", "int8", "--threads", "1", "--quick")


@pytest.fixture(scope="module")
def contest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "contest.json"
    done = colibri(*SHORT_RUN, "--output", path)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    return path


def test_a_shape_is_measured_with_its_error_and_shares(contest: Path):
    found = document(contest.read_bytes())
    assert [case["name"] for case in found["cases"]] == ["token-classifier-int8-1", "token-classifier-int8-3"]
    for case in found["cases"]:
        (arm,) = case["arms"]
        assert (arm["name"], arm["status"]) == ("colibri", "timed")
        assert 1e-3 < arm["rms_error"] < 2e-2
        assert arm["low_ns"] <= arm["p50_ns"] <= arm["high_ns"]
        assert arm["gflops"] == pytest.approx(case["flops"] / arm["p50_ns"])
    assert (found["against"], found["means"], found["behind"]) == ([], [], [])


@pytest.mark.parametrize(("factor", "code", "verdict"), [(1e-3, 1, b"slower"), (1e3, 0, b"faster")])
def test_a_shapes_regression_is_an_exit_code(contest: Path, tmp_path: Path, factor: float, code: int, verdict: bytes):
    before = json.loads(contest.read_bytes())
    for arm in (arm for case in before["cases"] for arm in case["arms"]):
        arm.update({key: arm[key] * factor for key in ("p50_ns", "low_ns", "high_ns")})
    path = tmp_path / "before.json"
    path.write_text(json.dumps(before))
    done = colibri(*SHORT_RUN, "--compare", path)
    assert done.returncode == code
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith(b"token-classifier-int8-")]
    assert [(row[1], row[-1]) for row in rows] == [(b"colibri", verdict)] * 2


def test_an_earlier_run_of_other_shapes_stops_it_at_once(contest: Path):
    done = colibri("bench", "--shape", "olmoe", "--compare", contest, timeout=20)
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"only in the earlier run: token-classifier-int8-1 colibri with 1 thread" in done.stderr


def test_an_absent_peer_is_named_with_pips_command():
    absent = next((name for name in MODULES if find(name).missing()), None)
    if absent is None:
        pytest.skip("every peer is installed")
    done = colibri("bench", "--against", absent)
    assert (done.returncode, done.stdout) == (2, b"")
    assert f"Expected {absent}, installed" in done.stderr.decode()
    assert f"hint: python -m pip install '{find(absent).requirements[0]}'" in done.stderr.decode()


def test_what_does_not_fit_is_refused_with_what_would():
    if (describe()["memory"] or 0) > 40e9:
        pytest.skip("a large machine")
    done = colibri("bench", "--shape", "deepseek-v3", "--dtype", "float32", timeout=20)
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"of memory for deepseek-v3" in done.stderr or b"for the weights of deepseek-v3" in done.stderr


def test_this_installation_passes_its_self_test():
    done = colibri("bench", "--self-test")
    assert (done.returncode, done.stderr) == (0, b"")
    rows = [line.split("  ") for line in done.stdout.decode().splitlines()]
    assert [row[0] for row in rows] == ["phase", "buffers", "routing", "dispatch latency", "memory safety"]


def test_self_test_as_json():
    found = document(colibri("bench", "--self-test", "--format", "json").stdout)
    assert found["passed"]
    memory = found["self_test"][3]
    assert memory["status"] == ("passed" if _core.sanitized() else "not checked")


@pytest.mark.parametrize("output_format", ["text", "json"])
def test_broken_routing_is_an_exit_code(monkeypatch, capfdbinary, output_format: str):
    route = Router.route

    def broken(self, hidden, *arguments, **keywords):
        found = route(self, hidden, *arguments, **keywords)
        found.expert_ids[:] = np.roll(found.expert_ids, 1, axis=0)
        return found

    monkeypatch.setattr(Router, "route", broken)
    monkeypatch.setattr(sys, "argv", ["colibri", "bench", "--self-test", "--format", output_format])
    assert main() == 1
    written = capfdbinary.readouterr().out
    if output_format == "json":
        found = document(written)
        assert not found["passed"]
        assert found["self_test"][1]["status"] == "failed"
    else:
        assert written.decode().splitlines()[2].split()[:2] == ["routing", "failed"]


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGHUP])
def test_a_run_that_is_ended_leaves_no_weights_behind(tmp_path, stop):
    arguments = ("bench", "--shape", "token-classifier", "--threads", "1", "--quick")
    with subprocess.Popen(
        [sys.executable, "-m", "colibri_cli", *arguments],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as running:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("colibri-bench-*/*")) and time.monotonic() < deadline:
            time.sleep(0.02)
        running.send_signal(stop)
        assert running.wait(60) == 128 + stop
    assert not list(tmp_path.glob("colibri-bench-*"))
