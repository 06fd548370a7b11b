import os
import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

from colibri_cli.errors import InvalidInput
from colibri_cli.formats import pytorch
from colibri_cli.formats.checkpoint import open_checkpoint

GATES = Path(__file__).parents[1] / "data" / "gates"
FULL = np.load(GATES / "full.npy")
COARSE = np.load(GATES / "coarse.npy")
FULL_BYTES = FULL.tobytes()
LEGACY_HEAD = pytorch.LEGACY_MAGIC + b"\x80\x02M\xe9\x03.\x80\x02}."


# Assembling pickles by hand, since nothing that runs would write these.


def text(value):
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def number(value):
    size = (value.bit_length() + 8) // 8
    return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)


def numbers(*values):
    return b"(" + b"".join(map(number, values)) + b"t"


def word(name):
    module, _, attribute = name.rpartition(".")
    return f"c{module}\n{attribute}\n".encode()


ORDERED_DICT = word("collections.OrderedDict") + b")R"


def storage(*, kind="torch.FloatStorage", key="0", items=256, more=b""):
    return b"(" + text("storage") + word(kind) + text(key) + text("cpu") + number(items) + more + b"tQ"


def tensor(shape=(8, 32), strides=(32, 1), offset=0, metadata=b"", **of):
    layout = number(offset) + numbers(*shape) + numbers(*strides)
    arguments = b"(" + storage(**of) + layout + b"\x89" + ORDERED_DICT + metadata + b"t"
    return word("torch._utils._rebuild_tensor_v2") + arguments + b"R"


def dictionary(**items):
    return b"}(" + b"".join(text(key) + value for key, value in items.items()) + b"u"


def saved(path, content, members=None, *, method=zipfile.ZIP_STORED):
    """Write a zip checkpoint: ``content`` is data.pkl without its stop, ``members`` what else there is."""
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("gate/data.pkl", b"\x80\x02" + content + b".")
        for name, data in (members or {"data/0": FULL_BYTES}).items():
            archive.writestr(f"gate/{name}", data)
    return path


def saved_legacy(path, content, keys=("0",), items=(256,), data=FULL_BYTES):
    listed = b"\x80\x02](" + b"".join(map(text, keys)) + b"e."
    storages = b"".join(struct.pack("<q", count) + data for count in items)
    path.write_bytes(LEGACY_HEAD + b"\x80\x02" + content + b"." + listed + storages)
    return path


def read(path):
    with open_checkpoint(path) as tensors:
        return {tensor.name: tensor.read() for tensor in tensors}


def refused(path):
    with pytest.raises(InvalidInput) as caught:
        read(path)
    assert str(path) in caught.value.at
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "key", "expected"),
    [
        ("tensor.pt", "", FULL),
        ("tensor_legacy.pth", "", FULL),
        ("parameter.pt", "", FULL),
        ("float64.pt", "", FULL),
        ("float16.pt", "", COARSE),
        ("bfloat16.pt", "", COARSE),
        ("bfloat16_legacy.pt", "", COARSE),
        ("nested.pt", "model.router.0", FULL),
        ("transposed_view.pt", "", FULL),
        ("slice_of_stack.pt", "", FULL),
        ("every_other_column.pt", "", FULL),
        ("pickle_protocol_4.pt", "gate", FULL),
        ("no_checksums.pt", "", FULL),
        ("transposed.pt", "", FULL.T),
    ],
)
def test_what_torch_saved_comes_back_bit_for_bit(name, key, expected):
    found = read(GATES / name)
    assert list(found) == [key]
    assert found[key].dtype == np.float32
    np.testing.assert_array_equal(found[key].view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("name", ["state_dict.pt", "state_dict_legacy.pt"])
def test_a_state_dict_is_listed_in_order(name):
    with open_checkpoint(GATES / name) as tensors:
        assert [(tensor.name, tensor.shape, tensor.dtype) for tensor in tensors] == [
            ("embedding.weight", (40, 32), "float32"),
            ("gate.weight", (8, 32), "float32"),
            ("gate.bias", (8,), "float32"),
            ("norm.weight", (32,), "float32"),
            ("norm.bias", (32,), "float32"),
            ("norm.running_mean", (32,), "float32"),
            ("norm.running_var", (32,), "float32"),
            ("norm.num_batches_tracked", (), "int64"),
        ]
        np.testing.assert_array_equal(tensors[1].read(), FULL)


def test_dtypes_that_are_not_read_are_listed():
    with open_checkpoint(GATES / "new_dtypes.pt") as tensors:
        assert [(tensor.name, tensor.dtype) for tensor in tensors] == [
            ("fp8", "float8_e4m3fn"),
            ("u16", "uint16"),
            ("gate", "float32"),
        ]
        np.testing.assert_array_equal(tensors[2].read(), FULL)


@pytest.mark.parametrize(("order", "dtype"), [("little", "<f4"), ("big", ">f4"), (None, "<f4")])
def test_byte_order_is_honoured(tmp_path, order, dtype):
    members = {"data/0": FULL.astype(dtype).tobytes()} | ({"byteorder": order} if order else {})
    found = read(saved(tmp_path / "gate.pt", tensor(), members))[""]
    np.testing.assert_array_equal(found.view(np.uint32), FULL.view(np.uint32))


def test_an_expanded_tensor_comes_back(tmp_path):
    found = read(saved(tmp_path / "gate.pt", tensor(shape=(8, 32), strides=(0, 1))))[""]
    np.testing.assert_array_equal(found, np.broadcast_to(FULL[0], (8, 32)))


def test_the_hand_made_tensor_is_what_torch_writes(tmp_path):
    for write in (saved, saved_legacy):
        np.testing.assert_array_equal(read(write(tmp_path / "gate.pt", tensor()))[""], FULL)
    legacy = tensor(more=b"N")
    np.testing.assert_array_equal(read(saved_legacy(tmp_path / "gate.pt", legacy))[""], FULL)


class Evil:
    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.mark.parametrize("place", ["plain pickle", "zip", "zip, beside a tensor", "legacy object", "legacy keys"])
def test_a_malicious_pickle_does_not_run(tmp_path, place):
    marker, path = tmp_path / "ran", tmp_path / "gate.pt"
    evil = pickle.dumps(Evil(f"touch {marker}"), 2)
    match place:
        case "plain pickle":
            path.write_bytes(evil)
        case "zip":
            saved(path, evil[2:-1])
        case "zip, beside a tensor":
            saved(path, dictionary(gate=tensor(), evil=evil[2:-1]))
        case "legacy object":
            saved_legacy(path, evil[2:-1])
        case "legacy keys":
            path.write_bytes(LEGACY_HEAD + b"\x80\x02" + tensor() + b"." + evil)
    message = refused(path)
    assert f"got the global {os.system.__module__}.system, which was not run" in message
    assert "hint: save the weights alone, as in torch.save(module.state_dict(), FILE)" in message
    assert not marker.exists()


def test_a_whole_module_is_refused_by_name():
    assert "the global torch.nn.modules.linear.Linear, which was not run" in refused(GATES / "whole_module.pt")


LAYOUT = "Expected an offset, at most 64 sizes and as many strides, none of them negative, got others"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (tensor(shape=(8, 33)), "Expected a view inside a storage of 256 items, got [8, 33] with strides [32, 1]"),
        (tensor(offset=1), "got [8, 32] with strides [32, 1] from item 1"),
        (tensor(strides=(33, 1)), "got [8, 32] with strides [33, 1] from item 0"),
        (tensor(shape=(1 << 40, 1 << 40), strides=(1 << 40, 1)), "Expected a view inside a storage of 256 items"),
        (tensor(offset=-1), LAYOUT),
        (tensor(strides=(-32, 1)), LAYOUT),
        (tensor(shape=(-8, 32)), LAYOUT),
        (tensor(shape=(8, 32, 1)), LAYOUT),
        (tensor(shape=(1,) * 65, strides=(1,) * 65), LAYOUT),
        (tensor(items=300), "Expected 1200 bytes (300 items of float32), got 1024 bytes"),
        (tensor(items=1 << 100), "got 1024 bytes"),
        (tensor(items=-1), "Expected storages as persistent objects, got something else"),
        (tensor(kind="torch.DoubleStorage"), "Expected 2048 bytes (256 items of float64), got 1024 bytes"),
        (tensor(kind="torch.QInt8Storage"), "got the global torch.QInt8Storage, which was not run"),
        (tensor(key="1"), "Expected a member for each storage, got none of this name"),
        (tensor(key="../data.pkl"), "Expected a member for each storage, got none of this name"),
        (tensor(metadata=dictionary(neg=b"\x88")), "Expected a plain tensor, got a lazily negated or conjugated one"),
        (b"(" + tensor() + tensor(items=9) + b"l", "Expected one size and dtype a storage, got two"),
        (word("torch.FloatStorage") + b")R", "Expected a dtype or storage type as a word, got a call of it"),
        (word("torch._utils._rebuild_tensor_v2") + b")R", "Expected a tensor made of a storage"),
        (word("torch._utils._rebuild_tensor_v3") + b")R", "Expected a tensor made of a storage"),
        (word("torch._utils._rebuild_parameter") + b")R", "Expected a parameter made of a tensor"),
        (word("torch.Size") + b")R", "Expected torch.Size of one tuple"),
        (word("collections.OrderedDict") + b"]\x85R", "Expected an empty OrderedDict, then its items"),
        (dictionary(**{"a.b": tensor(), "a": dictionary(b=tensor())}), "Expected each name once, got two tensors"),
        (dictionary(**{"n" * 1025: tensor()}), "Expected names of at most 1024 characters, got 1025: nnn"),
        (b"]" * 40 + b"a" * 39, "Expected containers at most 32 deep"),
        (b"}q\x00" + text("self") + b"h\x00s", "Expected containers at most 32 deep"),
    ],
)
def test_a_hostile_checkpoint_is_one_clear_error(tmp_path, content, message):
    assert message in refused(saved(tmp_path / "gate.pt", content))


def test_a_container_in_itself_many_times_over_is_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(pytorch, "_MAX_VISITS", 10_000)
    two = b"}(" + text("a") + b"h\x00" + text("b") + b"h\x00" + b"uq\x00"
    assert "10000 items in all, got more" in refused(saved(tmp_path / "gate.pt", b"}q\x00" + two * 25))


def test_a_view_larger_than_memory_is_listed_and_not_made(tmp_path):
    path = saved(tmp_path / "gate.pt", tensor(shape=(1 << 40, 1 << 40), strides=(0, 0)))
    with open_checkpoint(path) as tensors:
        assert tensors[0].shape == (1 << 40, 1 << 40)


def test_a_stride_that_is_never_taken_may_be_anything(tmp_path):
    found = read(saved(tmp_path / "gate.pt", tensor(shape=(1, 32), strides=(1 << 100, 1))))[""]
    np.testing.assert_array_equal(found, FULL[:1])


def test_a_typed_view_of_odd_bytes_stays_inside(tmp_path):
    layout = number(0) + numbers(1, 2) + numbers(2, 1)
    of = storage(kind="torch.storage.UntypedStorage", items=9)
    typed = b"(" + of + layout + b"\x89" + ORDERED_DICT + word("torch.float32") + b"t"
    content = word("torch._utils._rebuild_tensor_v3") + typed + b"R"
    found = read(saved(tmp_path / "gate.pt", content, {"data/0": FULL_BYTES[:9]}))[""]
    np.testing.assert_array_equal(found, FULL[:1, :2])


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"data/0": FULL_BYTES[:-1]}, "Expected 1024 bytes (256 items of float32), got 1023 bytes"),
        ({"data/0": FULL_BYTES + b"\0"}, "Expected 1024 bytes (256 items of float32), got 1025 bytes"),
        ({"data/0": FULL_BYTES, "byteorder": "middle"}, "Expected byte order little or big, got 'middle'"),
        ({"data/0": FULL_BYTES, "byteorder": "x" * 17}, "Expected at most 16 bytes, got 17 bytes"),
        ({"data/0": FULL_BYTES, "more/data.pkl": b"N."}, "Expected one member data.pkl, got 2 of them"),
    ],
)
def test_bad_members_are_refused(tmp_path, members, message):
    assert message in refused(saved(tmp_path / "gate.pt", tensor(), members))


def test_a_compressed_checkpoint_is_refused(tmp_path):
    path = saved(tmp_path / "gate.pt", tensor(), method=zipfile.ZIP_DEFLATED)
    assert "Expected a stored member, as torch writes it, got a compressed one" in refused(path)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_member_given_twice_is_refused(tmp_path):
    path = saved(tmp_path / "gate.pt", tensor())
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("gate/data/0", bytes(1024))
    assert "Expected each member once, got a second one of this name" in refused(path)


def test_a_damaged_storage_is_refused(tmp_path):
    path = saved(tmp_path / "gate.pt", tensor())
    path.write_bytes(path.read_bytes().replace(FULL_BYTES, COARSE.tobytes()))
    assert "the member is damaged" in refused(path)


@pytest.mark.parametrize("name", ["tensor.pt", "tensor_legacy.pth", "state_dict_legacy.pt"])
def test_every_truncated_file_is_refused(tmp_path, name):
    data, path = (GATES / name).read_bytes(), tmp_path / "gate.pt"
    for size in range(0, len(data), 31):
        path.write_bytes(data[:size])
        refused(path)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: saved_legacy(path, tensor(), keys=("0", "1")), "Expected a list of the 1 storages"),
        (lambda path: saved_legacy(path, tensor(), keys=("1",)), "Expected a list of the 1 storages"),
        (lambda path: saved_legacy(path, tensor(), items=(255,)), "got one of 255 items with 1024 bytes left"),
        (lambda path: saved_legacy(path, tensor(), items=(-1,)), "got one of -1 items"),
        (lambda path: saved_legacy(path, tensor(items=1 << 62), items=(1 << 62,)), "with 1024 bytes left in the file"),
        (lambda path: saved_legacy(path, tensor(), data=FULL_BYTES + b"x"), "got 1 bytes more"),
        (lambda path: saved_legacy(path, tensor(more=numbers(1))), "Expected storages as persistent objects"),
        (lambda path: path.write_bytes(pickle.dumps({"gate": 1})), "Expected a PyTorch file, zip or legacy"),
        (lambda path: path.write_bytes(b"\x80\x02K\x07."), "(which begins with 119547037146038801333356), got 7"),
        (lambda path: path.write_bytes(LEGACY_HEAD.replace(b"\xe9\x03", b"\xea\x03")), "begins with 1001), got 1002"),
        (lambda path: path.write_bytes(b"not a checkpoint"), "Expected a whole pickle of tensors"),
        (lambda path: path.write_bytes(b""), "Expected a whole pickle of tensors"),
    ],
)
def test_a_hostile_legacy_file_is_one_clear_error(tmp_path, write, message):
    path = tmp_path / "gate.pt"
    write(path)
    assert message in refused(path)


def test_a_module_that_torch_would_import_is_not(tmp_path, monkeypatch):
    (tmp_path / "imported_by_pickle.py").write_text("raise SystemExit('imported')", encoding="ascii")
    monkeypatch.syspath_prepend(tmp_path)
    path = saved(tmp_path / "gate.pt", word("imported_by_pickle.x"))
    assert "the global imported_by_pickle.x" in refused(path)


def test_the_helper_lays_files_out_as_torch_does(tmp_path):
    with (
        zipfile.ZipFile(GATES / "tensor.pt") as torchs,
        zipfile.ZipFile(saved(tmp_path / "gate.pt", tensor())) as ours,
    ):
        assert torchs.read("tensor/data/0") == ours.read("gate/data/0") == FULL_BYTES
        assert {name.removeprefix("gate/") for name in ours.namelist()} <= {
            name.removeprefix("tensor/") for name in torchs.namelist()
        }
