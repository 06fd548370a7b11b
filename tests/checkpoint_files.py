"""Tiny checkpoints, written byte by byte."""

import json
import struct

import numpy as np

CODES = {"float32": "F32", "float16": "F16", "uint8": "U8", "int64": "I64", "float64": "F64"}


class Raw:
    """Bytes with a dtype that NumPy lacks: ``Raw("BF16", shape, array)``."""

    def __init__(self, code, shape, array):
        self.code, self.shape, self.array = code, shape, array


def bfloat16(array):
    """Cut float32 down to bfloat16."""
    return Raw("BF16", array.shape, (array.view(np.uint32) >> 16).astype(np.uint16))


def fp8(codes):
    return Raw("F8_E4M3", codes.shape, codes)


def packed(tensors, aligned=True):
    """Return the bytes of a safetensors file; with ``aligned``, as published ones are, spaces after the header."""
    header, body = {}, b""
    for name, tensor in tensors.items():
        raw = tensor if isinstance(tensor, Raw) else Raw(CODES[str(tensor.dtype)], tensor.shape, tensor)
        data = np.ascontiguousarray(raw.array).tobytes()
        header[name] = {"dtype": raw.code, "shape": list(raw.shape), "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    text += b" " * ((-len(text) - (not aligned)) % 8)
    return struct.pack("<Q", len(text)) + text + body


def write(directory, config, *shards, aligned=True):
    """Write a checkpoint: one file, or shards with their index."""
    (directory / "config.json").write_text(json.dumps(config))
    if len(shards) == 1:
        (directory / "model.safetensors").write_bytes(packed(shards[0], aligned))
        return
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    for name, tensors in zip(names, shards, strict=True):
        (directory / name).write_bytes(packed(tensors))
    places = {key: name for name, tensors in zip(names, shards, strict=True) for key in tensors}
    write_index(directory, places)


def write_index(directory, places):
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
