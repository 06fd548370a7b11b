"""The experts that belong to a layer's tensors, found again by what the tensors are.

A compiled graph is handed tensors, and one graph may serve many layers: so experts are found by their tensors, not by
the module. What is remembered of a tensor is its storage, its place there, its type, and for packed weights PyTorch's
count of its changes, with a witness: an empty tensor that shares that count. A copy, a conversion, a replacement and an
update in place each change one of these, so none of them is answered from what was before; nor is a tensor whose memory
another wraps anew, with a count from 0, for the witness still counts for the first. PyTorch does not count what fused
optimizers and collectives write; so some of a tensor's numbers are remembered as well.

Nothing here keeps a tensor alive. Experts in place hold bare addresses: a call holds the tensors, and is given experts
only of storages that it holds. Experts are dropped when one of their storages is freed.
"""

from __future__ import annotations

import math
import threading
import weakref
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from colibri_cli import _core, forks
from colibri_cli.checks import check_integer
from colibri_cli.expert_arrays import ExpertArrays
from colibri_cli.formats.packed import LARGEST_SIZE
from colibri_cli.integrations.transformers.float8 import decode
from colibri_cli.integrations.transformers.rules import Rule, refused
from colibri_cli.integrations.transformers.team import Team
from colibri_cli.weights import Weights

_MAX_TOKENS = 512  # of a call's workspace; longer batches run in chunks
_MOST_KEPT = 1 << 22  # bytes of a workspace between calls: what a long prompt needs, attention needs in turn
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_CODES = {torch.float32: "<f4", torch.bfloat16: "<u2", torch.float16: "<f2"}
_SAMPLED = 4  # numbers along each dimension, nearly
_SCALED = (torch.float8_e4m3fn, torch.int8)


class Tensors(NamedTuple):
    """What a layer's experts are made of, as its module holds it."""

    up: torch.Tensor
    down: torch.Tensor
    up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    up_scale: torch.Tensor | None
    down_scale: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Shape:
    """What a kernel is made for."""

    hidden_size: int
    intermediate_size: int
    activation: int
    gated: bool
    alpha: float
    beta: float
    limit: float | None
    dtype: int
    narrow_states: bool = False


class Kernel:
    """A kernel, whose workspaces all layers of one shape share, where a weak reference can find it."""

    __slots__ = ("__weakref__", "core")

    def __init__(self, shape: Shape, threads: int, team: int) -> None:
        self.core = _core.ExpertKernel(
            *(shape.hidden_size, shape.intermediate_size, shape.activation, shape.gated),
            alpha=shape.alpha,
            beta=shape.beta,
            limit=shape.limit,
            threads=threads,
            max_tokens=_MAX_TOKENS,
            dtype=shape.dtype,
            narrow_states=shape.narrow_states,
            team=team,
            most_kept=_MOST_KEPT,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A layer's experts, and what the tensors were that they are made of."""

    stamps: list[tuple[Any, ...]]
    experts: _core.ExpertSet
    shape: Shape
    may_be_narrow: bool
    kernels: dict[tuple[int, int, bool], Kernel]  # by threads, whose they are, and whether states are narrow
    watches: list[weakref.ref[torch.UntypedStorage]]
    witnesses: list[tuple[torch.Tensor, int]]  # of the tensors' counts of changes, and those counts; in place, none
    samples: list[tuple[Any, bytes]]  # views of some of the tensors' numbers, and those numbers; in place, none

    def holds(self, stamps: list[tuple[Any, ...]]) -> bool:
        """Say whether the experts are still what the tensors of these stamps hold."""
        return (
            self.stamps == stamps
            and all(witness._version == count for witness, count in self.witnesses)
            and all(view.tobytes() == numbers for view, numbers in self.samples)
        )


class Store:
    """The experts of every layer that has run. Threads may share it."""

    def __init__(self) -> None:
        self._held: dict[tuple[Any, ...], Held] = {}
        self._kernels: weakref.WeakValueDictionary[tuple[Shape, int, int], Kernel] = weakref.WeakValueDictionary()
        self._team = Team()
        self._making = threading.RLock()
        forks.watch(self)

    def after_fork(self) -> None:
        """In a forked child: nobody holds the lock."""
        self._making = threading.RLock()

    def __len__(self) -> int:
        return len(self._held)

    def clear(self) -> None:
        """Forget every layer."""
        self._held.clear()

    def find(
        self, tensors: Tensors, rule: str, pack: str, dtype: torch.dtype, threads: int, *, narrow: bool
    ) -> tuple[_core.ExpertKernel, _core.ExpertSet]:
        """Give the experts of tensors that the caller holds meanwhile, made now where there are none yet.

        Parameters
        ----------
        tensors : Tensors
        rule : str
            The layer's, as a word.
        pack : str
            The type to pack weights into; empty: run them in place.
        dtype : dtype
            Of the hidden states; block-scaled weights are held in it unless they are packed into another.
        threads : int
        narrow : bool
            Have bfloat16 intermediate states where hidden states and weights are in it, and the rule is not wide.

        Raises
        ------
        InvalidInput
            The tensors are not as the kernels take them.
        """
        scaled = tensors.up_scale is not None
        key = (tensors.up.data_ptr(), tensors.down.data_ptr(), rule, pack, dtype if scaled and not pack else None)
        stamps = _stamps(tensors, rule, copied=scaled or pack != "")
        held = self._held.get(key)
        if held is None or not held.holds(stamps):
            held = self._make(key, tensors, stamps, dtype)
        narrow = narrow and held.may_be_narrow and dtype == torch.bfloat16
        team = self._team.address(threads)
        kernel = held.kernels.get((threads, team, narrow))
        if kernel is None:
            kernel = self._kernel(replace(held.shape, narrow_states=narrow), threads, team)
            held.kernels[threads, team, narrow] = kernel
        return kernel.core, held.experts

    def _make(self, key: tuple[Any, ...], tensors: Tensors, stamps: list[tuple[Any, ...]], dtype: torch.dtype) -> Held:
        with self._making:
            held = self._held.pop(key, None)
            if held is None or not held.holds(stamps):  # another thread has not made them meanwhile
                held = None  # its memory goes before there is more
                rule = Rule.parse(key[2])
                held_as = _held_as(tensors, rule, key[3], dtype)
                shape = _shape(tensors, rule, held_as)
                kernel = self._kernel(shape, 1, 0)
                copied = key[3] != "" or tensors.up_scale is not None
                present = [tensor for tensor in tensors if tensor is not None]
                for tensor in present:
                    _check_extent(rule, tensor)
                witnesses = [(_witness(tensor), tensor._version) for tensor in present if copied]
                samples = [(view, view.tobytes()) for view in map(_sample, present) if copied]
                entries = _entries(kernel.core, tensors, rule, held_as, copied=copied)
                drop = partial(_drop, self._held, key, stamps)
                watches = [weakref.ref(tensor.untyped_storage(), drop) for tensor in present]
                narrow = held_as == "bfloat16" and not rule.wide
                kernels = {(1, 0, False): kernel}
                held = Held(stamps, _core.ExpertSet(entries), shape, narrow, kernels, watches, witnesses, samples)
            self._held[key] = held
            return held

    def _kernel(self, shape: Shape, threads: int, team: int) -> Kernel:
        kernel = self._kernels.get((shape, threads, team))
        if kernel is None:
            kernel = self._kernels[shape, threads, team] = Kernel(shape, threads, team)
        return kernel


def _drop(held: dict[tuple[Any, ...], Held], key: tuple[Any, ...], stamps: object, _: object) -> None:
    """Drop a layer whose storage is being freed, unless its place is another's by now."""
    entry = held.get(key)
    if entry is not None and entry.stamps is stamps:
        held.pop(key, None)


def _check_extent(rule: Rule, tensor: torch.Tensor) -> None:
    """Refuse a tensor whose storage was made smaller than it."""
    last = tensor.storage_offset() + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.numel() and (last + 1) * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise refused(rule.owner, "tensors within their storages", "a storage that was made smaller")


def _sample(tensor: torch.Tensor) -> Any:
    """View some of a tensor's numbers, as bits; like the experts, it does not keep the tensor alive."""
    bits = np.asarray(_Memory(tensor, f"<u{tensor.element_size()}"))
    index: tuple[Any, ...] = tuple(slice(n // _SAMPLED // 2, None, max(1, n // _SAMPLED)) for n in bits.shape)
    return bits[(..., *index)]


def _witness(tensor: torch.Tensor) -> torch.Tensor:
    """Make an empty tensor that shares another's count of changes: setting ``data`` leaves the count as it is."""
    witness = tensor.detach()
    witness.data = torch.empty(0, dtype=tensor.dtype)
    return witness


def _stamps(tensors: Tensors, rule: str, *, copied: bool) -> list[tuple[Any, ...]]:
    try:
        return [
            (
                tensor.untyped_storage()._cdata,  # the C++ object, which is one for all its views
                *(tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.untyped_storage().nbytes()),
                tensor._version if copied else 0,  # in place, a change is seen as it is
            )
            for tensor in tensors
            if tensor is not None
        ]
    except RuntimeError as error:
        raise refused(
            Rule.parse(rule).owner,
            "weights made outside torch.inference_mode(), to know when a packed copy is out of date",
            f"a tensor whose changes PyTorch does not count ({error})",
        ) from error


def _held_as(tensors: Tensors, rule: Rule, pack: str, dtype: torch.dtype) -> str:
    """Name the type that the weights are held in, and refuse those that cannot be."""
    names = _projections(rule)
    scaled = tensors.up_scale is not None and tensors.down_scale is not None
    for name, tensor in zip(names, tensors[:2], strict=True):
        if tensor.dtype not in (_SCALED if scaled else _NAMES) or tensor.dtype != tensors.up.dtype:
            expected = "float8_e4m3fn or int8 (FP4) weights" if scaled else "float32, bfloat16 or float16 weights"
            raise refused(rule.owner, f"{expected}, all of one type", str(tensor.dtype), f".{name}")
    if pack:
        return pack
    if scaled:  # float16 has no panels, and float32 holds all of it
        return "bfloat16" if dtype == torch.bfloat16 else "float32"
    return _NAMES[tensors.up.dtype]


def _projections(rule: Rule) -> tuple[str, str]:
    return "gate_up_proj" if rule.gated else "up_proj", "down_proj"


def _shape(tensors: Tensors, rule: Rule, dtype: str) -> Shape:
    up, down = tensors.up.shape, tensors.down.shape
    if len(down) != 3 or len(up) != 3:
        raise refused(rule.owner, "weights of three dimensions", f"{tuple(up)} and {tuple(down)}")
    _, width, inter = (down[0], down[2], down[1]) if rule.transposed else down
    inter *= 2 if rule.scales and tensors.down.dtype == torch.int8 else 1
    return Shape(
        check_integer(f"{rule.owner}: hidden size", width, 1, LARGEST_SIZE),
        check_integer(f"{rule.owner}: intermediate size", inter, 1, LARGEST_SIZE),
        _core.ACTIVATIONS[rule.activation],
        rule.gated,
        rule.alpha,
        rule.beta,
        None if rule.limit == math.inf else rule.limit,
        _core.DTYPES[dtype],
    )


def _entries(
    kernel: _core.ExpertKernel, tensors: Tensors, rule: Rule, dtype: str, *, copied: bool
) -> list[_core.Expert]:
    if tensors.up_scale is not None and tensors.down_scale is not None:
        return _decoded(kernel, tensors, rule, dtype)
    arrays = _arrays(tensors, rule)
    return (arrays.packed if copied else arrays.in_place)(kernel, dtype, rule.interleaved)


def _arrays(tensors: Tensors, rule: Rule) -> ExpertArrays:
    first, second = _projections(rule)
    up, down, up_bias, down_bias, *_ = tensors
    return ExpertArrays.take(
        _view(rule.owner, first, up),
        _view(rule.owner, second, down),
        None if up_bias is None else _view(rule.owner, f"{first}_bias", up_bias),
        None if down_bias is None else _view(rule.owner, f"{second}_bias", down_bias),
        gated=rule.gated,
        transposed=rule.transposed,
    )


def _decoded(kernel: _core.ExpertKernel, tensors: Tensors, rule: Rule, dtype: str) -> list[_core.Expert]:
    """Decode and pack one expert after the other, so that float32 is never held of more than one."""
    experts: list[_core.Expert] = []
    names = _projections(rule)
    up, down, _, _, up_scale, down_scale = tensors
    if up_scale is None or down_scale is None or {len(t) for t in (down, up_scale, down_scale)} != {len(up)}:
        raise refused(rule.owner, f"the scales of {len(up)} experts, up and down", "others")
    for e in range(len(up)):
        first = decode(names[0], up[e], up_scale[e], rule, 1 + rule.gated)
        second = decode(names[1], down[e], down_scale[e], rule, 1)
        arrays = _arrays(Tensors(first[None], second[None], None, None, None, None), rule)
        experts += arrays.packed(kernel, dtype, rule.interleaved)
    return experts


class _Memory:
    """A tensor's memory, for NumPy to view; whoever uses the view holds the tensor."""

    def __init__(self, tensor: torch.Tensor, code: str) -> None:
        self.__array_interface__ = {
            "data": (tensor.data_ptr(), True),
            "shape": tuple(tensor.shape),
            "strides": tuple(tensor.element_size() * stride for stride in tensor.stride()),
            "typestr": code,
            "version": 3,
        }


def _view(owner: str, name: str, tensor: torch.Tensor) -> Any:
    if tensor.dtype not in _CODES or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        got = f"{type(tensor).__name__} of {tensor.dtype}"
        raise refused(owner, "plain tensors of float32, bfloat16 or float16", got, f".{name}")
    return Weights(
        f"{owner}.{name}", np.asarray(_Memory(tensor, _CODES[tensor.dtype])), _NAMES[tensor.dtype], shared=True
    )
