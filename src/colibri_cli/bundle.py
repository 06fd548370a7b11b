"""The files of a bundle beside its config.json: their names, and the sizes that the config fixes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable


class SizedFile(NamedTuple):
    """A raw float32 file.

    Attributes
    ----------
    name : str
        Path relative to the bundle; the experts' has ``{i}`` where the expert's number goes.
    keys : tuple of str
        The config's keys that fix the size; the first is the one to look at when the size is wrong.
    n_floats : callable
        From the values of ``keys`` to the file's length in floats; 0: the bundle has no such file.
    """

    name: str
    keys: tuple[str, ...]
    n_floats: Callable[..., int]

    def size(self, *values: int) -> int:
        """Return the bytes of the file, given the values of ``keys``."""
        return 4 * self.n_floats(*values)


TENSORS = (
    SizedFile("embedding.bin", ("vocab_size", "hidden_size"), lambda rows, hidden: rows * hidden),
    SizedFile(
        "context.bin",
        ("context", "hidden_size"),
        lambda context, hidden: (2 * context + 1) * hidden * hidden if context else 0,
    ),
    SizedFile("router_weights.bin", ("n_experts", "hidden_size"), lambda rows, hidden: rows * hidden),
    SizedFile("head.bin", ("n_classes", "hidden_size"), lambda rows, hidden: rows * hidden + rows),
)


def expert(artifact: str) -> SizedFile:
    """Return the file of any expert: w1, b1, w2, b2, the first layer twice as high where it is gated."""

    def n_floats(intermediate: int, hidden: int, gated: bool) -> int:
        rows = 2 * intermediate if gated else intermediate
        return rows * hidden + rows + hidden * intermediate + hidden

    return SizedFile(artifact, ("intermediate_size", "hidden_size", "gated"), n_floats)


def expert_name(artifact: str, number: int) -> str:
    """Return the path of one expert's file, relative to the bundle."""
    return artifact.replace("{i}", str(number))
