"""The examples, and the code in the documentation, run as a reader runs them."""

import http.client
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import tiny_checkpoint

from colibri_cli import Model
from colibri_cli.pack import pack

ROOT = Path(__file__).parents[2]
EXAMPLES, DOCS = ROOT / "examples", ROOT / "docs"
ENVIRONMENT = os.environ | {"PYTHONWARNINGS": "error"}


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, env=ENVIRONMENT | environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_library_example_classifies_and_balances(tmp_path: Path) -> None:
    output = run(sys.executable, EXAMPLES / "token_classification.py", cwd=tmp_path)
    assert re.search(r"^captain +noun +0\.\d\d +experts \d:0\.\d\d", output, re.MULTILINE)
    assert re.search(r"^carried +verb ", output, re.MULTILINE)
    alone, balanced = map(float, re.findall(r"largest / mean (\d\.\d\d)", output))
    assert balanced < alone
    moved = re.search(r"of \d+ tokens (\d+) went to other experts", output)
    assert moved
    assert int(moved[1]) > 0


def test_the_library_example_takes_a_text(tmp_path: Path) -> None:
    output = run(sys.executable, EXAMPLES / "token_classification.py", "two", "words", cwd=tmp_path)
    assert [line.split()[0] for line in output.split("\n\n")[0].splitlines()] == ["two", "words"]


def test_the_library_example_explains_itself(tmp_path: Path) -> None:
    assert run(sys.executable, EXAMPLES / "token_classification.py", "--help", cwd=tmp_path).startswith("usage: ")


@pytest.fixture
def path_with_colibri(tmp_path: Path) -> str:
    """A PATH whose `colibri` is the package under test, whether or not its script is installed."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "colibri"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m colibri_cli "$@"\n')
    script.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def test_the_commands_run_end_to_end(tmp_path: Path, path_with_colibri: str) -> None:
    elsewhere, temporary = tmp_path / "elsewhere", tmp_path / "temporary"
    elsewhere.mkdir()
    temporary.mkdir()
    script = EXAMPLES / "token_classification.sh"
    output = run(script, cwd=elsewhere, PATH=path_with_colibri, TMPDIR=str(temporary))
    assert "Colibri sends every word to two of eight experts.\n" in output
    assert "router.c: written, 8 experts, hidden size 128" in output
    assert "router.c: up to date" in output
    assert re.search(r"^sends +.* verb ", output, re.MULTILINE)
    assert '"prediction": {"class": "noun"' in output
    assert output.endswith("equal\n")
    assert not list(elsewhere.iterdir())
    assert not list(temporary.iterdir())


def test_the_commands_stop_at_a_bundle_that_is_not_whole(tmp_path: Path, path_with_colibri: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    done = subprocess.run(
        [EXAMPLES / "token_classification.sh", tmp_path],
        env=ENVIRONMENT | {"PATH": path_with_colibri},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "config.json:1:1: expected" in done.stdout
    assert "== text to token ids" not in done.stdout


def test_the_commands_need_colibri(tmp_path: Path) -> None:
    (tmp_path / "bash").symlink_to("/bin/bash")
    done = subprocess.run(
        [EXAMPLES / "token_classification.sh"], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "Expected the command colibri, got none - at the PATH\n"


def test_no_answer_of_the_service_is_a_mixture_of_two_versions(tmp_path: Path) -> None:
    service = EXAMPLES / "embed_service.py"
    output = run(sys.executable, service, "--demo", "--requests", "100", cwd=tmp_path)
    assert re.search(r"^400 answers to 4 clients; expert \d replaced [1-9]\d* times$", output, re.MULTILINE)
    counts = re.search(r"^(\d+) of the old version, (\d+) of the new, 0 mixtures$", output, re.MULTILINE)
    assert counts
    assert int(counts[1]) + int(counts[2]) == 400
    assert re.search(r"P50 \d+\.\d\d ms, P99 \d+\.\d\d ms$", output)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """The running service and its address."""
    command = [sys.executable, EXAMPLES / "embed_service.py", "--port", "0"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout
            yield process, process.stdout.readline().removeprefix("serving on http://").strip()
        finally:
            process.kill()


def ask(connection: http.client.HTTPConnection, method: str, path: str, body: bytes) -> tuple[int, bytes]:
    connection.request(method, path, body)
    response = connection.getresponse()
    return response.status, response.read()


def test_the_service_answers_with_the_layers_bits(service: tuple["subprocess.Popen[str]", str]) -> None:
    layer = Model.open().layer
    hidden = np.random.default_rng(0).standard_normal((5, 128), np.float32)
    with closing(http.client.HTTPConnection(service[1], timeout=60)) as connection:
        assert ask(connection, "POST", "/layer", b"") == (200, b"")
        for n in (5, 1, 3):
            assert ask(connection, "POST", "/layer", hidden[:n].tobytes()) == (200, layer(hidden[:n]).tobytes())


def test_the_service_swaps_an_expert(service: tuple["subprocess.Popen[str]", str], tmp_path: Path) -> None:
    layer = Model.open().layer
    hidden = np.random.default_rng(0).standard_normal((5, 128), np.float32)
    expert = int(layer.router.route(hidden).expert_ids[0, 0])
    silent = tmp_path / "silent.bin"
    silent.write_bytes(bytes(layer.experts.shape.n_bytes))
    before = layer(hidden).tobytes()
    layer.experts.replace(expert, silent)
    with closing(http.client.HTTPConnection(service[1], timeout=60)) as connection:
        assert ask(connection, "POST", "/layer", hidden.tobytes()) == (200, before)
        assert ask(connection, "PUT", f"/experts/{expert}", silent.read_bytes()) == (204, b"")
        assert ask(connection, "POST", "/layer", hidden.tobytes()) == (200, layer(hidden).tobytes())


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/layer", b"odd", 400),
        ("POST", "/other", bytes(512), 404),
        ("GET", "/", b"", 404),
        ("POST", "/layer", np.full(128, np.nan, np.float32).tobytes(), 422),
        ("PUT", "/experts/0", b"short", 400),
        ("PUT", "/experts/one", b"short", 404),
        ("PUT", "/experts/8", b"short", 404),
    ],
)
def test_the_service_refuses(
    service: tuple["subprocess.Popen[str]", str], method: str, path: str, body: bytes, status: int
) -> None:
    with closing(http.client.HTTPConnection(service[1], timeout=60)) as connection:
        refused, message = ask(connection, method, path, body)
        assert refused == status
        assert b"<" not in message.replace(b"/experts/<i>", b"")
        assert ask(connection, "POST", "/layer", bytes(512))[0] == 200


@pytest.mark.parametrize("size", [str(513 * 512), "-512", "9" * 5000, "many"])
def test_the_service_refuses_a_size_without_waiting_for_the_body(
    service: tuple["subprocess.Popen[str]", str], size: str
) -> None:
    with closing(http.client.HTTPConnection(service[1], timeout=60)) as connection:
        connection.request("POST", "/layer", headers={"Content-Length": size})
        assert connection.getresponse().status == 400


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_the_service_stops_cleanly(service: tuple["subprocess.Popen[str]", str], stop: signal.Signals) -> None:
    process, address = service
    with closing(http.client.HTTPConnection(address, timeout=60)) as idle:
        assert ask(idle, "POST", "/layer", bytes(512))[0] == 200
        process.send_signal(stop)
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, output, errors) == (0, "stopped\n", "")


def python_of(page: Path) -> str:
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return "".join(blocks)


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *filter(python_of, sorted(DOCS.glob("*.md")))], ids=lambda page: page.name
)
def test_the_python_on_a_page_of_the_documentation_runs(page: Path, tmp_path: Path) -> None:
    sizes = {"hidden": 128, "inter": 64, "n_experts": 4, "n_layers": 4}
    checkpoint = tmp_path / "CHECKPOINT"
    tiny_checkpoint.write(checkpoint, tiny_checkpoint.config(**sizes, top_k=2), tiny_checkpoint.weights(**sizes))
    pack(checkpoint, tmp_path / "bundle")
    run(sys.executable, "-c", python_of(page), cwd=tmp_path)
