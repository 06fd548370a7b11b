"""How a module's feed-forward networks are stored: the names and the layout of their tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from colibri_cli.checkpoints.matrices import Finder, Matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Names of tensors below the layer, such as ``mlp.experts.{e}.up_proj.weight``.

    With ``{e}`` each expert has tensors of its own; without it the experts are the first dimension of one tensor, or,
    of a shared expert, there is just the one.

    Attributes
    ----------
    up : str
        ``[I, H]``; without a ``gate``, where experts are gated, both in one: ``[2I, H]``.
    down : str
        ``[H, I]``.
    gate : str, optional
        ``[I, H]``.
    transposed : bool, optional
        Stored the other way round; None: told by the shapes of both, which never fit both ways.
    interleaved : bool
        Gate and up rows in turn, and not gate rows and then up rows.
    up_bias, down_bias : str, optional
    """

    up: str
    down: str
    gate: str | None = None
    transposed: bool | None = False
    interleaved: bool = False
    up_bias: str | None = None
    down_bias: str | None = None


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One expert in float32.

    Attributes
    ----------
    up : ndarray of float32, (2I, H), or (I, H) where not gated
        Gate rows, then up rows. Any strides; a read-only view of the mapped file where that holds it so.
    down : ndarray of float32, (H, I)
        Likewise.
    up_bias : ndarray of float32, (2I,) or (I,), optional
    down_bias : ndarray of float32, (H,), optional
    """

    up: npt.NDArray[np.float32]
    down: npt.NDArray[np.float32]
    up_bias: npt.NDArray[np.float32] | None = None
    down_bias: npt.NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class Ffns:
    """The networks of a module, found in a checkpoint.

    Attributes
    ----------
    prefix : str
        What names of the layout begin with: ``model.layers.3.``.
    n : int, optional
        Experts; None: the one shared expert.
    """

    finder: Finder
    prefix: str
    layout: Layout
    n: int | None
    hidden_size: int
    intermediate_size: int
    gated: bool

    def matrices(self, e: int) -> tuple[list[Matrix], Matrix, Matrix | None, Matrix | None, bool]:
        """Find an expert's up (and gate) matrices, its down matrix and its biases, and say whether they are transposed.

        Raises
        ------
        InvalidInput
            One is missing, misshapen or of another type.
        """
        layout, hidden, inter = self.layout, self.hidden_size, self.intermediate_size
        if layout.gate is not None:
            gate, up = (self._matrix(name, e, inter, hidden, False) for name in (layout.gate, layout.up))
            return [gate, up], self._matrix(layout.down, e, hidden, inter, False), None, None, False
        n_up = inter * (2 if self.gated else 1)
        if f"{self.prefix}{layout.up}_blocks" in self.finder.shards.tensors:  # never transposed
            transposed = False
            up, down = self._mxfp4(layout.up, e, n_up, hidden), self._mxfp4(layout.down, e, hidden, inter)
        else:
            transposed = self._transposed(n_up)
            up = self._matrix(layout.up, e, n_up, hidden, transposed)
            down = self._matrix(layout.down, e, hidden, inter, transposed)
        return [up], down, self._vector(layout.up_bias, e, n_up), self._vector(layout.down_bias, e, hidden), transposed

    @property
    def samples(self) -> range:
        """Experts whose matrices come from every tensor of the module."""
        return range(self.n if self.n is not None and "{e}" in self.layout.up else 1)

    def all_matrices(self, e: int) -> list[Matrix]:
        """List all that an expert is read from."""
        ups, down, up_bias, down_bias, _ = self.matrices(e)
        return [*ups, down, *(bias for bias in (up_bias, down_bias) if bias is not None)]

    def read(self, e: int) -> ExpertWeights:
        """Read one expert.

        Raises
        ------
        InvalidInput
            A scale of its MXFP4 weights is not a number.
        """
        ups, down, up_bias, down_bias, transposed = self.matrices(e)
        if len(ups) == 1:
            up = ups[0].read().T if transposed else ups[0].read()
        else:
            up = np.empty((2 * self.intermediate_size, self.hidden_size), np.float32)
            for half, matrix in zip((up[: self.intermediate_size], up[self.intermediate_size :]), ups, strict=True):
                matrix.read(half)
        bias = None if up_bias is None else up_bias.read()
        if self.layout.interleaved:
            up = np.concatenate([up[::2], up[1::2]])
            bias = None if bias is None else np.concatenate([bias[::2], bias[1::2]])
        low = down.read()
        return ExpertWeights(up, low.T if transposed else low, bias, None if down_bias is None else down_bias.read())

    def _place(self, name: str, e: int) -> tuple[str, int | None, int]:
        """Return a tensor's name, and which of how many parts of it are the expert's."""
        if "{e}" in name or self.n is None:
            return self.prefix + name.replace("{e}", str(e)), None, 0
        return self.prefix + name, e, self.n

    def _matrix(self, name: str, e: int, rows: int, columns: int, transposed: bool) -> Matrix:
        name, index, n = self._place(name, e)
        shape = (columns, rows) if transposed else (rows, columns)
        return self.finder.matrix(name, *shape, index, n)

    def _mxfp4(self, name: str, e: int, rows: int, columns: int) -> Matrix:
        return self.finder.mxfp4(self.prefix + name, rows, columns, e, self.n or 1)

    def _vector(self, name: str | None, e: int, size: int) -> Matrix | None:
        if name is None:
            return None
        name, index, n = self._place(name, e)
        return self.finder.vector(name, size, index, n)

    def _transposed(self, n_up: int) -> bool:
        if self.layout.transposed is not None:
            return self.layout.transposed
        up, down = (self.finder.shape(self.prefix + name) or () for name in (self.layout.up, self.layout.down))
        hidden, inter = self.hidden_size, self.intermediate_size
        return up[-2:] == (hidden, n_up) and down[-2:] == (inter, hidden)
