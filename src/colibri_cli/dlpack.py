"""bfloat16 tensors through DLPack: NumPy has no such type and imports none, so their bits are viewed as uint16."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

_CPU = 1
_BFLOAT = 4


class _Tensor(ctypes.Structure):
    """DLTensor of dlpack.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    """DLManagedTensorVersioned of dlpack.h; in the older DLManagedTensor the tensor comes first."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


class _View:
    """Memory that NumPy may view. The capsule, never taken over, frees the tensor when the last view is gone."""

    def __init__(self, capsule: object, interface: dict[str, Any]) -> None:
        self.capsule = capsule
        self.__array_interface__ = interface


def bfloat16_bits(tensor: Any) -> npt.NDArray[np.uint16] | None:
    """View a bfloat16 tensor in CPU memory, read-only; None where it is anything else.

    Raises
    ------
    BufferError, RuntimeError, TypeError, ...
        Whatever the tensor raises when it does not export itself.
    """
    if tensor.__dlpack_device__()[0] != _CPU:
        return None
    try:
        capsule = tensor.__dlpack__(max_version=(1, 0))
    except TypeError:  # it speaks the older protocol
        capsule = tensor.__dlpack__()
    described = _tensor_of(capsule)
    if (described.device_type, described.code, described.bits, described.lanes) != (_CPU, _BFLOAT, 16, 1):
        return None
    n = described.ndim
    interface: dict[str, Any] = {
        "data": ((described.data or 0) + described.byte_offset, True),
        "shape": tuple(described.shape[:n]),
        "typestr": "<u2",
        "version": 3,
    }
    if described.strides:
        interface["strides"] = tuple(2 * stride for stride in described.strides[:n])
    return np.asarray(_View(capsule, interface))


def _tensor_of(capsule: object) -> _Tensor:
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    valid = ctypes.pythonapi.PyCapsule_IsValid
    valid.argtypes = (ctypes.py_object, ctypes.c_char_p)
    if valid(capsule, b"dltensor_versioned"):
        managed = _Versioned.from_address(pointer_of(capsule, b"dltensor_versioned"))
        tensor: _Tensor = managed.tensor
        return tensor
    return _Tensor.from_address(pointer_of(capsule, b"dltensor"))
