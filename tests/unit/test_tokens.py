import os
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colibri_cli.errors import InvalidInput, UsageError
from colibri_cli.formats.inputs import read_input, read_text, split_lines
from colibri_cli.formats.tokens import read_tokens, tokens_from_bytes, tokens_to_bytes, write_tokens


@given(ids=st.lists(st.integers(-(2**31), 2**31 - 1)).filter(lambda ids: any(i & 0xFFFF for i in ids) or not any(ids)))
def test_ids_survive_the_round_trip(ids: list[int]):
    back = tokens_from_bytes(tokens_to_bytes(ids), at="memory")
    assert back.dtype == np.int32
    assert back.tolist() == ids


def test_the_file_is_raw_little_endian_int32(tmp_path: Path):
    path = tmp_path / "input.bin"
    write_tokens(path, [1, -2, 0x01020304])
    assert path.read_bytes() == b"\1\0\0\0\xfe\xff\xff\xff\4\3\2\1"
    assert read_tokens(path).tolist() == [1, -2, 0x01020304]


def test_an_empty_file_holds_no_ids(tmp_path: Path):
    path = tmp_path / "empty.bin"
    write_tokens(path, [])
    assert path.read_bytes() == b""
    assert read_tokens(path).shape == (0,)


def test_ids_come_from_standard_input(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    path = tmp_path / "input.bin"
    write_tokens(path, [7, 8])
    with path.open() as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        assert read_tokens("-").tolist() == [7, 8]


def test_a_pipe_is_read_to_its_end():
    reading, writing = os.pipe()
    os.write(writing, tokens_to_bytes(range(1, 5)))
    os.close(writing)
    assert read_tokens(f"/dev/fd/{reading}").tolist() == [1, 2, 3, 4]
    os.close(reading)


def test_closed_standard_input_cannot_be_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UsageError, match="got a closed one - at standard input"):
        read_tokens("-")


@pytest.mark.parametrize("size", [1, 3, 5, 4097])
def test_half_an_id_is_refused(tmp_path: Path, size: int):
    path = tmp_path / "odd.bin"
    path.write_bytes(b"\1" * size)
    with pytest.raises(InvalidInput, match=f"Expected a multiple of 4 bytes, got {size} bytes - at .*odd.bin"):
        read_tokens(path)


def test_big_endian_ids_are_recognised(tmp_path: Path):
    path = tmp_path / "big.bin"
    path.write_bytes(np.array([5483, 15, 678, 0], ">i4").tobytes())
    with pytest.raises(InvalidInput, match="got big-endian ones"):
        read_tokens(path)


def test_zeros_are_ids():
    assert tokens_from_bytes(bytes(8), at="memory").tolist() == [0, 0]


def test_an_npy_file_is_recognised(tmp_path: Path):
    path = tmp_path / "input.npy"
    np.save(path, np.array([1, 2], np.int32))
    with pytest.raises(InvalidInput, match=r"got an \.npy file"):
        read_tokens(path)


def test_a_missing_file_and_a_directory_cannot_be_read(tmp_path: Path):
    with pytest.raises(UsageError, match="no such file"):
        read_tokens(tmp_path / "none.bin")
    with pytest.raises(UsageError, match="got a directory"):
        read_tokens(tmp_path)


def test_a_huge_file_is_refused_before_it_is_read(tmp_path: Path):
    path = tmp_path / "huge.bin"
    with path.open("wb") as stream:
        stream.truncate(1 << 40)
    with pytest.raises(InvalidInput, match="Expected at most 1,073,741,824 bytes, got 1,099,511,627,776 bytes"):
        read_tokens(path)


def test_an_endless_stream_is_refused():
    with pytest.raises(InvalidInput, match="Expected at most 1,000 bytes, got more - at /dev/zero"):
        read_input("/dev/zero", limit=1000)


def test_the_limit_itself_is_allowed(tmp_path: Path):
    path = tmp_path / "exact"
    path.write_bytes(b"x" * 1000)
    assert len(read_input(path, limit=1000)) == 1000


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1.5], "got float64"),
        ([[1, 2]], r"of shape \(1, 2\)"),
        ([0, 2**31], r"Expected ids that fit in int32, got 2147483648 - at ids\[1\]"),
        (np.array([2**64 - 1], np.uint64), "got 18446744073709551615"),
    ],
)
def test_what_is_no_id_is_not_written(tmp_path: Path, ids: object, message: str):
    path = tmp_path / "input.bin"
    path.write_bytes(b"old!")
    with pytest.raises(InvalidInput, match=message):
        write_tokens(path, ids)  # type: ignore[arg-type]  # the point of the test
    assert path.read_bytes() == b"old!"


def test_text_is_utf8_without_its_byte_order_mark(tmp_path: Path):
    path = tmp_path / "text"
    path.write_bytes(b"\xef\xbb\xbfcolibr\xc3\xad\r\n\0")
    assert read_text(path) == "colibrí\r\n\0"


@pytest.mark.parametrize(
    ("data", "offset"), [(b"ok \xff", 3), (b"\xef\xbb\xbfok \xff", 6), (b"caf\xe9", 3), (b"\xed\xa0\x80", 0)]
)
def test_text_in_another_encoding_is_refused_by_byte(tmp_path: Path, data: bytes, offset: int):
    path = tmp_path / "text"
    path.write_bytes(data)
    with pytest.raises(InvalidInput, match=rf"Expected text in UTF-8, got .* - at .*text, byte {offset}$"):
        read_text(path)


def test_utf16_is_recognised(tmp_path: Path):
    path = tmp_path / "text"
    path.write_text("hello", encoding="utf-16")
    with pytest.raises(InvalidInput, match="hint: this is UTF-16"):
        read_text(path)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", []),
        ("a", ["a"]),
        ("a\n", ["a"]),
        ("a\n\nb", ["a", "", "b"]),
        ("a\r\nb\rc\n", ["a", "b", "c"]),
        ("\n", [""]),
        ("a\x0bb\u2028c", ["a\x0bb\u2028c"]),
    ],
)
def test_lines_end_where_editors_end_them(text: str, lines: list[str]):
    assert split_lines(text) == lines
