"""The experts of one layer: where their weights are, and the call that runs them."""

from __future__ import annotations

import mmap
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from colibri_cli import _core, forks
from colibri_cli.checks import check_choice, check_float32, check_integer
from colibri_cli.config import load_config
from colibri_cli.errors import InvalidInput, UsageError
from colibri_cli.expert_arrays import ExpertArrays
from colibri_cli.expert_cache import ExpertCache, ExpertFile
from colibri_cli.expert_files import ExpertReader
from colibri_cli.formats.experts import ExpertShape
from colibri_cli.formats.packed import LARGEST_SIZE
from colibri_cli.topology import check_threads

if TYPE_CHECKING:
    import os

    import numpy as np
    import numpy.typing as npt

LOADINGS = ("mmap", "static", "on-demand")
ARRAYS = "arrays"  # where experts are from that no file held


class ExpertStats(TypedDict):
    """What :meth:`Experts.stats` counts.

    Of the resident bytes, those in place are the caller's arrays or a file's pages; the others are the kernels' own.
    Hits, misses and evictions are those of on-demand loading.
    """

    loading: str
    source: str
    n_experts: int
    resident: int
    resident_bytes: int
    in_place_bytes: int
    hits: int
    misses: int
    evictions: int
    bytes_read: int


class Experts:
    """The experts of one layer. Made by :meth:`from_arrays` or :meth:`open`.

    Threads may share it. :meth:`add`, :meth:`replace` and :meth:`remove` work while others call :meth:`run`: each
    call sees the experts as they were when it began. The answer never depends on where weights are, on the number of
    threads, or on the batch that a token arrives in.
    """

    def __init__(
        self,
        kernel: _core.ExpertKernel,
        shape: ExpertShape,
        entries: list[Any],
        *,
        loading: str,
        source: str,
    ) -> None:
        self._kernel = kernel
        self._shape = shape
        self._set = _core.ExpertSet(entries)
        self._loading = loading
        self._source = source
        self._cache: ExpertCache | None = None
        self._reader = ExpertReader(kernel, shape)
        self._writer = threading.RLock()
        forks.watch(self)

    @classmethod
    def from_arrays(
        cls,
        gate_up: npt.ArrayLike,
        down: npt.ArrayLike,
        *,
        gate_up_bias: npt.ArrayLike | None = None,
        down_bias: npt.ArrayLike | None = None,
        activation: str = "silu",
        gated: bool = True,
        dtype: str = "float32",
        layout: str = "concatenated",
        transposed: bool = False,
        limit: float | None = None,
        alpha: float = 1.0,
        beta: float = 0.0,
        threads: int | None = None,
        max_tokens: int = 512,
        copy: bool = True,
        intermediate_dtype: str = "float32",
    ) -> Experts:
        """Take trained weights: copied into the kernels' layout, or where they are.

        An expert computes ``down @ act(up @ x + up_bias) + down_bias``, or gated
        ``down @ (act(g) * (u + beta)) + down_bias``.

        Parameters
        ----------
        gate_up : array of float32, bfloat16 or float16, (E, 2I, H), or (E, I, H) where not gated
            PyTorch's layout; any strides. NumPy has no bfloat16: it comes from DLPack (PyTorch) or ml_dtypes.
        down : likewise, (E, H, I)
        gate_up_bias : likewise, (E, 2I) or (E, I), optional
            Held as float32; with ``copy=False`` of any of these types, where they are.
        down_bias : likewise, (E, H), optional
        activation : {"silu", "gelu", "gelu_tanh", "relu", "relu2"}
            ``silu(g) = g * sigmoid(alpha * g)``; "gelu" is the exact one, through erf.
        gated : bool
            Whether ``gate_up`` holds a gate and an up projection.
        dtype : {"float32", "bfloat16", "float16", "int8", "int4"}
            Of the weights held: 32, 16, 16, 8.25 or 4.5 bits each. 64 inputs of int8 share a scale, 32 of int4 a scale
            and a zero, chosen to make the squared error small; docs/numerics.md has the errors. What is given in
            another type is widened exactly or rounded to nearest.
        layout : {"concatenated", "interleaved"}
            Gate rows then up rows, or gate and up rows in turn.
        transposed : bool
            Take (E, H, 2I) and (E, I, H).
        limit : float, optional
            Clamp the gate from above and the up projection on both sides, before the activation (gpt-oss: 7.0).
        alpha, beta : float
            gpt-oss: 1.702 and 1.0.
        threads : int, optional
            Default: what the CPU affinity and the cgroup's quota allow.
        max_tokens : int
            Tokens that the workspace is sized for, 1 to 65,536; longer batches run in chunks with the same bits.
        copy : bool
            False: run the caller's arrays, biases too, where they are, with the same bits and no memory for a second
            copy. They are kept alive, are never written, and may be read-only and at any address; what is changed in
            them between two calls is seen, and nobody may change them during one. Weights must be of ``dtype``,
            "float32", "bfloat16" or "float16", with each output's inputs, or each input's outputs, side by side in
            memory. Slower where few tokens share an expert; docs/library.md has the price.
        intermediate_dtype : {"float32", "bfloat16"}
            What intermediate states are rounded to, of bfloat16 weights alone. "bfloat16" is what models in that type
            do: sums are in blocks, which processors with AVX512_BF16 multiply up to twice as fast, and with AMX several
            times; docs/numerics.md has the order and the error.

        Raises
        ------
        InvalidInput
            A shape, dtype or value is not as above.
        """
        check_choice("dtype", dtype, _core.DTYPES)
        check_choice("layout", layout, ("concatenated", "interleaved"))
        arrays = ExpertArrays.take(gate_up, down, gate_up_bias, down_bias, gated=gated, transposed=transposed)
        _, hidden, inter = arrays.down.array.shape
        shape = _checked(ExpertShape(hidden, inter, activation, gated, dtype, alpha, beta, limit))
        kernel = _kernel(shape, threads, max_tokens, intermediate_dtype)
        make = arrays.packed if copy else arrays.in_place
        entries = make(kernel, dtype, gated and layout == "interleaved")
        return cls(kernel, shape, entries, loading="static", source=ARRAYS)

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str],
        loading: str = "mmap",
        cache_experts: int = 4,
        threads: int | None = None,
        max_tokens: int = 512,
        *,
        shape: ExpertShape | None = None,
        files: list[str] | None = None,
        intermediate_dtype: str = "float32",
    ) -> Experts:
        """Open the expert files of a bundle, each packed or raw.

        Parameters
        ----------
        directory : path
            A bundle, or its folder of expert files.
        loading : {"mmap", "static", "on-demand"}
            Shared read-only pages, run where they are; read at once; or read when first needed, the last
            ``cache_experts`` kept. Raw files are repacked when they are read, and are read at once, not mapped, into
            a layer of another dtype than float32.
        cache_experts : int
            At least 1.
        threads, max_tokens
            As in :meth:`from_arrays`.
        shape, files : optional
            What the experts have in common, and their names under ``directory`` by id; default: as the bundle's
            ``config.json`` says, in ``directory`` or the folder above.
        intermediate_dtype
            As in :meth:`from_arrays`.

        Raises
        ------
        UsageError
            A file is missing or cannot be read.
        InvalidInput
            A file has the wrong size, or is packed for other sizes, another dtype or another activation, or the
            config is not valid.
        """
        folder = Path(directory)
        if shape is None or files is None:
            shape, files = _from_config(folder)
        check_choice("loading", loading, LOADINGS)
        check_integer("cache_experts", cache_experts, 1, _core.MAX_EXPERTS)
        shape = _checked(shape)
        kernel = _kernel(shape, threads, max_tokens, intermediate_dtype)
        experts = cls(kernel, shape, [], loading=loading, source=str((folder / files[0]).parent))
        if loading == "on-demand":
            reader = experts._reader  # not the experts, which nobody else keeps alive
            experts._cache = ExpertCache(lambda file: _load_file(reader, file), cache_experts)
        experts._set = _core.ExpertSet([experts._load(folder / name) for name in files])
        return experts

    def after_fork(self) -> None:
        """In a forked child: nobody holds the lock."""
        self._writer = threading.RLock()

    def __len__(self) -> int:
        return len(self._set)

    def __repr__(self) -> str:
        return f"<Experts: {len(self)} of {self._shape}, {self._loading} from {self._source}>"

    @property
    def shape(self) -> ExpertShape:
        """What the experts have in common."""
        return self._shape

    @property
    def threads(self) -> int:
        """The most threads that a call uses."""
        return self._kernel.threads

    def run(
        self,
        hidden: npt.ArrayLike,
        expert_ids: npt.ArrayLike,
        expert_weights: npt.ArrayLike,
        out: npt.NDArray[np.float32] | None = None,
    ) -> npt.NDArray[np.float32]:
        """Sum each token's experts, weighted, by ascending expert id.

        Parameters
        ----------
        hidden : array of float32, (T, H)
            Any strides; a buffer or a CPU DLPack tensor. A NaN or infinity stays in its own row.
        expert_ids : array of int32 or int64, (T, K)
            -1 skips a slot; an id given twice counts twice.
        expert_weights : array of float32, (T, K)
        out : array of float32, (T, H), optional
            C-contiguous, overlapping no input; written only if the call succeeds.

        Returns
        -------
        ndarray of float32, (T, H)
            ``out`` where it was given.

        Raises
        ------
        InvalidInput
            A shape, dtype or id is not as above.
        """
        return self._kernel.run(self._set, hidden, expert_ids, expert_weights, out, self._cache)

    def add(self, path: str | os.PathLike[str]) -> int:
        """Add an expert from its file, packed or raw, and give its id: the lowest that was removed, else the next.

        Raises
        ------
        UsageError, InvalidInput
            The file is missing or not one expert of this layer's shape; the set stays as it was.
        """
        expert = self._load(path)
        with self._writer:
            entries = list(self._set)
            i = entries.index(None) if None in entries else len(entries)
            if i == _core.MAX_EXPERTS:
                raise InvalidInput(expected=f"at most {_core.MAX_EXPERTS} experts", got="one more", at="add")
            entries[i : i + 1] = [expert]
            self._set = _core.ExpertSet(entries)
        return i

    def replace(self, i: int, path: str | os.PathLike[str]) -> None:
        """Swap expert ``i`` for the one in a file, packed or raw; calls under way finish with the old one.

        Raises
        ------
        UsageError, InvalidInput
            The file is missing or not one expert of this layer's shape, or there is no expert ``i``; the set stays as
            it was.
        """
        self._swap(i, self._load(path))

    def remove(self, i: int) -> None:
        """Remove expert ``i``; a later call that names it is refused. The other ids stay.

        Raises
        ------
        InvalidInput
            There is no expert ``i``.
        """
        self._swap(i, None)

    def preload(self) -> None:
        """Touch every mapped page, so that the first call finds the weights in memory."""
        if self._loading == "mmap":
            for expert in self._set:
                if expert is not None and expert.watch is not None:
                    expert.watch.array[:: mmap.PAGESIZE].max()
                    expert.watch.check()

    def stats(self) -> ExpertStats:
        """Count experts, bytes and the cache's hits."""
        entries = [expert for expert in self._set if expert is not None]
        cache = self._cache
        if cache is None:
            resident = len(entries)
            resident_bytes = sum(expert.n_bytes for expert in entries)
        else:
            resident, resident_bytes = cache.resident, cache.resident_bytes
        return ExpertStats(
            loading=self._loading,
            source=self._source,
            n_experts=len(entries),
            resident=resident,
            resident_bytes=resident_bytes,
            in_place_bytes=sum(expert.n_bytes for expert in entries if cache is None and expert.in_place),
            hits=0 if cache is None else cache.hits,
            misses=0 if cache is None else cache.misses,
            evictions=0 if cache is None else cache.evictions,
            bytes_read=self._reader.bytes_read,
        )

    def _load(self, path: str | os.PathLike[str]) -> Any:
        if self._loading == "on-demand":
            return ExpertFile(path, self._shape)
        return self._reader.map(path) if self._loading == "mmap" else self._reader.read(path)

    def _swap(self, i: int, expert: Any) -> None:
        with self._writer:
            entries = list(self._set)
            check_integer("expert id", i, 0, len(entries) - 1)
            if entries[i] is None:
                raise InvalidInput(expected="the id of an expert", got=f"{i}, which was removed", at="expert id")
            before, entries[i] = entries[i], expert
            self._set = _core.ExpertSet(entries)
        if self._cache is not None:
            self._cache.forget(before)


def _checked(shape: ExpertShape) -> ExpertShape:
    """Check a shape, and round its numbers as the kernels hold them."""
    return ExpertShape(
        check_integer("hidden_size", shape.hidden_size, 1, LARGEST_SIZE),
        check_integer("intermediate_size", shape.intermediate_size, 1, LARGEST_SIZE),
        check_choice("activation", shape.activation, _core.ACTIVATIONS),
        bool(shape.gated),
        check_choice("dtype", shape.dtype, _core.DTYPES),
        check_float32("alpha", shape.alpha),
        check_float32("beta", shape.beta),
        None if shape.limit is None else check_float32("limit", shape.limit, above=0),
    )


def _kernel(shape: ExpertShape, threads: int | None, max_tokens: int, intermediate_dtype: str) -> _core.ExpertKernel:
    check_choice("intermediate_dtype", intermediate_dtype, ("float32", "bfloat16"))
    narrow = intermediate_dtype == "bfloat16"
    if narrow and shape.dtype != "bfloat16":
        raise InvalidInput(
            expected="bfloat16 weights with bfloat16 intermediate states", got=shape.dtype, at="intermediate_dtype"
        )
    return _core.ExpertKernel(
        shape.hidden_size,
        shape.intermediate_size,
        _core.ACTIVATIONS[shape.activation],
        shape.gated,
        shape.alpha,
        shape.beta,
        shape.limit,
        check_threads(threads),
        check_integer("max_tokens", max_tokens, 1, 1 << 16),
        _core.DTYPES[shape.dtype],
        narrow,
    )


def _load_file(reader: ExpertReader, file: ExpertFile) -> _core.Expert:
    file.check_unchanged()
    expert = reader.read(file.path)
    file.check_unchanged()  # nor while it was read
    return expert


def _from_config(folder: Path) -> tuple[ExpertShape, list[str]]:
    for bundle in (folder, folder.parent):
        if (bundle / "config.json").is_file():
            config = load_config(bundle / "config.json")
            shape = ExpertShape(config.hidden_size, config.intermediate_size, config.activation, config.gated)
            names = [config.expert_file(i) for i in range(config.n_experts)]
            return shape, names if bundle == folder else [Path(name).name for name in names]
    raise UsageError(
        expected="a bundle's config.json in the folder or the one above",
        got="none",
        at=str(folder),
        hint="raw expert files do not tell their shape; pass shape= and files=",
    )
