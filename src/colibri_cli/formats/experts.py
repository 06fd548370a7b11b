"""What a layer's experts share, and raw expert files: float32 ``[w1, b1, w2, b2]``, ``[out][in]``, no header."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
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
    dtype : {"float32", "bfloat16", "int8", "int4"}
        Of the weights as they are held.
    alpha, beta : float
    limit : float or None
        As in ``Experts.from_arrays``.
    """

    hidden_size: int
    intermediate_size: int
    activation: str
    gated: bool
    dtype: str = "float32"
    alpha: float = 1.0
    beta: float = 0.0
    limit: float | None = None

    @property
    def n_up(self) -> int:
        """Rows of ``w1``."""
        return self.intermediate_size * (2 if self.gated else 1)

    @property
    def n_bytes(self) -> int:
        """Size of a raw file, which is float32 whatever the weights are held as."""
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
        b1 = n_up * hidden
        w2 = b1 + n_up
        b2 = w2 + hidden * inter
        return raw[:b1].reshape(n_up, hidden), raw[b1:w2], raw[w2:b2].reshape(hidden, inter), raw[b2:]
