"""A bundle opened for use: token ids to routing to class probabilities."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from colibri_cli import _core
from colibri_cli.arrays import as_array
from colibri_cli.balance import Balancer
from colibri_cli.config import ModelConfig, load_config
from colibri_cli.errors import InvalidInput, UsageError
from colibri_cli.experts import Experts
from colibri_cli.formats.experts import ExpertShape
from colibri_cli.formats.files import is_folder
from colibri_cli.formats.mapped_file import map_floats, read_floats
from colibri_cli.layer import MoELayer
from colibri_cli.router import Router, Routing
from colibri_cli.topology import check_threads

if TYPE_CHECKING:
    from colibri_cli.tokenizer import Tokenizer


def builtin_bundle() -> Path:
    """Return the folder of the bundle that is installed with the package."""
    return Path(__file__).parent / "models"


@dataclass(frozen=True, slots=True)
class Inference:
    """The answer for T tokens.

    Attributes
    ----------
    ids : ndarray of int32, (T,)
    probabilities : ndarray of float32, (T, C)
    classes : ndarray of int32, (T,)
        The most probable class; ties go to the lower one.
    routing : Routing
    seconds : dict of str to float
        Wall time of each step: "mix", "route", "experts", "head".
    """

    ids: npt.NDArray[np.int32]
    probabilities: npt.NDArray[np.float32]
    classes: npt.NDArray[np.int32]
    routing: Routing
    seconds: dict[str, float]

    def predict(self) -> npt.NDArray[np.float32]:
        """Class probabilities of the whole input, float32 ``(C,)``: the mean over tokens; uniform for no tokens."""
        if not len(self.probabilities):
            n_classes = self.probabilities.shape[1]
            return np.full(n_classes, 1 / n_classes, np.float32)
        mean = self.probabilities.mean(axis=0, dtype=np.float64)
        pooled: npt.NDArray[np.float32] = (mean / mean.sum()).astype(np.float32)
        return pooled


class Model:
    """A token classifier. Made by :meth:`open`; threads may share it.

    Attributes
    ----------
    config : ModelConfig
    path : pathlib.Path
        The bundle.
    layer : MoELayer
    """

    def __init__(
        self,
        path: Path,
        config: ModelConfig,
        mixer: _core.Mixer,
        layer: MoELayer,
        head: _core.Head,
    ) -> None:
        self.path = path
        self.config = config
        self.layer = layer
        self._mixer = mixer
        self._head = head

    def __repr__(self) -> str:
        return f"<Model: {self.path}, {self.layer!r}>"

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str] | None = None,
        experts_dir: str | os.PathLike[str] | None = None,
        loading: str = "mmap",
        threads: int | None = None,
        *,
        cache_experts: int = 4,
        gating: str | None = None,
        balance: bool | None = None,
        max_tokens: int = 512,
    ) -> Self:
        """Open a bundle.

        Parameters
        ----------
        path : path, optional
            Default: the built-in bundle.
        experts_dir : path, optional
            Folder of the expert files, instead of the bundle's own.
        loading : {"mmap", "static", "on-demand"}
            See :meth:`Experts.open`, as for ``cache_experts`` and ``max_tokens``.
        threads : int, optional
            Default: what the CPU affinity and the cgroup's quota allow.
        gating : {"exact", "taylor"}, optional
        balance : bool, optional
            Whether :meth:`infer` balances by itself. Default for both: as the bundle's config says.

        Raises
        ------
        UsageError
            A file is missing or cannot be read.
        InvalidInput
            The config is not valid, or a file does not fit it.
        """
        bundle = builtin_bundle() if path is None else Path(path)
        if not is_folder(bundle):
            raise UsageError(expected="a bundle's folder", got="no such folder", at=str(bundle))
        config = load_config(bundle / "config.json")
        if balance is not None:
            config = replace(config, balance=replace(config.balance, enabled=balance))
        width = check_threads(threads)
        experts = _open_experts(bundle, config, experts_dir, loading, cache_experts, width, max_tokens)
        layer = MoELayer(_open_router(bundle, config, gating, width, builtin=path is None), experts)
        hidden, n_classes = config.hidden_size, config.n_classes
        table = bundle / "embedding.bin"
        floats = map_floats(table, 4 * config.vocab_size * hidden, f"float32 {(config.vocab_size, hidden)}")
        embedding = _core.Watch(floats.reshape(-1, hidden), str(table))
        if config.context:
            matrices = _read(bundle / "context.bin", 2 * config.context + 1, hidden, hidden)
        else:
            matrices = np.eye(hidden, dtype=np.float32)[np.newaxis]
        head = _read(bundle / "head.bin", n_classes * (hidden + 1))
        weight, bias = head[:-n_classes].reshape(n_classes, hidden), head[-n_classes:]
        mixer = _core.Mixer(embedding, matrices, width)
        return cls(bundle, config, mixer, layer, _core.Head(weight, bias, width))

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes."""
        return self.config.classes

    @property
    def experts(self) -> Experts:
        """The layer's experts, which may be swapped while the model is in use."""
        return self.layer.experts

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The bundle's tokenizer, loaded when first asked for."""
        from colibri_cli.tokenizer import Tokenizer

        return Tokenizer(self.path / self.config.tokenizer)

    def new_balancer(self) -> Balancer:
        """Make a balancer with the parameters of the bundle's config and no memory."""
        balance = self.config.balance
        return Balancer(
            self.config.n_experts,
            window=balance.window,
            threshold=balance.threshold,
            candidates=balance.candidates,
            prefer=balance.prefer,
        )

    def infer(self, ids: npt.ArrayLike, *, balancer: Balancer | None = None) -> Inference:
        """Classify tokens.

        Parameters
        ----------
        ids : array of int, (T,)
            Token ids, ``0 <= id < vocab_size``.
        balancer : Balancer, optional
            Its state moves on by these tokens. Default: none, or a new one for each call where balancing is on.

        Raises
        ------
        InvalidInput
            ``ids`` is not as above, or a weight that it reaches is not finite.
        """
        tokens = _token_ids(ids, self.config.vocab_size)
        if balancer is None and self.config.balance.enabled:
            balancer = self.new_balancer()
        start = perf_counter()
        hidden = self._mixer.run(tokens)
        mixed = perf_counter()
        routing = self.layer.router.route(hidden, balancer)
        routed = perf_counter()
        summed = self.layer.experts.run(hidden, routing.expert_ids, routing.expert_weights)
        ran = perf_counter()
        probabilities, classes = self._head.run(summed)
        seconds = {
            "mix": mixed - start,
            "route": routed - mixed,
            "experts": ran - routed,
            "head": perf_counter() - ran,
        }
        return Inference(tokens, probabilities, classes, routing, seconds)


def _open_experts(
    bundle: Path,
    config: ModelConfig,
    experts_dir: str | os.PathLike[str] | None,
    loading: str,
    cache_experts: int,
    threads: int,
    max_tokens: int,
) -> Experts:
    names = [config.expert_file(i) for i in range(config.n_experts)]
    if experts_dir is not None:
        names = [Path(name).name for name in names]
        if not is_folder(experts_dir):
            raise UsageError(expected="a folder of expert files", got="no such folder", at=os.fspath(experts_dir))
    return Experts.open(
        bundle if experts_dir is None else experts_dir,
        loading,
        cache_experts,
        threads,
        max_tokens,
        shape=ExpertShape(config.hidden_size, config.intermediate_size, config.activation, config.gated),
        files=names,
    )


def _open_router(bundle: Path, config: ModelConfig, gating: str | None, threads: int, *, builtin: bool) -> Router:
    rule = config.router
    gating = rule.gating if gating is None else gating
    if builtin:
        return Router.builtin(config.n_experts, kind=rule.kind, top_k=config.top_k, gating=gating, threads=threads)
    weight = _read(bundle / "router_weights.bin", config.n_experts, config.hidden_size)
    return Router.from_array(weight, kind=rule.kind, top_k=config.top_k, gating=gating, threads=threads)


def _read(path: Path, *shape: int) -> npt.NDArray[np.float32]:
    return read_floats(path, 4 * math.prod(shape), f"float32 {shape}").reshape(shape)


def _token_ids(ids: npt.ArrayLike, vocab_size: int) -> npt.NDArray[np.int32]:
    array = as_array("ids", ids)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise InvalidInput(expected="integers (tokens,)", got=f"{array.dtype} {array.shape}", at="ids")
    if array.dtype != np.int32:
        bad = np.flatnonzero((array < 0) | (array >= vocab_size))
        if bad.size:
            raise InvalidInput(
                expected=f"a token id in 0..{vocab_size - 1}", got=str(array[bad[0]]), at=f"ids[{bad[0]}]"
            )
    return np.array(array, np.int32, order="C")  # a copy: checked and used as one, whoever else writes
