import json
import os
import pty
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from command import PROGRAM, colibri

SCRIPT = Path(__file__).parents[2] / "scripts" / "text_to_tokens.py"
SCHEMA = json.loads(files("colibri_cli").joinpath("schema/tokenize.schema.json").read_text())


def ids(data: bytes) -> list[int]:
    return np.frombuffer(data, "<i4").tolist()


def document(data: bytes) -> dict:
    parsed = json.loads(data)
    jsonschema.validate(parsed, SCHEMA)
    return parsed


@pytest.fixture
def on_terminal():
    """Run a command whose standard output is a terminal; give its exit code, output and errors."""

    def run(*command: str | Path, env: dict[str, str] | None = None) -> tuple[int, bytes, bytes]:
        keeper, terminal = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", **(env or {})}
        done = subprocess.run(
            [*PROGRAM, *command],
            stdin=subprocess.DEVNULL,
            stdout=terminal,
            stderr=subprocess.PIPE,
            env=environment,
            timeout=120,
            check=False,
        )
        os.write(terminal, b"\x04")
        os.close(terminal)
        output = os.read(keeper, 1 << 16)
        os.close(keeper)
        return done.returncode, output.removesuffix(b"\x04"), done.stderr

    return run


@pytest.mark.parametrize("source", [["-"], []])
def test_text_on_standard_input_becomes_raw_ids(source: list[str]):
    done = colibri("tokenize", *source, input=b"hello world\n")
    assert done.returncode == 0
    assert done.stderr == b""
    back = colibri("tokenize", "--decode", input=done.stdout)
    assert back.stdout == b"hello world\n"


def test_an_output_file_gets_the_same_ids(tmp_path: Path):
    text = tmp_path / "text"
    text.write_text("hello world")
    binary = tmp_path / "input.bin"
    done = colibri("tokenize", text, "--output", binary)
    assert (done.returncode, done.stdout) == (0, b"")
    assert binary.read_bytes() == colibri("tokenize", input=b"hello world").stdout
    assert len(binary.read_bytes()) % 4 == 0


@pytest.mark.parametrize("text", ["hello world\n", "", "\ufeffcolibrí", "a\r\nb\0c", "日本"])
def test_the_script_gives_the_same_bytes(text: str):
    script = subprocess.run([sys.executable, SCRIPT], input=text.encode(), capture_output=True, check=True)
    assert script.stdout == colibri("tokenize", "-", input=text.encode()).stdout


def test_the_script_asks_for_sentencepiece():
    done = subprocess.run([sys.executable, "-S", SCRIPT], input=b"", capture_output=True, env={}, check=False)
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(b"Expected the package sentencepiece, got none")
    assert len(done.stderr.splitlines()) == 1


def test_the_script_names_what_is_wrong(tmp_path: Path):
    missing = subprocess.run(
        [sys.executable, SCRIPT, "--tokenizer", tmp_path / "none"], input=b"", capture_output=True, check=False
    )
    assert missing.returncode == 2
    assert b"none" in missing.stderr
    latin = subprocess.run([sys.executable, SCRIPT], input=b"caf\xe9", capture_output=True, check=False)
    assert (latin.returncode, latin.stdout) == (1, b"")
    assert latin.stderr.startswith(b"Expected text in UTF-8")


def test_another_tokenizer(letter_model: Path):
    done = colibri("tokenize", "--tokenizer", letter_model, "--format", "json", input=b"the dog")
    assert document(done.stdout)["pieces"] == list("▁the▁dog")


def test_json_holds_ids_and_pieces():
    done = colibri("tokenize", "--format", "json", input=b"hello world")
    found = document(done.stdout)
    assert list(found) == ["schema", "n_tokens", "ids", "pieces"]
    assert found["ids"] == ids(colibri("tokenize", input=b"hello world").stdout)
    assert "".join(found["pieces"]) == "▁hello▁world"


def test_text_has_a_row_a_piece():
    done = colibri("tokenize", "--format", "text", input=b"hello world")
    header, *rows = done.stdout.decode().splitlines()
    found = document(colibri("tokenize", "--format", "json", input=b"hello world").stdout)
    assert header.split() == ["id", "piece"]
    assert [row.split() for row in rows] == [
        [str(i), piece] for i, piece in zip(found["ids"], found["pieces"], strict=True)
    ]


def test_lines_are_kept():
    done = colibri("tokenize", "--lines", input=b"hello\r\n\r\nworld\n")
    found = document(done.stdout)
    assert [line["line"] for line in found["lines"]] == [1, 2, 3]
    assert found["lines"][1]["ids"] == []
    assert found["lines"][2]["ids"] == ids(colibri("tokenize", input=b"world").stdout)
    assert found["n_tokens"] == sum(len(line["ids"]) for line in found["lines"])
    text = colibri("tokenize", "--lines", "--format", "text", input=b"hello\n\nworld").stdout.decode()
    assert [row.split()[0] for row in text.splitlines()] == ["line", *["1"] * len(found["lines"][0]["ids"]), "3"]


def test_decode_to_json():
    raw = colibri("tokenize", input=b"hello world").stdout
    found = document(colibri("tokenize", "--decode", "--format", "json", input=raw).stdout)
    assert (found["text"], found["ids"]) == ("hello world", ids(raw))


@pytest.mark.parametrize("flags", [[], ["--format", "json"], ["--format", "text"], ["--lines"], ["--decode"]])
def test_empty_input_is_valid(flags: list[str]):
    done = colibri("tokenize", *flags, input=b"")
    assert done.returncode == 0
    assert done.stderr == b""
    if "json" in flags or "--lines" in flags:
        assert document(done.stdout)["n_tokens"] == 0


@pytest.mark.parametrize(
    ("ending", "first"), [(".bin", b""), (".json", b"{"), (".txt", b" "), (".JSON", b"{"), ("", b"")]
)
def test_the_output_files_ending_chooses_the_format(tmp_path: Path, ending: str, first: bytes):
    path = tmp_path / f"out{ending}"
    assert colibri("tokenize", "--output", path, input=b"hello").returncode == 0
    data = path.read_bytes()
    assert data.startswith(first) if first else data == colibri("tokenize", input=b"hello").stdout


def test_a_format_overrules_any_ending(tmp_path: Path):
    path = tmp_path / "out.xyz"
    assert colibri("tokenize", "--output", path, "--format", "bin", input=b"hello").returncode == 0
    assert path.read_bytes() == colibri("tokenize", input=b"hello").stdout


@pytest.mark.parametrize(
    ("flags", "data", "code", "message"),
    [
        (["none.txt"], b"", 2, "Expected a readable file, got no such file or directory - at none.txt"),
        (["."], b"", 2, "Expected a readable file, got a directory - at ."),
        ([], b"caf\xe9", 1, "Expected text in UTF-8, got the byte 0xe9"),
        (["--decode"], b"abc", 1, "Expected a multiple of 4 bytes, got 3 bytes - at standard input"),
        (["--decode"], b"\xff\xff\xff\xff", 1, "got -1 - at ids[0]"),
        (["--decode"], b"\xff\xff\xff\x7f", 1, "got 2147483647 - at ids[0]"),
        (["--decode", "--lines"], b"", 2, "Expected --decode or --lines, got both"),
        (["--lines", "--format", "bin"], b"", 2, "which holds no line boundaries"),
        (["--decode", "--format", "bin"], b"", 2, "which holds no text"),
        (["--format", "xml"], b"", 2, "'xml' is not one of 'bin', 'json', 'text'"),
        (["--tokenizer", "none.model"], b"", 2, "at none.model"),
        (["--output", "none/out.bin"], b"hello", 2, "Expected a writable file, got no such folder - at none/out.bin"),
        (["--output", "out.npy"], b"hello", 2, "Expected a file ending in .bin, .json or .txt, got .npy"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, flags: list[str], data: bytes, code: int, message: str):
    done = colibri("tokenize", *flags, input=data, cwd=tmp_path)
    assert done.returncode == code
    assert done.stdout == b""
    assert message in done.stderr.decode()
    assert "Traceback" not in done.stderr.decode()
    assert list(tmp_path.iterdir()) == []


def test_a_terminal_shows_text_and_is_spared_binary(on_terminal, tmp_path: Path):
    text = tmp_path / "text"
    text.write_text("hello")
    code, output, errors = on_terminal("tokenize", text)
    assert (code, errors) == (0, b"")
    assert "▁hell".encode() in output
    code, output, errors = on_terminal("tokenize", text, "--format", "bin")
    assert (code, output) == (2, b"")
    assert b"hint: --output FILE, or > FILE" in errors


def test_no_color_is_respected(on_terminal, tmp_path: Path):
    text = tmp_path / "text"
    text.write_text("hello")
    assert b"\x1b[" in on_terminal("tokenize", text, env={"NO_COLOR": ""})[1]
    assert b"\x1b[" not in on_terminal("tokenize", text, env={"NO_COLOR": "1"})[1]
