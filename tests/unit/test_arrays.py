"""What counts as an array: every entry of the library takes the same ones and reads them in place."""

import array
import ctypes
import subprocess
import sys

import numpy as np
import pytest
from reference import Classifier, Ffns, integers, numbers

from colibri_cli import Experts, InvalidInput, Model, MoELayer, Router
from colibri_cli.arrays import as_array

T, H, E, K = 11, 13, 5, 3


class DLPack:
    """An array that speaks DLPack and nothing else."""

    def __init__(self, values):
        self.values = values
        self.asked = 0

    def __dlpack__(self, **options):
        self.asked += 1
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.values.__dlpack_device__()


class Elsewhere(DLPack):
    """A tensor of device type 2, CUDA."""

    def __dlpack__(self, **_options):
        capsule = self.values.__dlpack__()
        pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
        pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        device_type = ctypes.c_int32.from_address(pointer_of(capsule, b"dltensor") + ctypes.sizeof(ctypes.c_void_p))
        device_type.value = 2
        return capsule

    def __dlpack_device__(self):
        return 2, 0


class Kept(Elsewhere):
    """Likewise, and it does not let go of its memory."""

    def __dlpack__(self, **_options):
        raise BufferError("cannot export a tensor of another device")


def unaligned(a):
    """The same values one byte off any element's address."""
    memory = np.empty(a.nbytes + 1, np.uint8)
    view = memory[1:].view(a.dtype).reshape(a.shape)
    view[...] = a
    return view


def read_only(a):
    a = a.copy()
    a.flags.writeable = False
    return a


ARRANGEMENTS = {
    "fortran": np.asfortranarray,
    "every other": lambda a: np.repeat(np.repeat(a, 2, axis=0), 3, axis=1)[::2, ::3],
    "column of a wider array": lambda a: np.concatenate([a, a, a], axis=1)[:, a.shape[1] : 2 * a.shape[1]],
    "rows reversed": lambda a: np.ascontiguousarray(a[::-1])[::-1],
    "columns reversed": lambda a: np.ascontiguousarray(a[:, ::-1])[:, ::-1],
    "both reversed": lambda a: np.ascontiguousarray(a[::-1, ::-1])[::-1, ::-1],
    "unaligned": unaligned,
    "rows unaligned": lambda a: np.ndarray(
        a.shape, a.dtype, np.pad(a.view(np.uint8), ((0, 0), (0, 1))).copy(), 0, (a.strides[0] + 1, a.itemsize)
    ),
    "read-only": read_only,
    "memoryview": memoryview,
    "DLPack": DLPack,
    "DLPack, strided": lambda a: DLPack(np.repeat(a, 2, axis=1)[:, ::2]),
}
arranged = pytest.mark.parametrize("arrange", ARRANGEMENTS.values(), ids=ARRANGEMENTS)


@pytest.fixture(scope="module")
def experts():
    return Experts.from_arrays(**Ffns.make(1, E, H, 9).arrays(), threads=1, max_tokens=4)


@pytest.fixture(scope="module")
def router():
    return Router.from_array(numbers(2, E, H), top_k=K, threads=1)


@pytest.fixture(scope="module")
def batch():
    return numbers(3, T, H), integers(4, -1, E, T, K), numbers(5, T, K)


@arranged
def test_hidden_states(arrange, experts, router, batch):
    x, ids, weights = batch
    np.testing.assert_array_equal(experts.run(arrange(x), ids, weights), experts.run(*batch))
    found, expected = router.route(arrange(x)), router.route(x)
    np.testing.assert_array_equal(found.expert_ids, expected.expert_ids)
    np.testing.assert_array_equal(found.expert_weights, expected.expert_weights)
    layer = MoELayer(router, experts)
    np.testing.assert_array_equal(layer(arrange(x)), layer(x))


@arranged
def test_weights_of_slots(arrange, experts, batch):
    x, ids, weights = batch
    np.testing.assert_array_equal(experts.run(x, ids, arrange(weights)), experts.run(*batch))


@arranged
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.dtype("l"), np.dtype("q"), np.dtype("<i4")])
def test_ids(dtype, arrange, experts, batch):
    x, ids, weights = batch
    np.testing.assert_array_equal(experts.run(x, arrange(ids.astype(dtype)), weights), experts.run(*batch))


@arranged
def test_gate_weights(arrange, batch):
    weight = numbers(2, E, H)
    found, expected = (Router.from_array(w, top_k=E).route(batch[0]) for w in (arrange(weight), weight))
    np.testing.assert_array_equal(found.expert_ids, expected.expert_ids)
    np.testing.assert_array_equal(found.expert_weights, expected.expert_weights)


def test_broadcast_rows_are_read_in_place(experts, router):
    row, ids, weights = numbers(1, 1, H), np.zeros((1, K), np.int64), numbers(2, 1, K)
    expected = np.tile(experts.run(row, ids, weights), (T, 1))
    wide = [np.broadcast_to(a, (T, a.shape[1])) for a in (row, ids, weights)]
    np.testing.assert_array_equal(experts.run(*wide), expected)
    scalar = np.broadcast_to(np.float32(0.5), (T, H))
    np.testing.assert_array_equal(router.route(scalar).expert_ids, router.route(scalar.copy()).expert_ids)
    np.testing.assert_array_equal(experts.run(scalar, *wide[1:]), experts.run(scalar.copy(), *wide[1:]))


@pytest.mark.parametrize("arrange", [np.asarray, DLPack, memoryview])
def test_out(arrange, experts, batch):
    out = np.full((T, H), 7, np.float32)
    given = arrange(out)
    assert experts.run(*batch, out=given) is given
    np.testing.assert_array_equal(out, experts.run(*batch))


def test_a_dlpack_tensor_is_asked_for_its_memory(experts, batch):
    tensors = [DLPack(a) for a in batch]
    experts.run(*tensors)
    assert [tensor.asked for tensor in tensors] == [1, 1, 1]


@pytest.mark.parametrize("tensor", [Elsewhere, Kept])
def test_memory_of_another_device_is_refused(tensor, experts, router, batch):
    elsewhere = tensor(batch[0])
    for call in (
        lambda: experts.run(elsewhere, *batch[1:]),
        lambda: router.route(elsewhere),
        lambda: Router.from_array(elsewhere),
        lambda: as_array("x", elsewhere),
    ):
        with pytest.raises(InvalidInput, match=tensor.__name__):
            call()


@pytest.mark.parametrize("dtype", ["float64", "float16", "int32", "bool", "complex64", ">f4", "uint8"])
def test_another_dtype_is_refused_by_name(dtype, experts, router, batch):
    x, ids, weights = batch
    calls = {
        "hidden": lambda wrong: experts.run(wrong, ids, weights),
        "expert_weights": lambda wrong: experts.run(x, ids, wrong[:, :K]),
        "out": lambda wrong: experts.run(*batch, out=wrong),
    }
    for name, call in calls.items():
        with pytest.raises(InvalidInput, match=f"Expected float32 .*, got {dtype} - at {name}.dtype"):
            call(np.zeros((T, H), dtype))
    for call in (router.route, Router.from_array):
        with pytest.raises(InvalidInput, match=f"Expected float32 .*, got {dtype}"):
            call(np.zeros((T, H), dtype))
    if dtype != "float16":  # which weights may be
        with pytest.raises(InvalidInput, match=f"Expected float32, bfloat16 or float16, .*, got {dtype}"):
            Experts.from_arrays(np.zeros((1, 2, 1), dtype), np.zeros((1, 1, 1), np.float32))


@pytest.mark.parametrize("dtype", ["float32", "int16", "uint32", "uint64", "int8", "bool", ">i4", ">i8", "float64"])
def test_other_ids_are_refused_by_name(dtype, experts, batch):
    x, ids, weights = batch
    with pytest.raises(InvalidInput, match=f"Expected int32 or int64 .*, got {dtype} - at expert_ids.dtype"):
        experts.run(x, ids.clip(0).astype(dtype), weights)


@pytest.mark.parametrize("value", [None, 1.0, "text", b"bytes", [[1.0]], object(), {}])
def test_what_is_no_array_is_refused(value, experts, router, batch):
    with pytest.raises(InvalidInput, match=f"{type(value).__name__}.* - at hidden"):
        experts.run(value, *batch[1:])
    with pytest.raises(InvalidInput, match=f"{type(value).__name__}.* - at hidden"):
        router.route(value)


EXPORTERS_OF_FLOATS = """
import array, ctypes, sys
import numpy as np
from colibri_cli import Experts, Router

x = [[0.5, 1.0, -2.0], [4.0, 0.25, 8.0]]
rows = {
    "ctypes": lambda: (ctypes.c_float * 3 * 2)(*[(ctypes.c_float * 3)(*row) for row in x]),
    "cast": lambda: memoryview(array.array("f", x[0] + x[1])).cast("B").cast("f", (2, 3)),
}[sys.argv[1]]()
one = np.ones((1, 3, 3), np.float32)
experts = Experts.from_arrays(one, one, gated=False)
ids, weights = np.zeros((2, 1), np.int32), np.ones((2, 1), np.float32)
assert (experts.run(rows, ids, weights) == experts.run(np.float32(x), ids, weights)).all()
router = Router.from_array(np.eye(3, dtype=np.float32))
assert (router.route(rows).expert_ids == router.route(np.float32(x)).expert_ids).all()
"""


@pytest.mark.parametrize("exporter", ["ctypes", "cast"])
def test_buffers_that_no_array_library_made(exporter):
    # In a process of its own: ctypes leaves a buffer's strides out, and trusting them would end the whole suite.
    done = subprocess.run([sys.executable, "-c", EXPORTERS_OF_FLOATS, exporter], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_token_ids_of_any_exporter(tmp_path):
    model = Model.open(Classifier.make().write(tmp_path / "bundle"))
    expected = model.infer([3, 1, 4, 1, 5]).probabilities
    plain = np.array([3, 1, 4, 1, 5])
    for ids in (
        (3, 1, 4, 1, 5),
        array.array("i", [3, 1, 4, 1, 5]),
        plain.astype(np.int32),
        plain.astype(np.uint8),
        plain.astype(np.uint64),
        plain.astype(">i4"),
        np.repeat(plain, 3)[::3],
        plain.astype(np.int32)[::-1].copy()[::-1],
        unaligned(plain.astype(np.int32)),
        DLPack(plain),
    ):
        np.testing.assert_array_equal(model.infer(ids).probabilities, expected)


def test_as_array_views_what_it_can():
    floats = np.arange(6, dtype=np.float32).reshape(2, 3)
    for value in (floats, memoryview(floats), DLPack(floats)):
        assert np.shares_memory(as_array("x", value), floats)
    assert as_array("x", [[1, 2], [3, 4]]).tolist() == [[1, 2], [3, 4]]


def test_as_array_names_what_is_none():
    with pytest.raises(InvalidInput, match=r"Expected an array in CPU memory, got list \(.*\) - at x"):
        as_array("x", [[1, 2], [3]])
