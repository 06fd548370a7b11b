"""colibri.h as ctypes sees it, for tests: the structures, the functions of the core, and short ways to call them."""

import ctypes
import math
from ctypes import POINTER, c_char_p, c_float, c_int, c_size_t, c_ssize_t, c_uint64, c_void_p, sizeof
from typing import ClassVar

import numpy as np

from colibri_cli import _core

LIB = ctypes.CDLL(_core.__file__)

ERRORS = (
    *("OK", "NULL", "STRUCT", "SIZE", "OPTION", "ID", "EXPERT", "ROOM", "ALIGNMENT", "OVERLAP", "NOT_FINITE", "FORMAT"),
    *("CHECKSUM", "ISA"),
)
OK, NULL, STRUCT, SIZE, OPTION, ID, EXPERT, ROOM, ALIGNMENT, OVERLAP, NOT_FINITE, FORMAT, CHECKSUM, ISA = range(14)
F32, BF16, I8, I4, F16 = range(5)
DTYPES = {"float32": F32, "bfloat16": BF16, "int8": I8, "int4": I4}  # that are packed
IN_PLACE = {"float32": F32, "bfloat16": BF16, "float16": F16}
_CODES = {"f": F32, "e": F16, "H": BF16}
ACTIVATIONS = {"relu": 0, "relu2": 1, "silu": 2, "gelu": 3, "gelu_tanh": 4}
KINDS = {"softmax-topk": 0, "topk-softmax": 1, "sigmoid-topk": 2, "sqrtsoftplus-topk": 3, "topk-sigmoid": 4}


class _Sized(ctypes.Structure):
    """A structure that begins with its size; fields that are not given are the header's _INIT."""

    INIT: ClassVar[dict[str, object]] = {}

    def __init__(self, **fields):
        super().__init__(**(self.INIT | {"struct_size": sizeof(type(self))} | fields))

    def but(self, **fields):
        """Give a copy that differs in these fields."""
        other = type(self)()
        ctypes.memmove(ctypes.byref(other), ctypes.byref(self), sizeof(self))
        for name, value in fields.items():
            setattr(other, name, value)
        return other


class Shape(_Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        *((name, c_int) for name in ("hidden_size", "intermediate_size", "dtype", "activation", "gated")),
        *((name, c_float) for name in ("alpha", "beta", "limit")),
    ]
    INIT = {"activation": 2, "gated": 1, "alpha": 1.0, "beta": 0.0, "limit": math.inf}


class Arrays(_Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        *((name, c_int) for name in ("dtype", "bias_dtype", "interleaved")),
        *((name, c_void_p) for name in ("up", "down", "up_bias", "down_bias")),
        ("up_stride", c_ssize_t * 2),
        ("down_stride", c_ssize_t * 2),
    ]


class Expert(ctypes.Structure):
    _fields_ = [("opaque", c_uint64 * 32)]


class Router(_Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        *((name, c_int) for name in ("n_experts", "hidden_size", "top_k", "kind", "gating", "renormalize")),
        *((name, c_float) for name in ("scale", "epsilon")),
        *((name, c_int) for name in ("n_groups", "topk_groups", "group_score")),
        ("masked_score", c_float),
        *((name, c_void_p) for name in ("table", "bias", "correction")),
    ]
    INIT = {
        "top_k": 2,
        "renormalize": 1,
        "scale": 1.0,
        "epsilon": 1e-20,
        "n_groups": 1,
        "topk_groups": 1,
        "group_score": 1,
        "masked_score": -math.inf,
    }


def _declare(name, result, *arguments):
    function = getattr(LIB, name)
    function.restype, function.argtypes = result, arguments
    return function


_SHAPE, _ARRAYS, _EXPERT = POINTER(Shape), POINTER(Arrays), POINTER(Expert)
abi_version = _declare("clb_abi_version", c_int)
error_name = _declare("clb_error_name", c_char_p, c_int)
isa = _declare("clb_isa", c_char_p)
use_isa = _declare("clb_use_isa", c_int, c_char_p)
expert_open = _declare("clb_expert_open", c_int, c_void_p, c_size_t, _SHAPE, _EXPERT)
expert_verify = _declare("clb_expert_verify", c_int, c_void_p, c_size_t)
expert_seal = _declare("clb_expert_seal", c_int, c_void_p, c_size_t)
expert_in_place = _declare("clb_expert_in_place", c_int, _SHAPE, _ARRAYS, _EXPERT)
expert_size = _declare("clb_expert_size", c_size_t, _SHAPE, c_int)
expert_pack = _declare("clb_expert_pack", c_int, _SHAPE, _ARRAYS, c_void_p, c_size_t, c_int)
workspace_size = _declare("clb_workspace_size", c_size_t, _SHAPE, c_int, c_int, c_int)
experts_run = _declare(
    *("clb_experts_run", c_int, _SHAPE, c_void_p, c_int, c_void_p, c_ssize_t, c_void_p, c_void_p, c_int, c_int),
    *(c_void_p, c_ssize_t, c_void_p, c_size_t, c_int),
)
router_table_size = _declare("clb_router_table_size", c_size_t, c_int, c_int)
router_pack = _declare("clb_router_pack", c_int, c_void_p, c_ssize_t, c_int, c_int, c_void_p, c_size_t)
route = _declare(
    *("clb_route", c_int, POINTER(Router), c_void_p, c_ssize_t, c_int, c_void_p, c_void_p, POINTER(c_int), c_int)
)


def address(array):
    return None if array is None else array.ctypes.data


def aligned(n_bytes, offset=0):
    """Give uint8 memory whose address is a multiple of 64, plus offset."""
    memory = np.zeros(n_bytes + 64 + offset, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    return memory[start : start + n_bytes]


def arrays_of(up, down, up_bias=None, down_bias=None, *, interleaved=False):
    """Describe NumPy arrays, [U][H] and [H][I] with any strides, and keep them; uint16 is bfloat16."""
    bias = up_bias if up_bias is not None else down_bias
    arrays = Arrays(
        dtype=_CODES[up.dtype.char],
        bias_dtype=F32 if bias is None else _CODES[bias.dtype.char],
        interleaved=interleaved,
        up=address(up),
        down=address(down),
        up_bias=address(up_bias),
        down_bias=address(down_bias),
        up_stride=up.strides,
        down_stride=down.strides,
    )
    arrays.kept = (up, down, up_bias, down_bias)
    return arrays


def packed(shape, arrays, threads=1):
    """Give the packed file as a uint8 array."""
    biased = arrays.up_bias is not None or arrays.down_bias is not None
    file = aligned(expert_size(shape, biased))
    assert expert_pack(shape, arrays, address(file), file.nbytes, threads) == OK
    return file


def opened(files):
    """Give (shape of the last, experts) of packed files, which are kept as long as the experts."""
    shape, experts = Shape(), (Expert * len(files))()
    experts.files = files
    for file, expert in zip(files, experts, strict=True):
        assert expert_open(address(file), file.nbytes, shape, expert) == OK
    return shape, experts


def run(shape, experts, x, ids, weights, *, threads=1, chunk=None):
    """Run a batch; x is float32 (T, H) with aligned rows, ids int32 and weights float32 (T, K), contiguous."""
    (n_tokens, top_k), hidden = ids.shape, shape.hidden_size
    workspace = aligned(workspace_size(shape, len(experts), chunk or n_tokens, top_k))
    y = np.full((n_tokens, hidden), np.nan, np.float32)
    error = experts_run(
        *(shape, experts, len(experts), address(x), x.strides[0] // 4, address(ids), address(weights), n_tokens, top_k),
        *(address(y), hidden, address(workspace), workspace.nbytes, threads),
    )
    assert error == OK, ERRORS[error]
    return y
