"""What a run is asked for, checked before anything is made."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, TypeVar

from colibri_cli.bench.peers import MODULES, OURS, find
from colibri_cli.bench.shapes import SHAPES, WEIGHT_TYPES, Shape
from colibri_cli.errors import UsageError
from colibri_cli.topology import default_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from colibri_cli.bench.comparison import Key
    from colibri_cli.bench.peers.peer import Kind, Peer

_Value = TypeVar("_Value", str, int)
_MOST_TOKENS = 1 << 16
_MOST_THREADS = 256
DEFAULT_SHAPES = ("token-classifier",)
DEFAULT_TOKENS = (1, 4, 16, 64, 512)


@dataclass(frozen=True, slots=True)
class Entrant:
    """An arm: a peer in one of its ways of holding weights."""

    peer: Peer
    kind: Kind

    @property
    def name(self) -> str:
        """The peer's name, and the kind's where the peer has several of a type."""
        return f"{self.peer.name} {self.kind.name}".strip()

    @property
    def ours(self) -> bool:
        """Whether it is Colibri."""
        return self.peer.name == OURS


@dataclass(frozen=True, slots=True)
class Request:
    """Shapes, weight types, tokens, threads and peers; every combination is measured.

    Attributes
    ----------
    shapes : tuple of Shape
    dtypes : tuple of str
    tokens, threads : tuple of int
    against : tuple of str
        Names of peers.
    """

    shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...]
    tokens: tuple[int, ...]
    threads: tuple[int, ...]
    against: tuple[str, ...]

    @classmethod
    def parse(
        cls,
        against: str | None = None,
        shapes: Sequence[str] = (),
        experts: int | None = None,
        tokens: str | None = None,
        dtypes: str | None = None,
        threads: str | None = None,
    ) -> Request:
        """Read the options of the command line: lists are parted by commas.

        Raises
        ------
        UsageError
            An option names what there is not, or a peer is not installed.
        """
        rivals = [name for name in MODULES if name != OURS]
        names = _each(",".join(shapes) if shapes else None, "--shape", SHAPES, DEFAULT_SHAPES, str)
        chosen = [SHAPES[name] for name in names]
        request = cls(
            shapes=tuple(shape if experts is None else shape.shrunk(experts) for shape in chosen),
            dtypes=_each(dtypes, "--dtype", WEIGHT_TYPES, WEIGHT_TYPES, str),
            tokens=_each(tokens, "--tokens", range(1, _MOST_TOKENS + 1), DEFAULT_TOKENS, int),
            threads=parse_threads(threads) or tuple(sorted({1, default_threads()})),
            against=_each(against, "--against", rivals, (), str),
        )
        _check_installed([find(name) for name in request.against])
        return request

    def entrants(self, dtype: str) -> list[Entrant]:
        """Give the arms of a weight type, Colibri's first."""
        peers = [find(name) for name in (OURS, *self.against)]
        return [Entrant(found, kind) for found in peers for kind in found.kinds if kind.dtype == dtype]

    def keys(self) -> set[Key]:
        """Name the times of Colibri that a run will find."""
        return {
            (case_name(shape, dtype, n_tokens), OURS, threads)
            for shape, dtype, n_tokens, threads in product(self.shapes, self.dtypes, self.tokens, self.threads)
        }

    def lacking(self, dtype: str) -> dict[str, str]:
        """Say why peers have no arm of a weight type, by their names."""
        return {name: find(name).lacks[dtype] for name in self.against if dtype in find(name).lacks}


def case_name(shape: Shape, dtype: str, n_tokens: int) -> str:
    """Name a shape, weight type and batch."""
    return f"{shape.name}-{dtype}-{n_tokens}"


def parse_one(text: str | None) -> int | None:
    """Read a single number of threads.

    Raises
    ------
    UsageError
        It is none in 1..256, or there are several.
    """
    found = parse_threads(text)
    if len(found) > 1:
        raise UsageError(expected="one number of threads without --shape or --against", got=f"{text}", at="--threads")
    return found[0] if found else None


def parse_threads(text: str | None) -> tuple[int, ...]:
    """Read numbers of threads parted by commas.

    Raises
    ------
    UsageError
        One is no number in 1..256.
    """
    return _each(text, "--threads", range(1, _MOST_THREADS + 1), (), int)


def _each(
    text: str | None, at: str, known: Iterable[_Value], default: Sequence[_Value], kind: Callable[[str], _Value]
) -> tuple[_Value, ...]:
    """Read a list whose members must be known, each once."""
    if text is None:
        return tuple(default)
    found: list[_Value] = []
    for part in (part.strip() for part in text.split(",")):
        try:
            value = kind(part)
        except ValueError:
            value = None
        if value is None or value not in known:
            words = f"a number in {known[0]}..{known[-1]}" if isinstance(known, range) else None
            words = words or f"one of {', '.join(map(str, known))}"
            raise UsageError(expected=words, got=repr(part), at=at)
        if value not in found:
            found.append(value)
    return tuple(found)


def _check_installed(peers: Sequence[Peer]) -> None:
    missing = {found.name: found.missing() for found in peers if found.missing()}
    if missing:
        requirements = [requirement for found in peers if found.name in missing for requirement in found.requirements]
        raise UsageError(
            expected=f"{', '.join(missing)}, installed",
            got="no " + ", ".join(module for modules in missing.values() for module in modules),
            at="--against",
            hint="python -m pip install " + " ".join(f"'{requirement}'" for requirement in requirements),
        )
