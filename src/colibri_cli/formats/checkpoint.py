"""Any file that holds trained tensors: the format is told from the content, else from the ending."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from colibri_cli.errors import InvalidInput, UsageError
from colibri_cli.formats import archive, numpy_files, pytorch, router_table, safetensors
from colibri_cli.formats.checked_file import CheckedFile
from colibri_cli.formats.tensor import Tensor

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    import numpy.typing as npt

ENDINGS = (".pt", ".pth", ".safetensors", ".npy", ".npz", ".bin")


@contextmanager
def open_checkpoint(
    path: str | os.PathLike[str], *, hidden_size: int | None = None, transposed: bool = False
) -> Iterator[list[Tensor]]:
    """List the tensors of a file; they can be read until the context ends.

    Parameters
    ----------
    path : path-like
        A PyTorch checkpoint (zip or legacy), .safetensors, .npy, .npz, a router blob, or raw float32
        little-endian values (any other .bin).
    hidden_size : int, optional
        Positive. What a raw file does not say of itself; unused for the others.
    transposed : bool
        Whether a raw file is ``[hidden_size, n_experts]`` and not ``[n_experts, hidden_size]``.

    Yields
    ------
    list of Tensor

    Raises
    ------
    UsageError
        The file cannot be read, has an unknown ending, or is raw and ``hidden_size`` is missing.
    InvalidInput
        The content is damaged, hostile, or not what the ending says.
    """
    with CheckedFile(path) as file:
        yield _tensors(file, Path(path).suffix.lower(), hidden_size, transposed)


def _tensors(file: CheckedFile, ending: str, hidden_size: int | None, transposed: bool) -> list[Tensor]:
    head = file.read(0, min(file.size, 16))
    if head.startswith(archive.MAGIC):
        members = archive.Archive(file)
        return pytorch.read_zip(file, members) if pytorch.is_pytorch(members) else numpy_files.read_npz(file, members)
    if head.startswith(numpy_files.MAGIC):
        return numpy_files.read_npy(file)
    if head.startswith(router_table.MAGIC):
        gate = router_table.gate_of_blob(file)
        return [Tensor("", gate.shape, "float32", lambda: gate)]
    if head.startswith(pytorch.LEGACY_MAGIC) or ending in (".pt", ".pth"):
        return pytorch.read_legacy(file)
    if ending == ".safetensors":
        return safetensors.read(file)
    if ending == ".bin":
        return [_raw(file, hidden_size, transposed)]
    if ending in ENDINGS:
        raise InvalidInput(
            expected=f"a {ending} file",
            got=f"one that begins {head[:6].hex(' ')}" if head else "an empty file",
            at=file.name,
        )
    raise UsageError(
        expected=f"a file ending in {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}", got=ending or "no ending", at=file.name
    )


def _raw(file: CheckedFile, hidden_size: int | None, transposed: bool) -> Tensor:
    if hidden_size is None:
        raise UsageError(expected="--hidden-size for raw float32 values", got="none", at=file.name)
    n_experts, rest = divmod(file.size, 4 * hidden_size)
    if rest:
        expected = f"a multiple of {4 * hidden_size} bytes ({hidden_size} float32 values an expert)"
        raise InvalidInput(expected=expected, got=f"{file.size} bytes", at=file.name)
    shape = (hidden_size, n_experts) if transposed else (n_experts, hidden_size)

    def read() -> npt.NDArray[np.float32]:
        return np.frombuffer(file.read(0, file.size), "<f4").astype(np.float32).reshape(shape)

    return Tensor("", shape, "float32", read)
