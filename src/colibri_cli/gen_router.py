"""A trained gate in, a constant table out: find the tensor, check it, write it where it changed."""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from colibri_cli.errors import ColibriError, InvalidInput, UsageError
from colibri_cli.formats import router_table
from colibri_cli.formats.checkpoint import open_checkpoint
from colibri_cli.formats.files import read_bytes, write_atomically
from colibri_cli.formats.inputs import read_input
from colibri_cli.formats.tensor import Tensor, is_floating, shown, shown_shape

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

_MAX_LISTED = 20
_LARGEST_CONFIG = 1 << 18  # bytes


@dataclass(frozen=True, slots=True)
class Generated:
    """What `generate` did.

    Attributes
    ----------
    source, output : str
        Paths as given.
    key : str
        The tensor's name in the source; empty where it has none.
    n_experts, hidden_size, width : int
    bytes : int
        Size of the output.
    sha256 : str
        Of the output, in hexadecimal.
    before : {"missing", "stale", "up to date"}
        The output before the call; "stale": it had other bytes.
    written : bool
        It was missing or stale and was written.
    """

    source: str
    key: str
    n_experts: int
    hidden_size: int
    width: int
    output: str
    bytes: int
    sha256: str
    before: str
    written: bool

    @property
    def stale(self) -> bool:
        """Whether the output does not hold the table now."""
        return self.before != "up to date" and not self.written

    def to_json(self) -> str:
        """Return the report as ``schema/gen-router.schema.json`` describes it, ending in a newline."""
        return json.dumps({"schema": "colibri.gen-router/1", **asdict(self)}, indent=2) + "\n"

    def to_text(self) -> str:
        """Return the report as one line."""
        state = "written" if self.written else self.before
        plural = "s" if self.n_experts > 1 else ""
        return (
            f"{self.output}: {state}, {self.n_experts} expert{plural}, hidden size {self.hidden_size}, "
            f"width {self.width}, {self.bytes} bytes, sha256 {self.sha256}\n"
        )


def generate(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    key: str | None = None,
    name: str | None = None,
    hidden_size: int | None = None,
    transposed: bool = False,
    check: bool = False,
) -> Generated:
    """Turn trained gate weights into a constant table.

    Parameters
    ----------
    source : path-like
        What `colibri_cli.formats.checkpoint.open_checkpoint` reads.
    output : path-like
        Ending in .c, .h, .bin or .npy; left alone when it holds the right bytes already.
    key : str, optional
        Name of the tensor; else the only tensor, or the only one that can be a gate.
    name : str, optional
        The table's C identifier.
    hidden_size : int, optional
        Needed for raw values, and where there are more experts than features; else compared with the tensor's.
    transposed : bool
        The tensor is ``[hidden_size, n_experts]``.
    check : bool
        Write nothing, only compare.

    Raises
    ------
    UsageError
        A flag that makes no sense, a file that cannot be read or written.
    InvalidInput
        A source that is damaged, hostile or ambiguous, or weights that are no gate.
    """
    target = Path(output)
    if target.suffix not in (".c", ".h", ".bin", ".npy"):
        got = target.suffix or "no ending"
        raise UsageError(expected="a file ending in .c, .h, .bin or .npy", got=got, at=f"--output {target}")
    if name is not None:
        if target.suffix not in (".c", ".h"):
            raise UsageError(expected="--name with .c or .h only", got=target.suffix, at=f"--output {target}")
        router_table.check_name(name)
    if _is_same(source, target):
        raise UsageError(expected="another file than the source", got="the source", at=f"--output {target}")
    found, gate = read_gate(source, key=key, hidden_size=hidden_size, transposed=transposed)
    data = _rendered(gate, target.suffix, name or router_table.DEFAULT_NAME)
    before = _state(target, data)
    written = before != "up to date" and not check
    if written:
        write_atomically(target, data)
    n_experts, hidden_size = gate.shape
    return Generated(
        source=os.fspath(source),
        key=found,
        n_experts=n_experts,
        hidden_size=hidden_size,
        width=router_table.width_of(n_experts),
        output=os.fspath(output),
        bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        before=before,
        written=written,
    )


def read_gate(
    source: str | os.PathLike[str],
    *,
    key: str | None = None,
    hidden_size: int | None = None,
    transposed: bool = False,
) -> tuple[str, npt.NDArray[np.float32]]:
    """Find and read the gate in a file.

    Parameters
    ----------
    source, key, hidden_size, transposed
        As for `generate`.

    Returns
    -------
    key : str
    gate : float32 ndarray of shape (n_experts, hidden_size)
        C-contiguous and finite.

    Raises
    ------
    UsageError, InvalidInput
        As for `generate`.
    """
    if hidden_size is not None and hidden_size < 1:
        raise UsageError(expected="a positive size", got=str(hidden_size), at="--hidden-size")
    with (
        _hinting_at_hidden_size(Path(source)),
        open_checkpoint(source, hidden_size=hidden_size, transposed=transposed) as tensors,
    ):
        tensor = _chosen(tensors, key, hidden_size, transposed, at=os.fspath(source))
        at = f"{os.fspath(source)}: {shown(tensor.name)}" if tensor.name else os.fspath(source)
        wanted = "[hidden_size, n_experts]" if transposed else "[n_experts, hidden_size]"
        if len(tensor.shape) != 2:
            raise InvalidInput(expected=f"a gate {wanted}", got=shown_shape(tensor.shape), at=at)
        if not is_floating(tensor.dtype):
            expected = "float32, float64, float16 or bfloat16"
            raise InvalidInput(expected=expected, got=tensor.dtype, at=at)
        n_experts, found = _oriented(tensor, transposed)
        if hidden_size not in (None, found):
            hint = None if transposed or tensor.shape[0] != hidden_size else "is it --transposed?"
            raise InvalidInput(expected=f"hidden size {hidden_size}", got=str(found), at=at, hint=hint)
        router_table.check_size(n_experts, found, at=at)
        if n_experts > found and hidden_size is None:
            raise InvalidInput(
                expected="at least as many features as experts",
                got=f"{n_experts} experts of hidden size {found}",
                at=at,
                hint=f"--transposed if it is [hidden_size, n_experts], --hidden-size {found} if it is right as it is",
            )
        values = tensor.read()
    gate = np.ascontiguousarray(values.T if transposed else values)
    wrong = np.argwhere(~np.isfinite(gate))
    if len(wrong):
        expert, feature = wrong[0]
        where = f"{at}, expert {expert}, feature {feature}"
        raise InvalidInput(expected="finite weights in float32", got=f"{gate[expert, feature]}", at=where)
    return tensor.name, gate


@contextmanager
def _hinting_at_hidden_size(source: Path) -> Iterator[None]:
    """Say what --hidden-size may be where it is missing."""
    try:
        yield
    except UsageError as error:
        if not error.expected.startswith("--hidden-size"):
            raise
        stated = _stated_hidden_size(source.with_name("config.json"))
        hint = "--hidden-size N, the number of features of a hidden state"
        if stated is not None:
            hint = f"--hidden-size {stated}, as config.json beside it states"
        raise UsageError(expected=error.expected, got=error.got, at=error.at, hint=hint) from error


def _stated_hidden_size(config: Path) -> int | None:
    try:
        document = json.loads(read_input(config, limit=_LARGEST_CONFIG))
    except (ColibriError, ValueError, RecursionError):  # it is only asked for a hint
        return None
    size = document.get("hidden_size") if isinstance(document, dict) else None
    return size if type(size) is int and size > 0 else None


def _chosen(tensors: list[Tensor], key: str | None, hidden_size: int | None, transposed: bool, *, at: str) -> Tensor:
    if key is not None:
        for tensor in tensors:
            if tensor.name == key:
                return tensor
        raise InvalidInput(expected=f"a tensor named {shown(key)!r}", got="none", at=at, hint=_listed(tensors))
    if len(tensors) == 1:
        return tensors[0]
    gates = [tensor for tensor in tensors if _can_be_gate(tensor, hidden_size, transposed)]
    if len(gates) == 1:
        return gates[0]
    raise InvalidInput(
        expected="one tensor that can be a gate (2-D, floating, more features than experts)",
        got=f"{len(gates)} of {len(tensors)}",
        at=at,
        hint=_listed(gates or tensors),
    )


def _can_be_gate(tensor: Tensor, hidden_size: int | None, transposed: bool) -> bool:
    if len(tensor.shape) != 2 or not is_floating(tensor.dtype):
        return False
    n_experts, found = _oriented(tensor, transposed)
    return 2 <= n_experts < found and hidden_size in (None, found)


def _oriented(tensor: Tensor, transposed: bool) -> tuple[int, int]:
    first, second = tensor.shape
    return (second, first) if transposed else (first, second)


def _listed(tensors: list[Tensor]) -> str | None:
    """Offer names for --key: the smallest tensors first, for gates are small."""
    if not tensors:
        return None
    smallest = sorted(tensors, key=lambda tensor: (len(tensor.shape) != 2, math.prod(tensor.shape)))
    lines = [
        f"  {shown(tensor.name)}  {shown_shape(tensor.shape)}  {tensor.dtype}" for tensor in smallest[:_MAX_LISTED]
    ]
    if len(tensors) > _MAX_LISTED:
        lines.append(f"  and {len(tensors) - _MAX_LISTED} more")
    return "\n".join(["pick one with --key", *lines])


def _rendered(gate: npt.NDArray[np.float32], ending: str, name: str) -> bytes:
    match ending:
        case ".c":
            return router_table.to_c(gate, name)
        case ".h":
            return router_table.to_header(gate, name)
        case ".bin":
            return router_table.to_blob(gate)
        case _:
            return router_table.to_npy(gate)


def _is_same(source: str | os.PathLike[str], target: Path) -> bool:
    try:
        return target.samefile(source)
    except OSError:  # one of them is not there
        return False


def _state(path: Path, data: bytes) -> str:
    try:
        status = path.stat()
    except OSError:  # writing says what is wrong
        return "missing"
    same = stat.S_ISREG(status.st_mode) and status.st_size == len(data) and read_bytes(path) == data
    return "up to date" if same else "stale"
