"""``colibri pack``: a published checkpoint to a bundle of its MoE layers."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class WeightType(StrEnum):
    """What weights are held as."""

    F32 = "f32"
    BF16 = "bf16"
    INT8 = "int8"
    INT4 = "int4"
    FLOAT32 = "float32"  # what the library calls the first two
    BFLOAT16 = "bfloat16"


class PackFormat(StrEnum):
    """How the report is written."""

    TEXT = "text"
    JSON = "json"


_LONG = {WeightType.F32: "float32", WeightType.BF16: "bfloat16"}


def pack(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="A folder with config.json and .safetensors, sharded or not.")
    ],
    bundle: Annotated[
        Path, typer.Argument(metavar="OUT", help="The bundle to make, or to go on with after an interruption.")
    ],
    dtype: Annotated[
        WeightType, typer.Option(help="What weights are held as: 32, 16, 8.5 or 4.5 bits each.")
    ] = WeightType.BF16,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every file back and compare; exit 1 if one differs.")
    ] = False,
    threads: Annotated[
        int | None, typer.Option(min=1, max=256, metavar="N", help="Default: what affinity and cgroup quota allow.")
    ] = None,
    report_format: Annotated[PackFormat, typer.Option("--format", help="The report's.")] = PackFormat.TEXT,
) -> None:
    """Turn a published checkpoint into a bundle of MoE layers.

    Weights are laid out as the kernels read them.

    Every tensor that is wanted is checked by name, type and shape before anything is written. Run it again after an
    interruption, and it goes on behind the last finished layer; on a finished bundle --verify only compares.
    """
    from colibri_cli import report
    from colibri_cli.pack import pack as pack_checkpoint

    done = pack_checkpoint(
        checkpoint, bundle, dtype=_LONG.get(dtype, dtype.value), verify=verify, threads=threads, steps=report.steps
    )
    report.emit(done.to_json() if report_format is PackFormat.JSON else done.to_text())
