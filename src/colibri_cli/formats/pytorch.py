"""PyTorch checkpoints, zip and legacy, read without torch and without running what they pickle."""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np

from colibri_cli.errors import InvalidInput
from colibri_cli.formats import pickles
from colibri_cli.formats.tensor import (
    MAX_DIMENSIONS,
    MAX_INDEX_BYTES,
    MAX_NAME,
    MAX_TENSORS,
    Tensor,
    raw_dtype,
    shown,
    shown_shape,
    to_float32,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import TypeGuard

    import numpy.typing as npt

    from colibri_cli.formats.archive import Archive
    from colibri_cli.formats.checked_file import CheckedFile

_MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
_PROTOCOL_VERSION = 1001
LEGACY_MAGIC = b"\x80\x02\x8a\x0a" + _MAGIC_NUMBER.to_bytes(10, "little") + b"."

_MAX_DEPTH = 32
_MAX_VISITS = 1 << 22

_DTYPES = {
    "torch.DoubleStorage": "float64",
    "torch.FloatStorage": "float32",
    "torch.HalfStorage": "float16",
    "torch.BFloat16Storage": "bfloat16",
    "torch.LongStorage": "int64",
    "torch.IntStorage": "int32",
    "torch.ShortStorage": "int16",
    "torch.CharStorage": "int8",
    "torch.ByteStorage": "uint8",
    "torch.BoolStorage": "bool",
    "torch.ComplexDoubleStorage": "complex128",
    "torch.ComplexFloatStorage": "complex64",
    "torch.storage.UntypedStorage": "bytes",
}
_ITEM_SIZES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
    "complex128": 16,
    "complex64": 8,
    "complex32": 4,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "bytes": 1,
}


@dataclass(frozen=True, slots=True)
class _Storage:
    key: str
    dtype: str
    n_items: int

    @property
    def n_bytes(self) -> int:
        return self.n_items * _ITEM_SIZES[self.dtype]


@dataclass(frozen=True, slots=True)
class _View:
    """A pickled tensor: a strided view of a storage, in items of ``dtype``."""

    storage: _Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def is_pytorch(archive: Archive) -> bool:
    """Tell whether a zip archive is laid out as ``torch.save`` does it."""
    return bool(_roots(archive))


def _roots(archive: Archive) -> list[str]:
    """Return what stands in front of each ``data.pkl``: torch names the folder after the file it saved to."""
    paths = [name.rpartition("/") for name in archive.names()]
    return [folder + slash for folder, slash, name in paths if name == "data.pkl"]


def read_zip(file: CheckedFile, archive: Archive) -> list[Tensor]:
    """List the tensors of a checkpoint in the zip format (torch 1.6 and later).

    Parameters
    ----------
    file : CheckedFile
    archive : Archive
        The same file's members; both stay open while tensors are read.

    Raises
    ------
    InvalidInput
        A damaged checkpoint, or one that needs more than tensors and plain containers.
    """
    root, *others = _roots(archive)
    if others:
        raise InvalidInput(expected="one member data.pkl", got=f"{1 + len(others)} of them", at=file.name)
    members = frozenset(archive.names())
    for name in archive.names():
        if archive.is_compressed(name):
            at = f"{file.name}: {shown(name)}"
            raise InvalidInput(expected="a stored member, as torch writes it", got="a compressed one", at=at)

    def bytes_of(storage: _Storage) -> bytes:
        return archive.read(f"{root}data/{storage.key}", storage.n_bytes)

    order = archive.read(f"{root}byteorder", 16) if f"{root}byteorder" in members else b"little"
    if order not in (b"little", b"big"):
        got = repr(order)[1:]
        raise InvalidInput(expected="byte order little or big", got=got, at=f"{file.name}: byteorder")
    data = BytesIO(archive.read(f"{root}data.pkl", MAX_INDEX_BYTES))
    content, storages = _unpickle(data, at=file.name)
    for storage in storages.values():
        member = f"{root}data/{storage.key}"
        at = f"{file.name}: {shown(member)}"
        if member not in members:
            raise InvalidInput(expected="a member for each storage", got="none of this name", at=at)
        if archive.size(member) != storage.n_bytes:
            expected = f"{storage.n_bytes} bytes ({storage.n_items} items of {storage.dtype})"
            raise InvalidInput(expected=expected, got=f"{archive.size(member)} bytes", at=at)
    return _tensors(content, bytes_of, big_endian=order == b"big", at=file.name)


def read_legacy(file: CheckedFile) -> list[Tensor]:
    """List the tensors of a checkpoint in the format before torch 1.6: five pickles, then the storages.

    Raises
    ------
    InvalidInput
        A damaged checkpoint, or one that needs more than tensors and plain containers.
    """
    stream = BytesIO(file.read(0, min(file.size, MAX_INDEX_BYTES)))
    for expected in (_MAGIC_NUMBER, _PROTOCOL_VERSION):
        found, _ = _unpickle(stream, at=file.name)
        if found != expected:
            raise InvalidInput(
                expected=f"a PyTorch file, zip or legacy (which begins with {expected})",
                got=shown(repr(found)) if isinstance(found, int | str) else f"a {type(found).__name__}",
                at=file.name,
            )
    _unpickle(stream, at=file.name)  # sizes of C types on the machine that wrote: nothing depends on them
    content, storages = _unpickle(stream, at=file.name)
    keys, _ = _unpickle(stream, at=file.name)
    named = {key for key in keys if isinstance(key, str)} if isinstance(keys, list) else set()
    if not isinstance(keys, list) or len(keys) != len(storages) or named != storages.keys():
        raise InvalidInput(expected=f"a list of the {len(storages)} storages", got="another one", at=file.name)

    offsets: dict[str, int] = {}
    position = stream.tell()
    for key in keys:
        storage = storages[key]
        (n_items,) = struct.unpack("<q", file.read(position, 8))
        if n_items != storage.n_items or position + 8 + storage.n_bytes > file.size:
            raise InvalidInput(
                expected=f"a storage of {storage.n_items} items of {storage.dtype}",
                got=f"one of {n_items} items with {file.size - position - 8} bytes left in the file",
                at=f"{file.name}: storage {shown(key)}",
            )
        offsets[key] = position + 8
        position += 8 + storage.n_bytes
    if position != file.size:
        got = f"{file.size - position} bytes more"
        raise InvalidInput(expected="the end after the last storage", got=got, at=file.name)

    def bytes_of(storage: _Storage) -> bytes:
        return file.read(offsets[storage.key], storage.n_bytes)

    return _tensors(content, bytes_of, big_endian=False, at=file.name)


def _unpickle(stream: BytesIO, *, at: str) -> tuple[object, dict[str, _Storage]]:
    """Read one pickle; return its value and every storage that it refers to, by key."""
    storages: dict[str, _Storage] = {}

    def persistent(identity: object) -> _Storage:
        match identity:
            # view: legacy files only, and None since torch 0.4
            case ("storage", pickles.Global(kind), str(key), str(), int(n_items), *view) if (
                kind in _DTYPES and n_items >= 0 and view in ([], [None])
            ):
                storage = _Storage(key, _DTYPES[kind], n_items)
                if storages.setdefault(key, storage) == storage:
                    return storage
                raise InvalidInput(expected="one size and dtype a storage", got="two", at=f"{at}: {shown(key)}")
        raise InvalidInput(expected="storages as persistent objects", got="something else", at=at)

    builders: dict[str, Callable[[tuple[object, ...]], object]] = {
        "collections.OrderedDict": partial(_ordered_dict, at),
        "torch.Size": partial(_size, at),
        "torch.device": lambda _: None,
        "torch._utils._rebuild_tensor": partial(_rebuild, at),
        "torch._utils._rebuild_tensor_v2": partial(_rebuild, at),
        "torch._utils._rebuild_tensor_v3": partial(_rebuild_typed, at),
        "torch._utils._rebuild_parameter": partial(_parameter, at),
        "torch._utils._rebuild_parameter_with_state": partial(_parameter, at),
    }
    for word in (*_DTYPES, *(f"torch.{dtype}" for dtype in _ITEM_SIZES)):
        builders[word] = partial(_not_callable, at)
    return pickles.load(stream, builders=builders, persistent=persistent, at=at), storages


def _ordered_dict(at: str, arguments: tuple[object, ...]) -> dict[object, object]:
    if arguments:
        raise InvalidInput(expected="an empty OrderedDict, then its items", got="arguments", at=at)
    return {}


def _size(at: str, arguments: tuple[object, ...]) -> tuple[object, ...]:
    match arguments:
        case (tuple() as sizes,):
            return sizes
    raise InvalidInput(expected="torch.Size of one tuple", got="other arguments", at=at)


def _parameter(at: str, arguments: tuple[object, ...]) -> _View:
    match arguments:
        case (_View() as view, *_):
            return view
    raise InvalidInput(expected="a parameter made of a tensor", got="other arguments", at=at)


def _not_callable(at: str, arguments: tuple[object, ...]) -> object:
    raise InvalidInput(
        expected="a dtype or storage type as a word", got=f"a call of it with {len(arguments)} arguments", at=at
    )


def _rebuild(at: str, arguments: tuple[object, ...]) -> _View:
    """Stand for ``torch._utils._rebuild_tensor`` and ``_rebuild_tensor_v2``."""
    match arguments:
        case (_Storage() as storage, offset, shape, strides, *rest):
            # rest: requires_grad, hooks, metadata
            return _view(at, storage, storage.dtype, (offset, shape, strides), rest[2:])
    raise InvalidInput(expected="a tensor made of a storage", got="other arguments", at=at)


def _rebuild_typed(at: str, arguments: tuple[object, ...]) -> _View:
    """Stand for ``torch._utils._rebuild_tensor_v3``: dtypes that have no storage type of their own."""
    match arguments:
        case (_Storage() as storage, offset, shape, strides, _, _, pickles.Global(name), *metadata):
            dtype = name.removeprefix("torch.")
            if dtype in _ITEM_SIZES:
                return _view(at, storage, dtype, (offset, shape, strides), metadata)
    raise InvalidInput(expected="a tensor made of a storage", got="other arguments", at=at)


def _view(
    at: str, storage: _Storage, dtype: str, layout: tuple[object, object, object], metadata: list[object]
) -> _View:
    at = f"{at}: storage {shown(storage.key)}"
    offset, shape, strides = layout
    if any(metadata):
        raise InvalidInput(expected="a plain tensor", got="a lazily negated or conjugated one", at=at)
    if not (_is_size(offset) and _is_sizes(shape) and _is_sizes(strides) and len(shape) == len(strides)):
        expected = f"an offset, at most {MAX_DIMENSIONS} sizes and as many strides, none of them negative"
        raise InvalidInput(expected=expected, got="others", at=at)
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    room = storage.n_bytes // _ITEM_SIZES[dtype]
    if 0 not in shape and last >= room:
        got = f"{shown_shape(shape)} with strides {shown_shape(strides)} from item {offset}"
        raise InvalidInput(expected=f"a view inside a storage of {room} items", got=got, at=at)
    return _View(storage, dtype, offset, shape, strides)


def _is_size(value: object) -> TypeGuard[int]:
    return type(value) is int and value >= 0


def _is_sizes(value: object) -> TypeGuard[tuple[int, ...]]:
    return isinstance(value, tuple) and len(value) <= MAX_DIMENSIONS and all(map(_is_size, value))


def _tensors(content: object, bytes_of: Callable[[_Storage], bytes], *, big_endian: bool, at: str) -> list[Tensor]:
    """Turn the views inside nested containers into tensors with dotted names."""
    tensors: dict[str, Tensor] = {}
    for name, view in _named(content, "", 0, itertools.count(), at):
        if name in tensors:
            raise InvalidInput(expected="each name once", got="two tensors", at=f"{at}: {shown(name)}")
        if len(tensors) == MAX_TENSORS:
            raise InvalidInput(expected=f"at most {MAX_TENSORS} tensors", got="more", at=at)
        read = partial(_read, bytes_of, view, big_endian)
        tensors[name] = Tensor(name, view.shape, view.dtype, read)
    return list(tensors.values())


def _named(value: object, name: str, depth: int, visits: Iterator[int], at: str) -> Iterator[tuple[str, _View]]:
    # A container may occur many times, or inside itself: both the depth and the visits have an end.
    if isinstance(value, _View):
        yield name, value
        return
    items: Iterable[tuple[object, object]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    for key, item in items:
        if next(visits) == _MAX_VISITS or depth == _MAX_DEPTH:
            expected = f"containers at most {_MAX_DEPTH} deep, with {_MAX_VISITS} items in all"
            raise InvalidInput(expected=expected, got="more", at=at)
        if isinstance(item, _View | dict | list | tuple):
            path = f"{name}.{key}" if name else str(key)
            if len(path) > MAX_NAME:
                got = f"{len(path)}: {shown(path)}"
                raise InvalidInput(expected=f"names of at most {MAX_NAME} characters", got=got, at=at)
            yield from _named(item, path, depth + 1, visits, at)


def _read(bytes_of: Callable[[_Storage], bytes], view: _View, big_endian: bool) -> npt.NDArray[np.float32]:
    dtype = raw_dtype(view.dtype, big_endian=big_endian)
    data = bytes_of(view.storage)
    items = np.frombuffer(data, dtype, count=len(data) // dtype.itemsize)
    layout = zip(view.shape, view.strides, strict=True)
    strides = tuple(stride * dtype.itemsize if size > 1 else 0 for size, stride in layout)
    strided = np.lib.stride_tricks.as_strided(items[view.offset :], view.shape, strides, writeable=False)
    return to_float32(strided, view.dtype)
