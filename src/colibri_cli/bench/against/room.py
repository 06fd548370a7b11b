"""Whether what is asked for fits this machine, in memory and on the disk."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from colibri_cli.bench.against.limits import Limits
from colibri_cli.errors import UsageError
from colibri_cli.topology import Topology, describe

if TYPE_CHECKING:
    from colibri_cli.bench.against.request import Request
    from colibri_cli.bench.shapes import Shape

_BATCH_FLOATS = 16  # floats for each hidden or intermediate value of a slot, in all arms' buffers together
_CHECKS = 1  # bytes a weight while integers are packed: which floats are finite


def check_room(request: Request, folder: Path, machine: Topology | None = None) -> None:
    """Refuse what would not fit, before it is made.

    Parameters
    ----------
    folder : path
        Where the weights' file would lie.
    machine : Topology, optional
        Default: this one.

    Raises
    ------
    UsageError
        Memory or the disk is too small; the hint says how many experts would fit.
    """
    found = describe() if machine is None else machine
    memory = min(size for size in (found["memory_available"], found["memory_limit"], 1 << 60) if size is not None)
    in_memory = _is_memory(folder)
    for shape in request.shapes:
        need = _memory(request, shape, file_counts=in_memory)
        if need > memory:
            fits = _largest(request, shape, memory, file_counts=in_memory)
            raise UsageError(
                expected=f"{_gigabytes(need)} of memory for {shape.name} with all arms of a weight type",
                got=f"{_gigabytes(memory)} available",
                at="--shape",
                hint=f"--experts {fits} fits" if fits else "fewer of --against, --dtype or --tokens",
            )
        disk, free = _disk(request, shape), shutil.disk_usage(folder).free
        if disk > free:
            raise UsageError(
                expected=f"{_gigabytes(disk)} for the weights of {shape.name}",
                got=f"{_gigabytes(free)} free",
                at=str(folder),
                hint="TMPDIR names another folder, --experts takes fewer experts",
            )


def _memory(request: Request, shape: Shape, *, file_counts: bool) -> int:
    """Bytes at the most demanding of the weight types, every arm's process included."""
    return max(_of_type(request, shape, dtype) for dtype in request.dtypes) + file_counts * _disk(request, shape)


def _of_type(request: Request, shape: Shape, dtype: str) -> int:
    arms = [entrant for entrant in request.entrants(dtype) if entrant.kind.refusal(shape) is None]
    held = sum(entrant.peer.base_bytes + entrant.kind.n_bytes(shape.n_weights) for entrant in arms)
    sizes = shape.hidden_size + shape.intermediate_size
    batches = 4 * _BATCH_FLOATS * max(request.tokens) * shape.top_k * sizes
    packing = _CHECKS * shape.n_weights if dtype in ("int8", "int4") else 0
    return held + batches + packing + Limits.memory()


def _disk(request: Request, shape: Shape) -> int:
    """Bytes of the float32 file, and of the widest copy that a peer keeps in a file of its own."""
    own = "onnxruntime" in request.against
    return 4 * shape.n_weights * (1 + own)


def _largest(request: Request, shape: Shape, memory: int, *, file_counts: bool) -> int:
    """Give the most experts that fit; 0: not even as many as a token needs."""
    fitting = (
        n
        for n in range(shape.n_experts - 1, shape.top_k - 1, -1)
        if _memory(request, replace(shape, n_experts=n), file_counts=file_counts) <= memory
    )
    return next(fitting, 0)


def _is_memory(folder: Path, mounts: Path = Path("/proc/mounts")) -> bool:
    """Whether files there take memory, not disk."""
    try:
        lines = mounts.read_text("utf-8", "replace").splitlines()
    except OSError:
        return False
    at = [(re.sub(r"\\040", " ", line.split()[1]), line.split()[2]) for line in lines]
    inside = [(len(point), kind) for point, kind in at if folder.resolve().is_relative_to(point)]
    return max(inside, default=(0, ""))[1] in ("tmpfs", "ramfs")


def _gigabytes(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.1f} GB"
