"""What a JSON Schema cannot say of a config: rules between keys, paths, and the bundle's files.

A rule runs where all values that it needs obey the schema, so that one mistake makes one finding.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from colibri_cli import bundle
from colibri_cli.validate.json_nodes import Fault, Node
from colibri_cli.validate.json_tokens import shown

if TYPE_CHECKING:
    from pathlib import Path

LARGEST_BUNDLE = 1 << 40  # bytes of weights

Sound = Mapping[str, Node]
Broken = tuple[str, str] | None  # expected and found


class _Rule(NamedTuple):
    check: Callable[..., Broken]
    keys: tuple[str, ...]  # whose values the check takes; a fault stands at the first


def consistency(sound: Sound) -> Iterator[Fault]:
    """Yield the faults between those values of a config that obey the schema."""
    for check, keys in _RULES:
        values = _values(sound, keys)
        broken = None if values is None else check(*values)
        if broken is not None:
            yield _fault(sound, keys[0], broken, "consistency")


def bundle_files(sound: Sound, directory: Path) -> Iterator[Fault]:
    """Yield the faults between a config's sound values and the files in its directory."""
    tokenizer = _values(sound, ("tokenizer",))
    if tokenizer is not None:
        broken = _file(directory, tokenizer[0], None)
        if broken is not None:
            yield _fault(sound, "tokenizer", broken, "files")
    for tensor in bundle.TENSORS:
        values = _values(sound, tensor.keys)
        if values is not None and tensor.n_floats(*values):
            broken = _file(directory, tensor.name, tensor.size(*values))
            if broken is not None:
                yield _fault(sound, tensor.keys[0], broken, "files")
    for broken in _experts(sound, directory):
        yield _fault(sound, "artifact", broken, "files")


def _experts(sound: Sound, directory: Path) -> Iterator[tuple[str, str]]:
    values = _values(sound, ("artifact", "n_experts"))
    if values is None:
        return
    artifact, n_experts = values
    file = bundle.expert(artifact)
    sizes = _values(sound, file.keys)
    names = [bundle.expert_name(artifact, number) for number in range(n_experts)]
    if n_experts > 1 and not any((directory / name).exists() for name in names):
        yield f"{n_experts} expert files, {names[0]} to {names[-1]}", "none of them"
        return
    for name in names:
        broken = _file(directory, name, None if sizes is None else file.size(*sizes))
        if broken is not None:
            yield broken


def _file(directory: Path, name: str, size: int | None) -> Broken:
    """Check that a file of the bundle is there, and of this size if it is known."""
    try:
        status = (directory / name).stat()
    except OSError as error:
        return f"the file {name}", (error.strerror or str(error)).lower()
    if not stat.S_ISREG(status.st_mode):
        return f"the file {name}", "a directory" if stat.S_ISDIR(status.st_mode) else "a pipe or a device"
    if size is not None and status.st_size != size:
        return f"{size:,} bytes in {name}", f"{status.st_size:,} bytes"
    return None


def _values(sound: Sound, keys: tuple[str, ...]) -> list[Any] | None:
    """Return the values at ``keys``, for an array its length; None unless all are sound."""
    nodes = [sound.get(f"$.{key}") for key in keys]
    return [len(n.items) if n.kind == "array" else n.scalar for n in nodes if n] if all(nodes) else None


def _fault(sound: Sound, key: str, broken: tuple[str, str], rule: str) -> Fault:
    pointer = f"$.{key}"
    return Fault(sound[pointer].start, pointer, *broken, rule)


def _fits(top_k: int, n_experts: int) -> Broken:
    return (f"at most n_experts ({n_experts})", f"{top_k}") if top_k > n_experts else None


def _enough_candidates(candidates: int, top_k: int, n_experts: int) -> Broken:
    if top_k > n_experts or top_k <= candidates <= n_experts:
        return None
    return f"top_k to n_experts ({top_k} to {n_experts})", f"{candidates}"


def _named(n_names: int, n_classes: int) -> Broken:
    return (f"n_classes ({n_classes}) elements", f"{n_names}") if n_names != n_classes else None


def _numbered(artifact: str) -> Broken:
    before, number, after = artifact.partition("{i}")
    if number and not set(before + after) & set("{}"):
        return None
    return "{i} once and no other braces", shown(artifact)


def _inside(path: str) -> Broken:
    if path.startswith("/") or ".." in path.split("/"):
        return "a path inside the bundle", shown(path)
    return None if path.isprintable() else ("printable characters", shown(path))


def _loadable(*sizes: int) -> Broken:
    values = dict(zip(_SIZES, sizes, strict=True))
    experts = bundle.expert("")
    total = values["n_experts"] * experts.size(*(values[key] for key in experts.keys))
    total += sum(tensor.size(*(values[key] for key in tensor.keys)) for tensor in bundle.TENSORS)
    if total <= LARGEST_BUNDLE:
        return None
    return f"sizes that make at most {LARGEST_BUNDLE:,} bytes of weights", f"{total:,} bytes"


_SIZES = ("hidden_size", "vocab_size", "intermediate_size", "gated", "n_experts", "n_classes", "context")
_RULES = (
    _Rule(_fits, ("top_k", "n_experts")),
    _Rule(_enough_candidates, ("balance.candidates", "top_k", "n_experts")),
    _Rule(_named, ("classes", "n_classes")),
    _Rule(_numbered, ("artifact",)),
    _Rule(_inside, ("artifact",)),
    _Rule(_inside, ("tokenizer",)),
    _Rule(_loadable, _SIZES),
)
