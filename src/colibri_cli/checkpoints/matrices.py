"""One matrix or vector of a checkpoint: checked from the header, read as float32 when asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from colibri_cli.checkpoints import fp8, mxfp4
from colibri_cli.errors import InvalidInput
from colibri_cli.formats.tensor import shown_shape

if TYPE_CHECKING:
    import numpy.typing as npt

    from colibri_cli.checkpoints.shards import Shards, Stored

_PLAIN = {"F32": "<f4", "BF16": "<u2", "F16": "<f2"}
_FP8 = "F8_E4M3"


@dataclass(frozen=True, slots=True)
class Span:
    """The bytes of a tensor, or of its part ``index`` along the first dimension."""

    stored: Stored
    begin: int
    end: int
    shape: tuple[int, ...]

    @classmethod
    def of(cls, stored: Stored, index: int | None) -> Span:
        """Take all of a tensor, or the part of one expert."""
        entry = stored.entry
        if index is None:
            return cls(stored, entry.begin, entry.end, entry.shape)
        size = entry.n_bytes // entry.shape[0]
        begin = entry.begin + index * size
        return cls(stored, begin, begin + size, entry.shape[1:])

    @property
    def n_bytes(self) -> int:
        """How many there are."""
        return self.end - self.begin

    def view(self, dtype: str = "u1") -> npt.NDArray[np.generic]:
        """View them where they are mapped, at whatever address that is."""
        raw: npt.NDArray[np.generic] = self.stored.shard.bytes(self.begin, self.end).view(dtype)
        return raw.reshape(self.shape)

    def expect(self) -> None:
        """Ask the system to read them ahead."""
        self.stored.shard.expect(self.begin, self.end)

    def forget(self) -> None:
        """Give back their pages."""
        self.stored.shard.forget(self.begin, self.end)


@dataclass(frozen=True, slots=True)
class Matrix:
    """Stored weights.

    Attributes
    ----------
    shape : tuple of int
        As they are read: (rows, columns), or (size,) of a vector.
    data, scales : Span
        Scales belong to FP8 and MXFP4.
    block : (int, int), optional
        Rows and columns that share a scale of FP8.
    """

    shape: tuple[int, ...]
    data: Span
    scales: Span | None = None
    block: tuple[int, int] | None = None

    @property
    def spans(self) -> tuple[Span, ...]:
        """All that is read."""
        return (self.data,) if self.scales is None else (self.data, self.scales)

    def read(self, out: npt.NDArray[np.float32] | None = None) -> npt.NDArray[np.float32]:
        """Return the values, exact; without ``out`` a read-only view of the file where they lie as float32.

        Parameters
        ----------
        out : array of float32, C-contiguous, of the shape, optional
            Written and returned.

        Raises
        ------
        InvalidInput
            A scale is not a number.
        """
        code = self.data.stored.entry.code
        values: npt.NDArray[np.float32]
        if code == "F32" and out is None:
            values = self.data.view("<f4")  # type: ignore[assignment]  # what the view is of
            return values if values.flags.aligned else values.copy()
        values = np.empty(self.shape, np.float32) if out is None else out
        if code == "BF16":
            bits = values.view(np.uint32)
            bits[...] = self.data.view("<u2")
            bits <<= np.uint32(16)
        elif self.scales is None:
            values[...] = self.data.view(_PLAIN[code])
        elif self.block is None:
            scales = self.scales
            mxfp4.decode(self.data.view(), scales.view(), values, scales.stored.at)  # type: ignore[arg-type]  # bytes
        else:
            scale = Matrix(self.scales.shape, self.scales).read()
            grid = scale.reshape(1, 1) if scale.size == 1 else scale
            fp8.decode(self.data.view(), grid, self.block, values)  # type: ignore[arg-type]  # bytes
        return values


class Finder:
    """Finds a model's tensors by name and checks them against what the config says.

    Parameters
    ----------
    shards : Shards
    block : (int, int) or None
        Rows and columns that share a scale of FP8; (0, 0): the whole matrix. None: the checkpoint is not FP8.
    """

    def __init__(self, shards: Shards, block: tuple[int, int] | None) -> None:
        self.shards = shards
        self._block = block

    def has(self, name: str) -> bool:
        """Tell whether a tensor is there, in any form."""
        return name in self.shards.tensors or f"{name}_blocks" in self.shards.tensors

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor that is stored as it is."""
        stored = self.shards.tensors.get(name)
        return None if stored is None else stored.entry.shape

    def vector(self, name: str, size: int, index: int | None = None, n: int = 0) -> Matrix:
        """Find a vector, or the ``index``-th of ``n`` that are stored as one tensor.

        Raises
        ------
        InvalidInput
            It is missing, misshapen or of another type.
        """
        stored = self._typed(name, _PLAIN)
        _check_shape(stored, (size,) if index is None else (n, size))
        return Matrix((size,), Span.of(stored, index))

    def matrix(self, name: str, rows: int, columns: int, index: int | None = None, n: int = 0) -> Matrix:
        """Find a matrix, or the ``index``-th of ``n`` that are stored as one tensor.

        Raises
        ------
        InvalidInput
            It or its scales are missing, misshapen or of another type.
        """
        many = () if index is None else (n,)
        stored = self._typed(name, (*_PLAIN, _FP8))
        _check_shape(stored, (*many, rows, columns))
        data = Span.of(stored, index)
        if stored.entry.code != _FP8:
            return Matrix((rows, columns), data)
        if self._block is None:
            raise InvalidInput(
                expected=f"{', '.join(_PLAIN)}, or {_FP8} with quantization_config in config.json",
                got=_FP8,
                at=stored.at,
            )
        block = (self._block[0] or rows, self._block[1] or columns)
        scales = self._typed(f"{name}_scale_inv", _PLAIN)
        grid = (*many, -(-rows // block[0]), -(-columns // block[1]))
        if self._block != (0, 0) or scales.entry.shape not in {many, (*many, 1)}:  # one scale has several shapes
            _check_shape(scales, grid)
        return Matrix((rows, columns), data, Span.of(scales, index), block)

    def mxfp4(self, name: str, rows: int, columns: int, index: int, n: int) -> Matrix:
        """Find the ``index``-th of ``n`` matrices of MXFP4.

        Raises
        ------
        InvalidInput
            Its blocks or scales are missing, misshapen or of another type.
        """
        blocks, scales = self._typed(f"{name}_blocks", ("U8",)), self._typed(f"{name}_scales", ("U8",))
        groups = -(-columns // mxfp4.BLOCK)
        _check_shape(blocks, (n, rows, groups, mxfp4.BLOCK_BYTES))
        _check_shape(scales, (n, rows, groups))
        if columns % mxfp4.BLOCK:
            raise InvalidInput(expected=f"a multiple of {mxfp4.BLOCK} inputs", got=str(columns), at=blocks.at)
        return Matrix((rows, columns), Span.of(blocks, index), Span.of(scales, index))

    def _typed(self, name: str, codes: dict[str, str] | tuple[str, ...]) -> Stored:
        stored = self.shards.tensors.get(name)
        if stored is None:
            raise InvalidInput(expected=f"the tensor {name}", got="none", at=str(self.shards.directory))
        if stored.entry.code not in codes:
            raise InvalidInput(expected=" or ".join(codes), got=stored.entry.code, at=stored.at)
        return stored


def _check_shape(stored: Stored, shape: tuple[int, ...]) -> None:
    if stored.entry.shape != shape:
        raise InvalidInput(expected=shown_shape(shape), got=shown_shape(stored.entry.shape), at=stored.at)
