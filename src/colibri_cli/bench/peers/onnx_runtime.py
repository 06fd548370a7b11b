"""ONNX Runtime's contributed operators ``com.microsoft.MoE`` (floats) and ``QMoE`` (8 and 4 bits in blocks of 32)."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from colibri_cli.bench.peers.peer import Batch, Bound, Floats, Kind, Peer, Weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from colibri_cli.bench.shapes import Shape

_BLOCK = 32  # weights that share a scale, a float32
_PAGE = 4096
_MODEL, _DATA = "layer.onnx", "weights.bin"
PEER = Peer(
    name="onnxruntime",
    requirements=("onnxruntime>=1.23", "onnx>=1.18"),
    modules=("onnxruntime", "onnx"),
    kinds=(
        Kind("", "float32", 32),
        Kind("", "int8", 8 + 32 / _BLOCK, _BLOCK),
        Kind("", "int4", 4 + 32 / _BLOCK, _BLOCK),
    ),
    lacks={"bfloat16": "MoE takes float32 on the CPU, and QMoE 8 or 4 bits"},
)


class OnnxEngine:
    """A model of one node, whose weights lie in a file beside it, as those of large models do."""

    def __init__(self, kind: Kind, shape: Shape, weights: Weights, folder: Path) -> None:
        self._folder = folder
        bits = {"float32": 32, "int8": 8, "int4": 4}[kind.dtype]
        with (folder / _DATA).open("wb") as stream:
            tensors = _float_tensors(weights, stream) if bits == 32 else _block_tensors(weights, bits, stream)
        (folder / _MODEL).write_bytes(_model(shape, bits, tensors))
        self._session: Any = None

    def versions(self) -> dict[str, str]:
        """Name the runtime."""
        import onnxruntime

        return {"onnxruntime": onnxruntime.__version__}

    def prepare(self, threads: int) -> None:
        """Open another session: a session's pool has one size."""
        import onnxruntime

        self._session = None  # its weights go before others come
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        path = str(self._folder / _MODEL)
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def bind(self, batch: Batch) -> Bound:
        """Let the operator route by the logits."""
        session, feeds = self._session, {"hidden": batch.hidden, "logits": batch.logits}
        kept: list[Floats] = [batch.hidden]

        def call() -> None:
            kept[0] = session.run(None, feeds)[0]

        return Bound(call, lambda: kept[0])


def load(kind: Kind, shape: Shape, weights: Weights, folder: Path) -> OnnxEngine:
    """Write the model; `prepare` opens it."""
    return OnnxEngine(kind, shape, weights, folder)


def _interleaved(gate_up: Floats) -> Iterator[Floats]:
    """Gate and up rows in turn, an expert at a time."""
    for expert in gate_up:
        gate, up = np.split(expert, 2)
        yield np.stack([gate, up], axis=1).reshape(expert.shape)


def _float_tensors(weights: Weights, stream: IO[bytes]) -> dict[str, Any]:
    return {
        "fc1": _external("fc1", np.float32, weights.gate_up.shape, _interleaved(weights.gate_up), stream),
        "fc2": _external("fc2", np.float32, weights.down.shape, weights.down, stream),
    }


def _block_tensors(weights: Weights, bits: int, stream: IO[bytes]) -> dict[str, Any]:
    return {
        **_blocks("fc1", weights.gate_up.shape, lambda: _interleaved(weights.gate_up), bits, stream),
        **_blocks("fc2", weights.down.shape, lambda: iter(weights.down), bits, stream),
    }


def _blocks(
    name: str, shape: tuple[int, ...], experts: Callable[[], Iterator[Floats]], bits: int, stream: IO[bytes]
) -> dict[str, Any]:
    """Append codes, then scales: quantised twice, so that one expert is held at a time."""
    n_experts, n_rows, n_columns = shape
    of_codes, of_scales = (n_experts, n_rows, n_columns * bits // 8), (n_experts, n_rows, n_columns // _BLOCK)
    codes = (quantised(expert, bits)[0] for expert in experts())
    scales = (quantised(expert, bits)[1] for expert in experts())
    return {
        name: _external(name, np.uint8, of_codes, codes, stream),
        f"{name}_scales": _external(f"{name}_scales", np.float32, of_scales, scales, stream),
    }


def quantised(rows: Floats, bits: int) -> tuple[npt.NDArray[np.uint8], Floats]:
    """Round to the nearest of the codes that QMoE reads, a scale by the largest of each block.

    Parameters
    ----------
    rows : ndarray of float32, (R, C)
    bits : {4, 8}

    Returns
    -------
    codes : ndarray of uint8, (R, C * bits / 8)
        Offset by ``2**(bits - 1)``; of four bits the even column lies in the lower half.
    scales : ndarray of float32, (R, C / 32)
    """
    half = 1 << (bits - 1)
    blocks = rows.reshape(len(rows), -1, _BLOCK)
    scales = np.abs(blocks).max(axis=2) / np.float32(half - 1)
    steps = np.where(scales == 0, np.float32(1), scales)[:, :, np.newaxis]
    codes = (np.rint(blocks / steps).clip(-half, half - 1) + half).astype(np.uint8).reshape(rows.shape)
    if bits == 4:
        codes = codes[:, ::2] | (codes[:, 1::2] << np.uint8(4))
    return codes, scales


def _external(name: str, dtype: type, shape: tuple[int, ...], parts: Iterable[Any], stream: IO[bytes]) -> Any:
    """Append a tensor to the data file, on a page of its own, and describe it."""
    import onnx

    start = stream.seek(-stream.tell() % _PAGE, 1)
    length = sum(stream.write(np.ascontiguousarray(part).data) for part in parts)
    tensor = onnx.TensorProto(
        name=name,
        data_type=onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype)),
        dims=shape,
        data_location=onnx.TensorProto.EXTERNAL,
    )
    for key, value in {"location": _DATA, "offset": str(start), "length": str(length)}.items():
        tensor.external_data.add(key=key, value=value)
    return tensor


def _model(shape: Shape, bits: int, tensors: dict[str, Any]) -> bytes:
    """One node: SwiGLU over interleaved rows, the chosen experts' softmax as weights."""
    import onnx
    from onnx import helper

    attributes = {
        "k": shape.top_k,
        "activation_type": "swiglu",
        "swiglu_fusion": 1,
        "normalize_routing_weights": 1,
        "activation_alpha": 1.0,
        "activation_beta": 0.0,
    }
    if bits == 32:
        inputs = ["hidden", "logits", "fc1", "", "fc2", ""]
    else:
        attributes |= {"expert_weight_bits": bits, "block_size": _BLOCK}
        inputs = ["hidden", "logits", "fc1", "fc1_scales", "", "fc2", "fc2_scales", ""]
    operator = "MoE" if bits == 32 else "QMoE"
    node = helper.make_node(operator, inputs, ["output"], domain="com.microsoft", **attributes)

    def value(name: str, size: int) -> Any:
        return helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["tokens", size])

    graph = helper.make_graph(
        [node],
        "layer",
        [value("hidden", shape.hidden_size), value("logits", shape.n_experts)],
        [value("output", shape.hidden_size)],
        list(tensors.values()),
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    data: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()
    return data
