"""A published checkpoint, opened: its plan, and its MoE layers one expert at a time."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Self

from colibri_cli.checkpoints.config import fp8_block, plan_of, read_config
from colibri_cli.checkpoints.ffn import ExpertWeights, Ffns
from colibri_cli.checkpoints.gates import Gate
from colibri_cli.checkpoints.matrices import Finder, Span
from colibri_cli.checkpoints.shards import Shards
from colibri_cli.errors import InvalidInput, UsageError
from colibri_cli.formats.files import is_folder

if TYPE_CHECKING:
    import os
    from types import TracebackType

    import numpy as np
    import numpy.typing as npt

    from colibri_cli.checkpoints.family import Family
    from colibri_cli.checkpoints.matrices import Matrix
    from colibri_cli.checkpoints.plan import ModelPlan
    from colibri_cli.checkpoints.shards import Stored

CONFIG = "config.json"
_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "language_model.", "backbone.", "")
_LAYER = re.compile(r"(.*?)layers\.(0|[1-9]\d{0,3})\.", re.ASCII | re.DOTALL)


def check_folder(path: str | os.PathLike[str]) -> None:
    """Refuse what is no directory.

    Raises
    ------
    UsageError
    """
    if not is_folder(path):
        raise UsageError(expected=f"a directory with {CONFIG}", got="none", at=str(Path(path)))


def open_model(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint; use it as a context manager.

    Everything is checked here from config.json and the files' headers; no weight is read.

    Parameters
    ----------
    path : path-like
        A directory with config.json, and model.safetensors or model.safetensors.index.json and the files it lists.

    Raises
    ------
    UsageError
        A file is missing or cannot be read; the family of models, or its quantisation, is not supported.
    InvalidInput
        A file is damaged; a setting is out of range or stands for another formula; a tensor is missing, there twice,
        misshapen, of another type, or in a MoE layer without being known there. The message names it.
    """
    return Checkpoint(path)


class Checkpoint:
    """What `open_model` returns.

    Attributes
    ----------
    plan : ModelPlan
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        check_folder(path)
        directory = Path(path)
        settings, quantization, (name, family) = read_config(directory / CONFIG)
        self.plan, n_layers = plan_of(name, family, settings)
        self._shards = Shards(directory)
        finder = Finder(self._shards, fp8_block(quantization))
        prefix = _prefix(self._shards, family, self.plan)
        names = _names_by_layer(self._shards, prefix, n_layers)
        self._layers = {
            number: CheckpointLayer(finder, f"{prefix}layers.{number}.", family, self.plan)
            for number in self.plan.layers
        }
        for number in range(n_layers):
            layer = self._layers.get(number)
            if layer is not None:
                layer.check(names[number])
            elif f"{prefix}layers.{number}.{family.router}" in names[number]:
                raise InvalidInput(
                    expected=f"no router in layer {number}, which is dense by {CONFIG}",
                    got=f"{prefix}layers.{number}.{family.router}",
                    at=str(directory),
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Refuse what was read if a file has been cut short meanwhile."""
        self._shards.__exit__(kind, error, trace)

    def layer(self, number: int) -> CheckpointLayer:
        """Return a MoE layer by its number in the model.

        Raises
        ------
        UsageError
            It is not MoE.
        """
        if number not in self._layers:
            layers = ", ".join(map(str, self.plan.layers))
            raise UsageError(expected=f"one of the layers {layers}", got=str(number), at="layer")
        return self._layers[number]


class CheckpointLayer:
    """One MoE layer.

    What it returns is exact in float32. Some of it is a view of a mapped file: copy or use it before the checkpoint is
    left.
    """

    def __init__(self, finder: Finder, prefix: str, family: Family, plan: ModelPlan) -> None:
        self._finder = finder
        self._prefix = prefix
        self._family = family
        self._plan = plan
        layout = next(
            (layout for layout in family.layouts if finder.has(prefix + layout.up.replace("{e}", "0"))),
            family.layouts[0],
        )
        sizes = plan.hidden_size, plan.intermediate_size, plan.gated
        self._experts = Ffns(finder, prefix, layout, plan.n_experts, *sizes)
        self._shared: Ffns | None = None
        if family.shared is not None and plan.shared is not None:
            sizes = plan.hidden_size, plan.shared.intermediate_size, plan.gated
            self._shared = Ffns(finder, prefix, family.shared.layout, None, *sizes)

    @property
    def source_bytes(self) -> int:
        """Bytes of the tensors that the layer is read from."""
        return sum(stored.entry.n_bytes for stored in self._tensors().values())

    def router_weight(self) -> npt.NDArray[np.float32]:
        """Read the gate's weights, (E, H)."""
        return self._router().read()

    def router_bias(self) -> npt.NDArray[np.float32] | None:
        """Read the gate's bias, (E,); None where it has none."""
        bias = self._router_bias()
        return None if bias is None else bias.read()

    def correction_bias(self) -> npt.NDArray[np.float32] | None:
        """Read what is added to the scores to choose by, (E,); None where there is nothing."""
        correction = self._correction()
        return None if correction is None else correction.read()

    def expert(self, e: int) -> ExpertWeights:
        """Read one expert, 0 to E - 1; the next one's bytes are asked for meanwhile.

        Raises
        ------
        InvalidInput
            There is no such expert, or a scale of its MXFP4 weights is not a number.
        """
        if not 0 <= e < self._plan.n_experts:
            raise InvalidInput(expected=f"an expert in 0..{self._plan.n_experts - 1}", got=str(e), at="expert")
        for ahead in range(e, min(e + 2, self._plan.n_experts)):
            for matrix in self._experts.all_matrices(ahead):
                matrix.data.expect()
        return self._experts.read(e)

    def shared(self) -> ExpertWeights | None:
        """Read the shared expert; None where there is none."""
        return None if self._shared is None else self._shared.read(0)

    def shared_gate(self) -> npt.NDArray[np.float32] | None:
        """Read the shared expert's gate, (H,); None where it has none."""
        gate = self._shared_gate()
        return None if gate is None else gate.read()[0]

    def forget(self, e: int | None = None) -> None:
        """Give the pages of one expert's tensors, or of all the layer's, back to the system.

        Raises
        ------
        InvalidInput
            A file has been cut short since it was opened: what was read may be zeros.
        """
        if e is None:
            spans = [Span.of(stored, None) for stored in self._tensors().values()]
        else:
            spans = [span for matrix in self._experts.all_matrices(e) for span in matrix.spans]
        for span in spans:
            span.forget()
            span.stored.shard.check()

    def check(self, names: set[str]) -> None:
        """Find all that the layer is read from.

        Parameters
        ----------
        names : set of str
            The layer's tensors.

        Raises
        ------
        InvalidInput
            A tensor is missing, misshapen, of another type, or not known in the family's modules.
        """
        modules = tuple(self._prefix + module for module in self._family.modules)
        unknown = sorted(name for name in names - self._tensors().keys() if name.startswith(modules))
        if unknown:
            raise InvalidInput(
                expected=f"a tensor of {self._plan.family}'s MoE layers",
                got="one that would be left out",
                at=self._finder.shards.tensors[unknown[0]].at,
            )

    def _tensors(self) -> dict[str, Stored]:
        """Find all that the layer is read from, by name; experts that share a tensor are looked at once."""
        others = (self._router(), self._router_bias(), self._correction(), self._shared_gate())
        found = [matrix for matrix in others if matrix is not None]
        if self._shared is not None:
            found += self._shared.all_matrices(0)
        for e in self._experts.samples:
            found += self._experts.all_matrices(e)
        return {span.stored.name: span.stored for matrix in found for span in matrix.spans}

    @property
    def _gate(self) -> Gate:
        gate = self._family.gate
        return gate if isinstance(gate, Gate) else next(iter(gate.gates.values()))  # they differ in no tensor

    def _router(self) -> Matrix:
        plan = self._plan
        return self._finder.matrix(self._prefix + self._family.router, plan.n_experts, plan.hidden_size)

    def _router_bias(self) -> Matrix | None:
        bias = self._gate.bias
        return None if bias is None else self._finder.vector(self._prefix + bias, self._plan.n_experts)

    def _correction(self) -> Matrix | None:
        correction = self._gate.correction
        if correction is None or not self._plan.router.correction_bias:
            return None
        return self._finder.vector(self._prefix + correction, self._plan.n_experts)

    def _shared_gate(self) -> Matrix | None:
        shared = self._family.shared
        if self._shared is None or shared is None or shared.gate is None:
            return None
        return self._finder.matrix(self._prefix + shared.gate, 1, self._plan.hidden_size)


def _prefix(shards: Shards, family: Family, plan: ModelPlan) -> str:
    """Say what the names of the text model's tensors begin with."""
    router = f"layers.{plan.layers[0]}.{family.router}"
    found = [prefix for prefix in _PREFIXES if prefix + router in shards.tensors]
    if len(found) > 1:
        names = " and ".join(prefix + router for prefix in found)
        raise InvalidInput(expected="one router in a layer", got=names, at=str(shards.directory))
    if not found:
        raise InvalidInput(expected=f"the tensor model.{router}", got="none", at=str(shards.directory))
    return found[0]


def _names_by_layer(shards: Shards, prefix: str, n_layers: int) -> dict[int, set[str]]:
    """Sort the tensors of the text model's layers; those after the last, which predict further tokens, are left out."""
    names: dict[int, set[str]] = defaultdict(set)
    for name in shards.tensors:
        match = _LAYER.match(name)
        if match is not None and match[1] == prefix and int(match[2]) < n_layers:
            names[int(match[2])].add(name)
    return names
