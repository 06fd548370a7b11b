import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from colibri_cli.errors import InvalidInput
from colibri_cli.formats.checkpoint import open_checkpoint

GATES = Path(__file__).parents[1] / "data" / "gates"
FULL = np.load(GATES / "full.npy")
COARSE = np.load(GATES / "coarse.npy")
DATA = FULL.tobytes()


def read(path):
    with open_checkpoint(path) as tensors:
        return {tensor.name: tensor.read() for tensor in tensors}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("float32.safetensors", FULL),
        ("float64.safetensors", FULL),
        ("float16.safetensors", COARSE),
        ("bfloat16.safetensors", COARSE),
    ],
)
def test_what_safetensors_saved_comes_back_bit_for_bit(name, expected):
    found = read(GATES / name)["gate"]
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


arrays = hnp.arrays(st.sampled_from([np.float32, np.float16]), hnp.array_shapes(min_dims=0, min_side=0, max_side=4))


@given(tensors=st.dictionaries(st.text(max_size=8).filter(lambda name: name != "__metadata__"), arrays, max_size=4))
@settings(max_examples=50, deadline=None)
def test_what_the_reference_writer_saves_is_read(tensors, tmp_path_factory):
    path = tmp_path_factory.mktemp("files") / "gate.safetensors"
    path.write_bytes(safetensors.numpy.save(tensors))
    found = read(path)
    assert found.keys() == tensors.keys()
    for name, values in tensors.items():
        np.testing.assert_array_equal(found[name], values.astype(np.float32))


def test_other_dtypes_are_listed(tmp_path):
    path = tmp_path / "gate.safetensors"
    path.write_bytes(safetensors.numpy.save({"ids": np.arange(3), "flags": np.ones(2, np.bool_)}))
    with open_checkpoint(path) as tensors:
        assert sorted((tensor.name, tensor.shape, tensor.dtype) for tensor in tensors) == [
            ("flags", (2,), "bool"),
            ("ids", (3,), "i64"),
        ]


def packed(header, data=DATA):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def gate(dtype="F32", shape=(8, 32), begin=0, end=1024, **more):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end], **more}


ENTRY = json.dumps(gate()).encode()
WHOLE = len(packed({"gate": gate()}))
SHAPELESS = "Expected dtype, shape and data_offsets of a tensor, got something else - at {path}: gate"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "Expected 8 bytes at offset 0, got a file of 0 bytes"),
        (b"\xff" * 8 + DATA, "Expected a header of 2 to 1024 bytes, got 18446744073709551615 bytes"),
        (bytes(8) + DATA, "Expected a header of 2 to 1024 bytes, got 0 bytes"),
        (packed(b"{}")[:9], "Expected a header of 2 to 1 bytes, got 2 bytes"),
        (packed(b"{ "), "Expected a header in JSON, got Expecting property name"),
        (packed(b"\xff\xff"), "Expected a header in JSON, got 'utf-8' codec can't decode"),
        (packed("{}".encode("utf-16")), "Expected a header in JSON, got 'utf-8' codec can't decode"),
        (packed(b"[" * 100_000), "Expected a header in JSON, got maximum recursion depth"),
        (packed(b"[1]"), "Expected a JSON object, got a list"),
        (packed(b'{"gate":%b,"gate":%b}' % (ENTRY, ENTRY)), "Expected each key once, got gate twice"),
        (packed(b'{"gate":{"dtype":"F32","dtype":"F16"}}'), "Expected each key once, got dtype twice"),
        (packed({"gate": 1}), SHAPELESS),
        (packed({"gate": gate(extra=1)}), SHAPELESS),
        (packed({"gate": gate(shape=[8, -32])}), SHAPELESS),
        (packed({"gate": gate(shape=[8, 32.0])}), SHAPELESS),
        (packed({"gate": gate(shape=[True, 32])}), SHAPELESS),
        (packed({"gate": gate(shape=[8, 1 << 63])}), SHAPELESS),
        (packed({"gate": gate(shape=[1] * 65)}), SHAPELESS),
        (packed({"gate": gate(begin=1024, end=0)}), SHAPELESS),
        (packed({"gate": gate(dtype=32)}), SHAPELESS),
        (packed({"gate": gate(dtype="F33")}), "Expected a dtype of C64, .*, got F33 - at {path}: gate.dtype"),
        (packed({"n" * 1025: gate()}), "Expected a name of at most 1024 characters, got 1025"),
        (
            packed({"gate": gate(shape=[8, 33])}),
            r"Expected 1056 bytes for F32 \[8, 33\], got 1024 bytes - at {path}: gate.data_offsets",
        ),
        (packed({"gate": gate(dtype="F4", shape=[3], end=2)}), r"Expected 1.5 bytes for F4 \[3\], got 2 bytes"),
        (
            packed({"gate": gate(shape=[2**62, 2**62])}),
            r"Expected 8.50706e\+37 bytes for F32 \[4611686018427387904, 4611686018427387904\], got 1024 bytes",
        ),
        (packed({"gate": gate(begin=4, end=1028)}, DATA + bytes(4)), "Expected offset 0, .* got offset 4"),
        (
            packed({"gate": gate(), "more": gate(shape=[1], begin=1020, end=1024)}),
            "Expected offset 1024, where the tensor before ends, got offset 1020 - at {path}: more.data_offsets",
        ),
        (packed({"gate": gate()}, DATA[:-1]), f"Expected a file of {WHOLE} bytes, got {WHOLE - 1} bytes"),
        (packed({"gate": gate()}, DATA + b"x"), f"Expected a file of {WHOLE} bytes, got {WHOLE + 1} bytes"),
        (packed({}, b"x"), "Expected a file of 10 bytes, got 11 bytes"),
        (packed({"\x1b[31m\n": 1}), r"got something else - at {path}: \\x1b\[31m\\n"),
    ],
)
def test_a_hostile_file_is_one_clear_error(tmp_path, data, message):
    path = tmp_path / "gate.safetensors"
    path.write_bytes(data)
    with pytest.raises(InvalidInput, match=message.format(path=path)) as caught:
        read(path)
    assert caught.value.at.startswith(str(path))


def test_every_truncated_file_is_refused(tmp_path):
    data, path = (GATES / "float32.safetensors").read_bytes(), tmp_path / "gate.safetensors"
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(InvalidInput):
            read(path)
