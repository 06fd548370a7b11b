"""A published checkpoint in, a bundle of its MoE layers out: streamed expert by expert, resumable, verifiable.

A pack that was interrupted leaves its journal in the folder; the same call goes on behind the last finished layer.
``config.json`` is written last, so a folder that has it is whole.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from colibri_cli.checkpoints.checkpoint import check_folder, open_model
from colibri_cli.checks import check_choice
from colibri_cli.errors import InvalidInput, UsageError
from colibri_cli.layer_bundle import bundle_config, layer_bundle, load_layer_bundle
from colibri_cli.pack.journal import CONFIG, Folder, fingerprint
from colibri_cli.pack.layers import LayerPacker
from colibri_cli.pack.sinks import Files, SameFiles
from colibri_cli.topology import check_threads

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator

DTYPES = ("float32", "bfloat16", "int8", "int4")


@dataclass(frozen=True, slots=True)
class Packed:
    """What `pack` did.

    Attributes
    ----------
    checkpoint, bundle : str
        Paths as given.
    family : str
        The checkpoint's ``model_type``.
    dtype : {"float32", "bfloat16", "int8", "int4"}
        Of the weights held.
    layers : tuple of int
        The model's layers that are MoE.
    n_experts : int
        Of each layer, shared experts not counted.
    source_bytes, packed_bytes : int
        Of all layers: the tensors in the checkpoint, and the files in the bundle.
    written, resumed : int
        Layers that this call wrote, and that an earlier one had.
    verified : bool
        Every file has been read back and equals what the checkpoint packs to.
    seconds : float
    """

    checkpoint: str
    bundle: str
    family: str
    dtype: str
    layers: tuple[int, ...]
    n_experts: int
    source_bytes: int
    packed_bytes: int
    written: int
    resumed: int
    verified: bool
    seconds: float

    def to_json(self) -> str:
        """Return the report as ``schema/pack.schema.json`` describes it, ending in a newline."""
        members = {"schema": "colibri.pack/1", **asdict(self), "seconds": round(self.seconds, 3)}
        return json.dumps(members, indent=2) + "\n"

    def to_text(self) -> str:
        """Return the report as one line."""
        n = len(self.layers)
        state = f"{self.written} of {n} layers written" + (f", {self.resumed} found" if self.resumed else "")
        sizes = f"{self.source_bytes / 2**20:,.1f} MiB to {self.packed_bytes / 2**20:,.1f} MiB of {self.dtype}"
        verified = ", verified" if self.verified else ""
        return f"{self.bundle}: {self.family}, {state}, {self.n_experts} experts each, {sizes}{verified}\n"


def pack(
    checkpoint: str | os.PathLike[str],
    bundle: str | os.PathLike[str],
    *,
    dtype: str = "bfloat16",
    verify: bool = False,
    threads: int | None = None,
    steps: Callable[[int, str], Iterator[int]] = lambda total, label: iter(range(total)),  # noqa: ARG005  # unseen
) -> Packed:
    """Write the routers and experts of a checkpoint as a bundle whose layers `MoELayer.open` runs.

    Memory holds the experts that are being packed, one a thread, and never more than a layer.

    Parameters
    ----------
    checkpoint : path
        A folder as transformers saves it: ``config.json`` and safetensors, in one file or in shards with an index.
    bundle : path
        A folder to make; or one that an interrupted pack of this checkpoint left; or, to verify it, a finished one.
    dtype : {"float32", "bfloat16", "int8", "int4"}
        Of the weights held. What the checkpoint holds otherwise is widened exactly, or rounded as
        `Experts.from_arrays` does.
    verify : bool
        Read every file back and compare it with what the checkpoint packs to.
    threads : int, optional
        Default: what the CPU affinity and the cgroup's quota allow.
    steps : callable
        From a count and a label to the steps one by one; shows progress.

    Raises
    ------
    InvalidInput
        A tensor is missing, given twice, misshapen or not finite; the config breaks its family's rules; or, verifying,
        a file differs.
    UsageError
        The family or a formula of it is not known, the folder holds something else, or the disk lacks room. Unless
        the disk fills up meanwhile, this is known before anything is written.
    """
    check_choice("dtype", dtype, DTYPES)
    threads = check_threads(threads)
    started = time.monotonic()
    check_folder(checkpoint)
    source = fingerprint(checkpoint, dtype)
    with open_model(checkpoint) as model:
        config = bundle_config(model.plan, dtype)
        description, layers = layer_bundle(config), model.plan.layers
        layer_bytes = sum(description.file_sizes(layers[0]).values())
        with Folder.claim(bundle, source) as folder:
            if folder.complete and not verify:
                raise UsageError(
                    expected="a folder to make or to finish",
                    got="a finished bundle",
                    at=str(folder.path),
                    hint="--verify compares it with the checkpoint",
                )
            found = layers if folder.complete else folder.finished
            todo = [layer for layer in layers if layer not in found]
            for number in todo:
                folder.discard(number)
            folder.check_room(layer_bytes * len(todo))
            packer = LayerPacker(description, threads)
            count = steps(packer.n_steps * len(todo), "pack")
            for number in todo:
                packer.run(number, model.layer(number), Files(folder.start(number)), count)
                folder.finish(number)
            folder.settle()
            if todo and fingerprint(checkpoint, dtype) != source:
                raise UsageError(
                    expected="a checkpoint that stays as it is while it is packed",
                    got="files of another size or time",
                    at=str(checkpoint),
                    hint=f"remove {folder.path} to begin anew",
                )
            if not folder.complete:
                folder.close(json.dumps(config, indent=2) + "\n")
            if verify:
                if load_layer_bundle(folder.path / CONFIG) != description:
                    raise InvalidInput(
                        expected="the config that this checkpoint and dtype give",
                        got="another one",
                        at=str(folder.path / CONFIG),
                    )
                count = steps(packer.n_steps * len(layers), "verify")
                for number in layers:
                    packer.run(number, model.layer(number), SameFiles(folder.layer(number)), count)
        return Packed(
            checkpoint=str(checkpoint),
            bundle=str(bundle),
            family=model.plan.family,
            dtype=dtype,
            layers=layers,
            n_experts=model.plan.n_experts,
            source_bytes=sum(model.layer(number).source_bytes for number in layers),
            packed_bytes=layer_bytes * len(layers),
            written=len(todo),
            resumed=len(layers) - len(todo),
            verified=verify,
            seconds=time.monotonic() - started,
        )
