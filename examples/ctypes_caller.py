"""Run packed experts through the C functions with ctypes: mapped files, this program's own buffers, and no copies.

    python examples/ctypes_caller.py [FOLDER]

Packs four experts into FOLDER (default: a temporary one), maps them, runs a batch into a NumPy array and compares the
bits with `colibri_cli.Experts`. The same functions serve numba (ctypes functions with `argtypes` can be called from
compiled code) and Cython (their addresses); colibri.h, in `colibri_cli.get_include()`, says what each argument is.
"""

import ctypes
import math
import sys
import tempfile
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_size_t, c_ssize_t, c_uint64, c_void_p, sizeof
from pathlib import Path

import numpy as np

from colibri_cli import Experts, _core

LIB = ctypes.CDLL(_core.__file__)  # the extension module is the library; calls through CDLL release the GIL


class Shape(ctypes.Structure):
    """clb_shape: what a layer's experts have in common."""

    _fields_ = (
        ("struct_size", c_size_t),
        *((name, c_int) for name in ("hidden_size", "intermediate_size", "dtype", "activation", "gated")),
        *((name, c_float) for name in ("alpha", "beta", "limit")),
    )


class Arrays(ctypes.Structure):
    """clb_arrays: one expert's weights as a program has them."""

    _fields_ = (
        ("struct_size", c_size_t),
        *((name, c_int) for name in ("dtype", "bias_dtype", "interleaved")),
        *((name, c_void_p) for name in ("up", "down", "up_bias", "down_bias")),
        ("up_stride", c_ssize_t * 2),
        ("down_stride", c_ssize_t * 2),
    )


class Expert(ctypes.Structure):
    """clb_expert: opaque."""

    _fields_ = (("opaque", c_uint64 * 32),)


LIB.clb_error_name.restype = c_char_p
LIB.clb_expert_size.restype = LIB.clb_workspace_size.restype = c_size_t
LIB.clb_expert_size.argtypes = (POINTER(Shape), c_int)
LIB.clb_expert_pack.argtypes = (POINTER(Shape), POINTER(Arrays), c_void_p, c_size_t, c_int)
LIB.clb_expert_seal.argtypes = (c_void_p, c_size_t)
LIB.clb_expert_open.argtypes = (c_void_p, c_size_t, POINTER(Shape), POINTER(Expert))
LIB.clb_workspace_size.argtypes = (POINTER(Shape), c_int, c_int, c_int)
LIB.clb_experts_run.argtypes = (
    *(POINTER(Shape), POINTER(Expert), c_int),
    *(c_void_p, c_ssize_t, c_void_p, c_void_p, c_int, c_int),  # x, its stride, ids, weights, n_tokens, top_k
    *(c_void_p, c_ssize_t, c_void_p, c_size_t, c_int),  # y, its stride, workspace, its size, n_threads
)


def check(error: int) -> None:
    """Stop at an error of the library."""
    if error:
        raise SystemExit(LIB.clb_error_name(error).decode())


def pack(shape: Shape, up: np.ndarray, down: np.ndarray, path: Path) -> None:
    """Write one expert, float32 up (2I, H) and down (H, I), as a packed file."""
    arrays = Arrays(sizeof(Arrays), up=up.ctypes.data, down=down.ctypes.data)  # strides of 0: contiguous
    file = np.empty(LIB.clb_expert_size(shape, 0), np.uint8)
    check(LIB.clb_expert_pack(shape, arrays, file.ctypes.data, file.nbytes, 1))
    check(LIB.clb_expert_seal(file.ctypes.data, file.nbytes))
    file.tofile(path)


def main() -> None:
    """Pack, map, run, compare."""
    n_experts, hidden_size, intermediate_size, n_tokens, top_k = 4, 256, 96, 32, 2
    silu, int8, gated = 2, 2, 1  # clb_activation, clb_dtype
    rng = np.random.default_rng(0)
    up = rng.standard_normal((n_experts, 2 * intermediate_size, hidden_size), np.float32)
    down = rng.standard_normal((n_experts, hidden_size, intermediate_size), np.float32)
    x = rng.standard_normal((n_tokens, hidden_size), np.float32)
    ids = rng.integers(0, n_experts, (n_tokens, top_k), np.int32)
    weights = np.full((n_tokens, top_k), 0.5, np.float32)

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(sys.argv[1] if len(sys.argv) > 1 else temporary)
        paths = [folder / f"expert_{e}.bin" for e in range(n_experts)]
        shape = Shape(sizeof(Shape), hidden_size, intermediate_size, int8, silu, gated, 1.0, 0.0, math.inf)
        for e, path in enumerate(paths):
            pack(shape, up[e], down[e], path)

        # The experts are views of the mappings, which must live as long as they do.
        files = [np.memmap(path, np.uint8, "r") for path in paths]
        experts = (Expert * n_experts)()
        for file, expert in zip(files, experts, strict=True):
            check(LIB.clb_expert_open(file.ctypes.data, file.nbytes, shape, byref(expert)))

        # Everything that the call needs, once; afterwards a call allocates nothing.
        y = np.empty((n_tokens, hidden_size), np.float32)
        workspace = np.empty(LIB.clb_workspace_size(shape, n_experts, n_tokens, top_k), np.uint8)
        check(
            LIB.clb_experts_run(
                *(shape, experts, n_experts),
                *(x.ctypes.data, hidden_size, ids.ctypes.data, weights.ctypes.data, n_tokens, top_k),
                *(y.ctypes.data, hidden_size, workspace.ctypes.data, workspace.nbytes, 2),
            )
        )

    expected = Experts.from_arrays(up, down, dtype="int8").run(x, ids, weights)
    alike = "the same bits as" if y.tobytes() == expected.tobytes() else "NOT the bits of"
    print(f"{n_tokens} tokens through {n_experts} mapped experts: {alike} colibri_cli.Experts")


if __name__ == "__main__":
    main()
