"""The files of a bundle beside its config.json: their names, and the sizes that the config fixes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from colibri_cli.formats.packed import HEADER_SIZE, payload_size

if TYPE_CHECKING:
    from collections.abc import Callable


JOURNAL = "pack-journal.json"  # of a bundle that is not finished: its config.json comes last


class SizedFile(NamedTuple):
    """A file whose size the config fixes.

    Attributes
    ----------
    name : str
        Path relative to the bundle, or to a layer's folder; the experts' has ``{i}`` where the expert's number goes.
    keys : tuple of str
        The config's keys that fix the size; the first is the one to look at when the size is wrong.
    size : callable
        From the values of ``keys`` to the file's bytes; 0: the bundle has no such file.
    """

    name: str
    keys: tuple[str, ...]
    size: Callable[..., int]


def _floats(name: str, keys: tuple[str, ...], count: Callable[..., int]) -> SizedFile:
    return SizedFile(name, keys, lambda *values: 4 * count(*values))


TENSORS = (
    _floats("embedding.bin", ("vocab_size", "hidden_size"), lambda rows, hidden: rows * hidden),
    _floats(
        "context.bin",
        ("context", "hidden_size"),
        lambda context, hidden: (2 * context + 1) * hidden * hidden if context else 0,
    ),
    _floats("router_weights.bin", ("n_experts", "hidden_size"), lambda rows, hidden: rows * hidden),
    _floats("head.bin", ("n_classes", "hidden_size"), lambda rows, hidden: rows * hidden + rows),
)
"""Of a token classifier."""


def expert(artifact: str) -> SizedFile:
    """Return the raw file of any expert: w1, b1, w2, b2, the first layer twice as high where it is gated."""

    def n_floats(intermediate: int, hidden: int, gated: bool) -> int:
        rows = 2 * intermediate if gated else intermediate
        return rows * hidden + rows + hidden * intermediate + hidden

    return _floats(artifact, ("intermediate_size", "hidden_size", "gated"), n_floats)


def expert_name(artifact: str, number: int) -> str:
    """Return the path of one expert's file, relative to the bundle or to its layer's folder."""
    return artifact.replace("{i}", str(number))


def layer_folder(layer: int) -> str:
    """Return the path of a layer's folder in a bundle of layers."""
    return f"layers/{layer}"


def _packed(intermediate: int, hidden: int, gated: bool, dtype: str, biased: bool = False) -> int:
    return HEADER_SIZE + payload_size(hidden, intermediate, gated=gated, dtype=dtype, biased=biased)


LAYER_FILES = (
    _floats("router_weights.bin", ("n_experts", "hidden_size"), lambda rows, hidden: rows * hidden),
    _floats("router_bias.bin", ("router.bias", "n_experts"), lambda there, rows: rows if there else 0),
    _floats("correction_bias.bin", ("router.correction_bias", "n_experts"), lambda there, rows: rows if there else 0),
    SizedFile("shared.bin", ("shared.intermediate_size", "hidden_size", "gated", "dtype"), _packed),
    _floats("shared_gate.bin", ("shared.gated", "hidden_size"), lambda there, hidden: hidden if there else 0),
)
"""Of a layer in a bundle of layers, in its folder; those with a key of ``shared`` only where that is not null."""


def packed_expert(artifact: str) -> SizedFile:
    """Return the packed file of any expert of a bundle of layers."""
    return SizedFile(artifact, ("intermediate_size", "hidden_size", "gated", "dtype", "biased"), _packed)
