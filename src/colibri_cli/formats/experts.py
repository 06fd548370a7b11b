"""Raw expert files: float32 little-endian ``[w1, b1, w2, b2]``, row-major, ``[out][in]``, no header."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt


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

    @property
    def file(self) -> str:
        """What a raw file holds, for messages."""
        sizes = f"{self.hidden_size} -> {self.intermediate_size} -> {self.hidden_size}"
        return f"{'gated' if self.gated else 'ungated'} {sizes}, float32, with biases"

    def split(self, raw: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.float32], ...]:
        """View a raw file's floats as ``w1, b1, w2, b2``."""
        hidden, inter, n_up = self.hidden_size, self.intermediate_size, self.n_up
        w1, b1, w2, b2 = np.split(raw, np.cumsum([n_up * hidden, n_up, hidden * inter]))
        return w1.reshape(n_up, hidden), b1, w2.reshape(hidden, inter), b2
