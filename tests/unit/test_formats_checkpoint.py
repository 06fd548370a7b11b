import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from colibri_cli.errors import InvalidInput, UsageError
from colibri_cli.formats import router_table
from colibri_cli.formats.checked_file import CheckedFile
from colibri_cli.formats.checkpoint import open_checkpoint

GATES = Path(__file__).parents[1] / "data" / "gates"
FULL = np.load(GATES / "full.npy")


@pytest.mark.parametrize("name", ["tensor.pt", "tensor_legacy.pth", "full.npy", "stored.npz", "blob"])
@pytest.mark.parametrize("ending", [".pt", ".bin", ".npy", ".weights", ""])
def test_the_content_tells_the_format(tmp_path, name, ending):
    path = tmp_path / f"model{ending}"
    if name == "blob":
        path.write_bytes(router_table.to_blob(FULL))
    else:
        shutil.copyfile(GATES / name, path)
    with open_checkpoint(path) as tensors:
        np.testing.assert_array_equal(tensors[0].read(), FULL)


@pytest.mark.parametrize(
    ("name", "transposed", "expected"), [("raw.bin", False, FULL), ("raw_transposed.bin", True, FULL.T)]
)
def test_raw_values_need_a_size(name, transposed, expected):
    with open_checkpoint(GATES / name, hidden_size=32, transposed=transposed) as tensors:
        assert tensors[0].name == ""
        np.testing.assert_array_equal(tensors[0].read(), expected)


@pytest.mark.parametrize(
    ("name", "data", "error", "message"),
    [
        ("gate.bin", bytes(1024), UsageError, "Expected --hidden-size for raw float32 values, got none"),
        ("gate.npy", bytes(9), InvalidInput, "Expected a .npy file, got one that begins 00 00 00 00 00 00"),
        ("gate.npz", b"", InvalidInput, "Expected a .npz file, got an empty file"),
        ("gate.pt", bytes(9), InvalidInput, "Expected a whole pickle of tensors, got at position 0"),
        ("gate.txt", b"1 2 3", UsageError, "Expected a file ending in .pt, .pth, .* or .bin, got .txt"),
        ("gate", b"", UsageError, "Expected a file ending in .*, got no ending"),
    ],
)
def test_what_is_no_checkpoint_is_refused(tmp_path, name, data, error, message):
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(error, match=message) as caught, open_checkpoint(path):
        pass
    assert caught.value.at == str(path)


def test_raw_values_must_fill_rows(tmp_path):
    path = tmp_path / "gate.bin"
    path.write_bytes(bytes(1025))
    message = r"Expected a multiple of 128 bytes \(32 float32 values an expert\), got 1025 bytes"
    with pytest.raises(InvalidInput, match=message), open_checkpoint(path, hidden_size=32):
        pass


def test_what_is_no_regular_file_is_refused_at_once(tmp_path):
    pipe = tmp_path / "pipe.pt"
    os.mkfifo(pipe)  # opening it would wait for ever
    for path, got in (
        (tmp_path, "a directory"),
        (pipe, "a pipe or a device"),
        (tmp_path / "missing.pt", "no such file or directory"),
    ):
        with pytest.raises(UsageError, match=f"got {got} - at {path}"), open_checkpoint(path):
            pass


def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path):
    path = tmp_path / "gate.bin"
    path.write_bytes(bytes(1024))
    with CheckedFile(path) as file:
        os.truncate(path, 512)
        assert file.read(0, 512) == bytes(512)
        with pytest.raises(InvalidInput, match="Expected 1024 bytes at offset 0, got a shorter file"):
            file.read(0, 1024)


@pytest.mark.parametrize(("offset", "size"), [(-1, 1), (0, -1), (0, 1025), (1025, 0), (1024, 1), (1 << 70, 1)])
def test_reading_outside_a_file_is_refused(tmp_path, offset, size):
    path = tmp_path / "gate.bin"
    path.write_bytes(bytes(1024))
    with CheckedFile(path) as file, pytest.raises(InvalidInput, match="got a file of 1024 bytes"):
        file.read(offset, size)
