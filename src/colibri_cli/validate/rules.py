"""What a JSON Schema cannot say of a config: rules between keys, paths, and the bundle's files.

A rule runs where all values that it needs obey the schema, so that one mistake makes one finding.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from colibri_cli import bundle
from colibri_cli.validate.json_nodes import Fault, Node
from colibri_cli.validate.json_tokens import shown

if TYPE_CHECKING:
    from pathlib import Path

    from colibri_cli.bundle import SizedFile

LARGEST_BUNDLE = 1 << 40  # bytes of weights; in a bundle of layers, of each layer
LARGEST_LOST_EPSILON = 1e-11  # up to here a sum of top_k softmax weights is the same float32

Sound = Mapping[str, Node]
Broken = tuple[str, str] | None  # expected and found


class _Rule(NamedTuple):
    check: Callable[..., Broken]
    keys: tuple[str, ...]  # whose values the check takes; a fault stands at the first


def checkpoint_config(root: Node) -> Fault | None:
    """Return the one fault of a config that is a checkpoint's of transformers, where nothing is a bundle's."""
    if root.keys.keys() & {"schema_version", "task"}:
        return None
    for key, _, value in root.members:
        if key == "model_type" and value.kind == "string":
            expected, found = "a bundle's config, as colibri pack makes it", f"a checkpoint's, {value.source}"
            return Fault(value.start, "$.model_type", expected, found, "schema")
    return None


def consistency(sound: Sound) -> Iterator[Fault]:
    """Yield the faults between those values of a config that obey the schema.

    A rule of one task's keys finds none of them in a config of another.
    """
    yield from _ascending(sound)
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
    if "$.layers" not in sound:
        yield from _files(sound, directory, bundle.TENSORS, bundle.expert, "")
        return
    for pointer, layer in _elements(sound, "layers"):
        folder = bundle.layer_folder(layer.scalar)  # type: ignore[arg-type] # the schema wants integers
        if (directory / folder).is_dir():
            yield from _files(sound, directory, bundle.LAYER_FILES, bundle.packed_expert, f"{folder}/")
        else:
            yield Fault(layer.start, pointer, f"the folder {folder}", "none", "files")


def _files(
    sound: Sound, directory: Path, tensors: tuple[SizedFile, ...], expert: Callable[[str], SizedFile], folder: str
) -> Iterator[Fault]:
    for tensor in tensors:
        values = _values(sound, tensor.keys)
        if values is not None and tensor.size(*values):
            broken = _file(directory, folder + tensor.name, tensor.size(*values))
            if broken is not None:
                yield _fault(sound, tensor.keys[0], broken, "files")
    for broken in _experts(sound, directory, expert, folder):
        yield _fault(sound, "artifact", broken, "files")


def _experts(
    sound: Sound, directory: Path, expert: Callable[[str], SizedFile], folder: str
) -> Iterator[tuple[str, str]]:
    values = _values(sound, ("artifact", "n_experts"))
    if values is None:
        return
    artifact, n_experts = values
    file = expert(folder + artifact)
    artifact = file.name
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


def _elements(sound: Sound, key: str) -> list[tuple[str, Node]]:
    """Return the sound elements of an array that is sound, by pointer."""
    n_items = len(sound[f"$.{key}"].items) if f"$.{key}" in sound else 0
    pointers = [f"$.{key}[{i}]" for i in range(n_items)]
    return [(pointer, sound[pointer]) for pointer in pointers if pointer in sound]


def _ascending(sound: Sound) -> Iterator[Fault]:
    for (_, before), (pointer, layer) in pairwise(_elements(sound, "layers")):
        if not before.scalar < layer.scalar:  # type: ignore[operator] # the schema wants integers
            yield Fault(layer.start, pointer, f"more than {before.source}", layer.source, "consistency")


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


def _groups(n_groups: int, n_experts: int) -> Broken:
    return (f"a divisor of n_experts ({n_experts})", f"{n_groups}") if n_experts % n_groups else None


def _groups_chosen(topk_groups: int, n_groups: int) -> Broken:
    return (f"at most n_groups ({n_groups})", f"{topk_groups}") if topk_groups > n_groups else None


def _held_by_groups(top_k: int, topk_groups: int, n_groups: int, n_experts: int) -> Broken:
    n_held = topk_groups * (n_experts // n_groups)
    if top_k > n_experts or n_experts % n_groups or topk_groups > n_groups or top_k <= n_held:
        return None
    return f"at most the {n_held} experts of {topk_groups} groups", f"{top_k}"


def _groups_of_two(group_score: str, topk_groups: int, n_groups: int, n_experts: int) -> Broken:
    if group_score != "top2" or topk_groups >= n_groups or n_experts // n_groups >= 2:
        return None
    return '"max" where a group is one expert', '"top2"'


def _by_scores(n_groups: int, kind: str) -> Broken:
    return (f'1 with kind "{kind}"', f"{n_groups}") if n_groups > 1 and kind.startswith("topk-") else None


def _uncorrected(correction_bias: bool, kind: str) -> Broken:
    return ('false with kind "topk-softmax"', "true") if correction_bias and kind == "topk-softmax" else None


def _lost_epsilon(epsilon: float, kind: str) -> Broken:
    if kind != "topk-softmax" or epsilon <= LARGEST_LOST_EPSILON:
        return None
    return f'at most {LARGEST_LOST_EPSILON:g} with kind "topk-softmax"', f"{epsilon:g}"


def _layer_loadable(*sizes: int) -> Broken:
    values = dict(zip(_LAYER_SIZES, sizes, strict=True))
    experts = bundle.packed_expert("")
    total = values["n_experts"] * experts.size(*(values[key] for key in experts.keys))
    total += 4 * values["n_experts"] * values["hidden_size"]
    if total <= LARGEST_BUNDLE:
        return None
    return f"sizes that make at most {LARGEST_BUNDLE:,} bytes of weights a layer", f"{total:,} bytes"


def _loadable(*sizes: int) -> Broken:
    values = dict(zip(_SIZES, sizes, strict=True))
    experts = bundle.expert("")
    total = values["n_experts"] * experts.size(*(values[key] for key in experts.keys))
    total += sum(tensor.size(*(values[key] for key in tensor.keys)) for tensor in bundle.TENSORS)
    if total <= LARGEST_BUNDLE:
        return None
    return f"sizes that make at most {LARGEST_BUNDLE:,} bytes of weights", f"{total:,} bytes"


_SIZES = ("hidden_size", "vocab_size", "intermediate_size", "gated", "n_experts", "n_classes", "context")
_LAYER_SIZES = ("hidden_size", "intermediate_size", "gated", "dtype", "biased", "n_experts")
_RULES = (
    _Rule(_fits, ("top_k", "n_experts")),
    _Rule(_enough_candidates, ("balance.candidates", "top_k", "n_experts")),
    _Rule(_named, ("classes", "n_classes")),
    _Rule(_numbered, ("artifact",)),
    _Rule(_inside, ("artifact",)),
    _Rule(_inside, ("tokenizer",)),
    _Rule(_loadable, _SIZES),
    _Rule(_groups, ("router.n_groups", "n_experts")),
    _Rule(_groups_chosen, ("router.topk_groups", "router.n_groups")),
    _Rule(_held_by_groups, ("top_k", "router.topk_groups", "router.n_groups", "n_experts")),
    _Rule(_groups_of_two, ("router.group_score", "router.topk_groups", "router.n_groups", "n_experts")),
    _Rule(_by_scores, ("router.n_groups", "router.kind")),
    _Rule(_uncorrected, ("router.correction_bias", "router.kind")),
    _Rule(_lost_epsilon, ("router.epsilon", "router.kind")),
    _Rule(_layer_loadable, _LAYER_SIZES),
)
