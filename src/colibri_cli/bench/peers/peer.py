"""What the bench knows about a peer, and what it asks of one."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from colibri_cli.bench.shapes import Shape

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Kind:
    """One way in which a peer holds weights of a type.

    Attributes
    ----------
    name : str
        What tells it from the peer's other kinds of the same type; empty where there is no other.
    dtype : {"float32", "bfloat16", "int8", "int4"}
    bits : float
        Of a weight, scales included.
    multiple : int
        Of which hidden and intermediate size must be.
    """

    name: str
    dtype: str
    bits: float
    multiple: int = 1

    def n_bytes(self, n_weights: int) -> int:
        """Bytes of so many weights."""
        return int(n_weights * self.bits / 8)

    def refusal(self, shape: Shape) -> str | None:
        """Say why the peer cannot run a shape so; None: it can."""
        for size in (shape.hidden_size, shape.intermediate_size):
            if size % self.multiple:
                return f"{self.name or self.dtype} needs rows of a multiple of {self.multiple} weights, not of {size}"
        return None


@dataclass(frozen=True, slots=True)
class Peer:
    """A library that runs MoE layers.

    Attributes
    ----------
    name : str
    requirements : tuple of str
        What pip installs, with the oldest versions that will do.
    modules : tuple of str
        What must then be there to import.
    kinds : tuple of Kind
    lacks : mapping of str to str
        Why it has no kind of a weight type.
    base_bytes : int
        Memory of a process that has imported it.
    """

    name: str
    requirements: tuple[str, ...]
    modules: tuple[str, ...]
    kinds: tuple[Kind, ...]
    lacks: Mapping[str, str] = field(default_factory=dict)
    base_bytes: int = 128 << 20

    def missing(self) -> list[str]:
        """Modules that are not installed."""
        return [module for module in self.modules if find_spec(module) is None]


class Batch(NamedTuple):
    """Tokens and where they go.

    Attributes
    ----------
    hidden : ndarray of float32, (T, H)
    ids : ndarray of int32, (T, K)
    weights : ndarray of float32, (T, K)
    logits : ndarray of float32, (T, E)
        Of which the best K are ``ids``, and the softmax over those ``weights``.
    """

    hidden: Floats
    ids: npt.NDArray[np.int32]
    weights: Floats
    logits: Floats

    def first(self, n_tokens: int) -> Batch:
        """Give the first tokens."""
        return Batch(self.hidden[:n_tokens], self.ids[:n_tokens], self.weights[:n_tokens], self.logits[:n_tokens])


class Weights(NamedTuple):
    """An expert layer as PyTorch stores it.

    Attributes
    ----------
    gate_up : ndarray of float32, (E, 2I, H)
        Gate rows, then up rows.
    down : ndarray of float32, (E, H, I)
    """

    gate_up: Floats
    down: Floats


class Bound(NamedTuple):
    """A batch made ready.

    Attributes
    ----------
    call : callable
        Run the layer once.
    answer : callable
        Give what the last call left, float32 ``(T, H)``.
    """

    call: Callable[[], object]
    answer: Callable[[], Floats]


class Engine(Protocol):
    """A peer that holds weights."""

    def versions(self) -> dict[str, str]:
        """Name what runs: packages and the instruction sets they found."""

    def prepare(self, threads: int) -> None:
        """Use so many threads from now on."""

    def bind(self, batch: Batch) -> Bound:
        """Make a batch ready; the one before it is no longer needed."""


class Load(Protocol):
    """The function ``load`` of a peer's module."""

    def __call__(self, kind: Kind, shape: Shape, weights: Weights, folder: Path) -> Engine:
        """Take a copy of the weights in the peer's own form; ``folder`` is an empty one for its files."""
