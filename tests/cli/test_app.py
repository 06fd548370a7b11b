"""The command line as a whole: help, exit codes, start-up, signals and pipes."""

import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command import PROGRAM, colibri

import colibri_cli

COMMANDS = ["tokenize", "infer", "gen-router", "validate-config", "pack", "bench"]
BARE = """
import typer
app = typer.Typer()
@app.command()
def one(name: str, n: int = 1) -> None:
    "One."
@app.command()
def two(name: str) -> None:
    "Two."
app()
"""


def test_help_lists_every_command():
    done = colibri("--help")
    assert (done.returncode, done.stderr) == (0, b"")
    listed = done.stdout.decode().partition("Commands:")[2].splitlines()
    assert [line.split()[0] for line in listed if line.strip()] == COMMANDS
    assert "..." not in "".join(listed), "a command's first line is too long for its place"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_the_common_flags(command: str):
    done = colibri(command, "--help")
    assert (done.returncode, done.stderr) == (0, b"")
    for flag in ("--format", "--quiet", "--verbose", "--help"):
        assert flag in done.stdout.decode()


def test_version():
    assert colibri("--version").stdout.decode() == f"colibri {colibri_cli.__version__}\n"


def test_help_loads_nothing_heavy():
    program = (
        "import sys; from colibri_cli.cli import main; code = main(); "
        "heavy = ('numpy', 'rich', 'jsonschema', 'sentencepiece', 'colibri_cli._core'); "
        "print(code, [name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program, "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"


def test_help_starts_within_1_3_times_a_bare_typer_app(tmp_path: Path):
    bare = tmp_path / "bare.py"
    bare.write_text(BARE)
    arms = {"bare": [sys.executable, bare, "--help"], "colibri": [*PROGRAM, "--help"]}
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(9):
        for name, command in arms.items():
            started = time.perf_counter()
            subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
            times[name].append(time.perf_counter() - started)
    ratio = statistics.median(times["colibri"]) / statistics.median(times["bare"])
    assert ratio <= 1.3


@pytest.mark.parametrize(
    "arguments", [["frobnicate"], ["infer", "--frobnicate"], ["infer", "--repeat", "0"], ["-q", "-v", "bench"], []]
)
def test_wrong_usage_exits_2(arguments: list[str]):
    done = colibri(*arguments)
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr


def test_quiet_works_before_and_after_the_command():
    assert b"experts:" in colibri("infer", "--text", "hello").stderr
    assert colibri("-q", "infer", "--text", "hello").stderr == b""
    assert colibri("infer", "--text", "hello", "-q").stderr == b""
    assert b"instruction set" in colibri("infer", "--text", "hello", "-v").stderr
    assert b"instruction set" in colibri("--verbose", "infer", "--text", "hello").stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["--help"], ["tokenize", "--format", "json"]])
def test_a_reader_that_leaves_ends_the_command_quietly(arguments: list[str], unbuffered: str, tmp_path: Path):
    text = tmp_path / "text"
    text.write_text("hello world " * 50_000)
    reading, writing = os.pipe()
    with text.open() as stdin:
        running = subprocess.Popen(
            [*PROGRAM, *arguments],
            stdin=stdin,
            stdout=writing,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    os.close(writing)
    if arguments == ["--help"]:
        os.close(reading)
    else:
        os.read(reading, 10)
        os.close(reading)
    _, errors = running.communicate(timeout=120)
    assert (running.returncode, errors) == (141, b"")


@pytest.mark.parametrize("arguments", [["--help"], ["tokenize"], ["infer", "-q", "--text", "hello"]])
def test_a_full_disk_is_said(arguments: list[str]):
    with Path("/dev/full").open("wb") as full:
        done = colibri(*arguments, stdout=full, stdin=None, input=b"hello")
    assert done.returncode == 2
    assert done.stderr.startswith(b"Expected a writable standard output, got no space left on device")
    assert len(done.stderr.splitlines()) == 1


def test_closed_standard_output_is_said():
    command = f"{sys.executable} -m colibri_cli infer -q --text hello >&-"
    done = subprocess.run(["sh", "-c", command], capture_output=True, check=False)
    assert done.returncode == 2
    assert b"Expected an open standard output" in done.stderr


def test_an_interrupt_exits_130():
    with subprocess.Popen(
        [*PROGRAM, "infer", "--text", "hello " * 1000, "--repeat", "1000000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.default_int_handler
        ),  # a job in the background ignores it
    ) as running:
        time.sleep(2)
        running.send_signal(signal.SIGINT)
        try:
            output, errors = running.communicate(timeout=60)
        finally:
            running.kill()
    assert running.returncode == 130
    assert output == b""
    assert b"Traceback" not in errors


@pytest.mark.parametrize(
    ("words", "expected"),
    [("colibri in", ["infer"]), ("colibri infer --load", ["--loading"]), ("colibri infer --loading st", ["static"])],
)
def test_the_shell_completes(words: str, expected: list[str]):
    asked = {"_COLIBRI_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    done = colibri(env={**os.environ, **asked})
    assert done.stdout.decode().split() == expected
