"""Raw expert files: float32 little-endian ``[w1, b1, w2, b2]``, row-major, ``[out][in]``, no header."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from colibri_cli.errors import InvalidInput
from colibri_cli.formats.files import unreadable


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """What every expert of a layer has in common.

    Attributes
    ----------
    hidden_size, intermediate_size : int
    activation : {"relu", "relu2", "silu", "gelu", "gelu_tanh"}
    gated : bool
        ``w1`` holds the gate's rows and then the up projection's.
    """

    hidden_size: int
    intermediate_size: int
    activation: str
    gated: bool

    @property
    def n_up(self) -> int:
        """Rows of ``w1``."""
        return self.intermediate_size * (2 if self.gated else 1)

    @property
    def n_bytes(self) -> int:
        """Size of a raw file."""
        n_weights = self.hidden_size * (self.n_up + self.intermediate_size)
        return 4 * (n_weights + self.n_up + self.hidden_size)

    def split(self, raw: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.float32], ...]:
        """View a raw file's floats as ``w1, b1, w2, b2``."""
        hidden, inter, n_up = self.hidden_size, self.intermediate_size, self.n_up
        w1, b1, w2, b2 = np.split(raw, np.cumsum([n_up * hidden, n_up, hidden * inter]))
        return w1.reshape(n_up, hidden), b1, w2.reshape(hidden, inter), b2


def read_expert(path: str | os.PathLike[str], shape: ExpertShape, *, mapped: bool = False) -> npt.NDArray[np.float32]:
    """Read, or map as shared read-only pages, the floats of one raw file.

    Raises
    ------
    UsageError
        The file is missing or cannot be read.
    InvalidInput
        It is not exactly as large as the shape says.
    """
    try:
        with Path(path).open("rb") as file:
            check_size(path, os.fstat(file.fileno()).st_size, shape)
            if mapped:
                pages = mmap.mmap(file.fileno(), shape.n_bytes, access=mmap.ACCESS_READ)
                return np.frombuffer(pages, "<f4")
            floats = np.fromfile(file, "<f4", shape.n_bytes // 4)
    except OSError as error:
        raise unreadable(path, error) from error
    check_size(path, floats.nbytes, shape)  # it may have shrunk while it was read
    return floats


def check_size(path: str | os.PathLike[str], n_bytes: int, shape: ExpertShape) -> None:
    """Refuse a file that is not exactly one expert."""
    if n_bytes != shape.n_bytes:
        kind = "gated" if shape.gated else "ungated"
        raise InvalidInput(
            expected=f"{shape.n_bytes} bytes ({kind} {shape.hidden_size} -> {shape.intermediate_size} -> "
            f"{shape.hidden_size}, float32, with biases)",
            got=f"{n_bytes} bytes",
            at=os.fspath(path),
        )
