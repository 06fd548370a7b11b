import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colibri_cli import report
from colibri_cli.errors import UsageError

Columns = [report.Column("name"), report.Column("size", number=True)]


@given(value=st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_floats_are_the_shortest_that_give_the_float32_back(value: float):
    (written,) = report.floats(np.array([value], np.float32))
    text = json.dumps(written)
    assert np.float32(float(text)) == np.float32(value)
    assert len(text) <= len(json.dumps(float(np.float32(value))))


def test_many_floats_are_what_each_is_alone():
    rng = np.random.default_rng(0)
    any_bits = rng.integers(0, 1 << 32, (250, 20), np.uint32).view(np.float32)
    values = np.concatenate([np.where(np.isfinite(any_bits), any_bits, 0), rng.random((250, 20), np.float32)])
    assert report.floats(values) == [[float(str(value)) for value in row] for row in values]


def test_floats_have_no_digits_too_many():
    assert (
        json.dumps(report.floats(np.array([0.1, 1 / 3, 1e-8, 0, 1], np.float32)))
        == "[0.1, 0.33333334, 1e-08, 0.0, 1.0]"
    )


def test_a_document_has_a_member_and_a_row_a_line():
    document = report.json_document({"schema": "x/1", "rows": iter([{"a": 1}, {"a": 2}]), "none": iter([]), "z": [1]})
    assert document.decode() == (
        '{\n"schema": "x/1",\n"rows": [\n  {"a": 1},\n  {"a": 2}\n],\n"none": [],\n"z": [1]\n}\n'
    )


def test_many_rows_come_in_parts():
    rows = [{"a": i} for i in range(3000)]
    parts = list(report.json_parts({"n": 1, "rows": iter(rows)}))
    assert max(map(len, parts)) < len(b"".join(parts)) / 2
    assert json.loads(b"".join(parts)) == {"n": 1, "rows": rows}
    lines = list(report.json_lines(rows))
    assert len(lines) > 1
    assert [json.loads(line) for line in b"".join(lines).splitlines()] == rows


def test_json_is_utf8_and_keeps_undecodable_names():
    data = report.json_document({"word": "colibrí\n", "path": "a\udcff"})
    assert "colibrí".encode() in data
    assert json.loads(data) == {"word": "colibrí\n", "path": "a\udcff"}


def test_json_has_no_nan():
    with pytest.raises(ValueError, match="not JSON compliant"):
        report.json_document({"x": float("nan")})


def test_json_lines_are_one_object_each():
    lines = b"".join(report.json_lines([{"a": 1}, {"a": "x\ny"}])).decode().splitlines()
    assert [json.loads(line) for line in lines] == [{"a": 1}, {"a": "x\ny"}]


def test_a_table_in_a_pipe_is_aligned_and_plain():
    text = report.table(Columns, [["colibrí", "7"], ["x", "1234"]], terminal=False)
    assert text == "name     size\ncolibrí     7\nx        1234\n"


def test_wide_and_combining_characters_are_aligned():
    text = report.table(Columns, [["日本", "1"], ["e\u0301te\u0301", "2"], ["abcd", "3"]], terminal=False)
    assert text.splitlines()[1:] == ["日本     1", "e\u0301te\u0301      2", "abcd     3"]


def test_a_long_cell_pushes_its_own_row_only():
    text = report.table(Columns, [["x" * 500, "1"], ["y", "2"]], terminal=False)
    lines = text.splitlines()
    assert lines[1] == "x" * 500 + "     1"
    assert len(lines[2]) < 60


def test_a_table_without_rows_is_its_header():
    assert report.table(Columns, [], terminal=False) == "name  size\n"


def test_cells_cannot_steer_the_terminal():
    text = report.table(Columns, [["\x1b[31mred\n", "1"]], terminal=False)
    assert text.splitlines()[1] == r"\x1b[31mred\n     1"


def test_a_terminal_gets_styles(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("FORCE_COLOR", "1")
    columns = [report.Column("name", style={"a": "red"}), report.Column("size", style="bold")]
    text = report.table(columns, [["a", "b"], ["c", "d"]], terminal=True)
    assert "\x1b[31ma\x1b[0m" in text
    assert "\x1b[1mb\x1b[0m" in text
    assert "\x1b[31mc" not in text
    assert "─" in text


def test_no_color_means_no_escape_sequences(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    text = report.table([report.Column("name", style="red")], [["a"]], terminal=True)
    assert text == "name\n────\na\n"


@pytest.mark.parametrize(
    ("share", "drawn"), [(0, ""), (1, "████"), (0.5, "██"), (0.53125, "██▏"), (1e-9, "▏"), (0.999, "████")]
)
def test_bars_are_drawn_in_eighths(share: float, drawn: str):
    assert report.bar(share, 4) == drawn


class _Stream(io.RawIOBase):
    """Standard output that takes at most 7 bytes a write, or fails."""

    def __init__(self, error: OSError | None = None) -> None:
        super().__init__()
        self.data = b""
        self.error = error

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]  # bytes will do here
        if self.error is not None:
            raise self.error
        self.data += bytes(data[:7])
        return min(len(data), 7)


def stdout_of(stream: _Stream, monkeypatch: pytest.MonkeyPatch, encoding: str = "utf-8") -> None:
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(flush=lambda: None, buffer=stream, encoding=encoding))


def test_short_writes_lose_nothing(monkeypatch: pytest.MonkeyPatch):
    stream = _Stream()
    stdout_of(stream, monkeypatch)
    report.emit(b"0123456789" * 10)
    assert stream.data == b"0123456789" * 10


def test_text_that_the_terminal_cannot_show_is_spelled_out(monkeypatch: pytest.MonkeyPatch):
    stream = _Stream()
    stdout_of(stream, monkeypatch, encoding="ascii")
    report.emit("colibrí █\n")
    assert stream.data == b"colibr\\xed \\u2588\n"


def test_a_closed_standard_output_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(UsageError, match="got a closed one - at standard output"):
        report.emit("x")


def test_a_reader_that_has_gone_is_for_main_to_catch(monkeypatch: pytest.MonkeyPatch):
    stdout_of(_Stream(BrokenPipeError()), monkeypatch)
    with pytest.raises(BrokenPipeError):
        report.emit("x")


def test_files_are_written_whole_or_not_at_all(tmp_path: Path):
    path = tmp_path / "out.txt"
    report.emit("colibrí", path)
    assert path.read_bytes() == "colibrí".encode()
    report.emit(iter([b"one ", b"two"]), path)
    assert path.read_bytes() == b"one two"
    report.emit(b"\0\1", path)
    assert path.read_bytes() == b"\0\1"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(UsageError, match="Expected a writable file"):
        report.emit("x", tmp_path / "none" / "out.txt")


def test_steps_count_without_a_bar_in_a_pipe(capfd: pytest.CaptureFixture[str]):
    assert list(report.steps(5, "work")) == [0, 1, 2, 3, 4]
    assert capfd.readouterr() == ("", "")
