"""The oracle: what Colibri must compute, in float64 and as plainly as possible; it shares no code with the package."""

from __future__ import annotations

import ctypes
import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    F32 = NDArray[np.float32]
    F64 = NDArray[np.float64]
    I32 = NDArray[np.int32]

ACTIVATIONS = ("relu", "relu2", "silu", "gelu", "gelu_tanh")


def numbers(seed: int, *shape: int) -> F32:
    """Full-width float32 values in [-1, 1), the same on every machine: PCG64's raw stream, no libm, no BLAS."""
    raw = np.random.PCG64(seed).random_raw(math.prod(shape))
    return ((raw >> 39).astype(np.int64) - (1 << 24)).astype(np.float32).reshape(shape) * np.float32(2.0**-24)


def integers(seed: int, low: int, high: int, *shape: int) -> I32:
    """Int32 values in [low, high), the same on every machine."""
    raw = np.random.PCG64(seed).random_raw(math.prod(shape))
    return (low + ((raw >> 32) % (high - low)).astype(np.int32)).reshape(shape)


class BFloat16:
    """A bfloat16 tensor that speaks DLPack, versioned or not: the high halves of float32 values."""

    def __init__(self, values: NDArray, *, versioned: bool = False) -> None:
        """Take float32, or uint16 with the bits; the versioned protocol alone has read-only memory."""
        self.bits = values if values.dtype == np.uint16 else high_halves(values)
        self.versioned = versioned or not self.bits.flags.writeable

    def __dlpack__(self, **options: object) -> object:
        if options and not self.versioned:
            raise TypeError("no options")
        capsule = self.bits.__dlpack__(max_version=(1, 0)) if self.versioned else self.bits.__dlpack__()
        pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
        pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        name, header = (b"dltensor_versioned", 32) if self.versioned else (b"dltensor", 0)
        code = ctypes.c_uint8.from_address(pointer_of(capsule, name) + header + 20)  # after data, device and ndim
        code.value = 4
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.bits.__dlpack_device__()


def high_halves(values: F32) -> NDArray[np.uint16]:
    """Bits of bfloat16, rounded towards zero."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def widened(bits: NDArray[np.uint16]) -> F32:
    """The float32 values of bfloat16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


# ---------------------------------------------------------------- arithmetic


def fma32(a: F32, b: F32, c: F32) -> F32:
    """``a * b + c`` of finite float32 values, rounded once to float32."""
    product = a.astype(np.float64) * b.astype(np.float64)  # 48 bits: exact
    addend = c.astype(np.float64)
    total = product + addend
    back = total - product
    lost = (product - (total - back)) + (addend - back)
    # To odd: an inexact sum ends in a 1, so rounding it again, to 24 bits, sees on which side of a tie the sum was.
    bits = np.atleast_1d(total).view(np.int64)
    step = np.where((lost > 0) == (total > 0), 1, -1)
    bits += np.where((lost != 0) & (bits & 1 == 0), step, 0)
    return bits.view(np.float64).reshape(total.shape).astype(np.float32)


def chain(x: F32, weight: F32, bias: F32) -> F32:
    """Linear layer, bit for bit: one chain of fused multiply-adds an output, ascending, from the bias."""
    acc = np.broadcast_to(bias, (len(x), len(weight)))
    for i in range(x.shape[1]):
        acc = fma32(x[:, i : i + 1], weight[:, i], acc)
    return acc


def blocks(x: F32, weight: F32, bias: F32) -> F32:
    """Linear layer in blocks of 32 inputs, bit for bit: each adds its even inputs' chain plus its odd inputs'."""
    acc = np.broadcast_to(bias, (len(x), len(weight)))
    zero = np.zeros(len(weight), np.float32)
    for first in range(0, x.shape[1], 32):
        halves = [
            chain(x[:, first + odd : first + 32 : 2], weight[:, first + odd : first + 32 : 2], zero) for odd in (0, 1)
        ]
        acc = acc + (halves[0] + halves[1])
    return acc


def sigmoid(x: F64) -> F64:
    tail = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, tail) / (1 + tail)


def activation(kind: str, g: F64, alpha: float = 1.0) -> F64:
    if kind == "relu":
        return np.maximum(g, 0)
    if kind == "relu2":
        return np.maximum(g, 0) ** 2
    if kind == "silu":
        return g * sigmoid(alpha * g)
    if kind == "gelu":
        return g * np.vectorize(lambda z: math.erfc(-z / math.sqrt(2)) / 2, otypes=[float])(g)
    return g * sigmoid(2 * math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))


def softmax(logits: F64) -> F64:
    e = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


# ---------------------------------------------------------------- experts


@dataclass(frozen=True)
class Ffns:
    """Experts of one layer: up (E, U, H), down (E, H, I); gated: U = 2I, gate rows first."""

    up: F32
    down: F32
    up_bias: F32 | None = None
    down_bias: F32 | None = None
    activation: str = "silu"
    gated: bool = True
    limit: float | None = None
    alpha: float = 1.0
    beta: float = 0.0

    @classmethod
    def make(
        cls,
        seed: int,
        n_experts: int,
        hidden: int,
        inter: int,
        *,
        bias: bool = True,
        gated: bool = True,
        **rule: object,
    ) -> Ffns:
        """Weights from `numbers`, scaled by a power of two so that outputs stay near 1."""
        n_up = inter * (2 if gated else 1)
        shrink = [np.float32(2.0 ** -(max(n, 1).bit_length() // 2)) for n in (hidden, inter)]
        return cls(
            numbers(seed, n_experts, n_up, hidden) * shrink[0],
            numbers(seed + 1, n_experts, hidden, inter) * shrink[1],
            numbers(seed + 2, n_experts, n_up) if bias else None,
            numbers(seed + 3, n_experts, hidden) if bias else None,
            gated=gated,
            **rule,
        )

    def arrays(self) -> dict[str, object]:
        """Return the arguments of ``Experts.from_arrays``."""
        return {
            "gate_up": self.up,
            "down": self.down,
            "gate_up_bias": self.up_bias,
            "down_bias": self.down_bias,
            "activation": self.activation,
            "gated": self.gated,
            "limit": self.limit,
            "alpha": self.alpha,
            "beta": self.beta,
        }

    def raw(self, e: int) -> bytes:
        """Return an expert's file: w1, b1, w2, b2, float32 little-endian."""
        return b"".join(a[e].astype("<f4").tobytes() for a in (self.up, self.up_bias, self.down, self.down_bias))

    def write(self, folder: Path) -> list[str]:
        """Write every expert's file; give their names."""
        names = [f"expert_{e}.bin" for e in range(len(self.up))]
        for e, name in enumerate(names):
            (folder / name).write_bytes(self.raw(e))
        return names

    def expert(self, e: int, x: F32) -> F64:
        """One expert of float32 (T, H), in float64."""
        up, down = self.up[e].astype(np.float64), self.down[e].astype(np.float64)
        t = x.astype(np.float64) @ up.T + (0 if self.up_bias is None else self.up_bias[e])
        return self._act(t) @ down.T + (0 if self.down_bias is None else self.down_bias[e])

    def expert_bits(self, e: int, x: F32) -> F32:
        """One expert to the last bit, for activations that need no exponential."""
        zero = np.zeros(1, np.float32)
        t = chain(x, self.up[e], zero if self.up_bias is None else self.up_bias[e])
        return chain(self._act(t), self.down[e], zero if self.down_bias is None else self.down_bias[e])

    def _act(self, t: NDArray) -> NDArray:
        """Apply clamp, activation and gate, in the precision of ``t``."""
        n = self.down.shape[2]
        limit = t.dtype.type(np.inf if self.limit is None else self.limit)
        h = activation(self.activation, np.minimum(t[:, :n], limit), self.alpha)
        return (np.clip(t[:, n:], -limit, limit) + t.dtype.type(self.beta)) * h if self.gated else h

    def __call__(self, x: F32, ids: I32, weights: F32) -> F64:
        """Sum each token's experts, weighted, in float64."""
        y = np.zeros(x.shape)
        for t, k in zip(*np.nonzero(np.asarray(ids) >= 0), strict=True):
            y[t] += float(weights[t, k]) * self.expert(ids[t, k], x[t : t + 1])[0]
        return y

    def bits(self, x: F32, ids: I32, weights: F32) -> F32:
        """Likewise to the last bit: experts ascending, an expert's slots in order, one fused multiply-add each."""
        y = np.zeros(x.shape, np.float32)
        for e in range(len(self.up)):
            rows, columns = np.nonzero(np.asarray(ids) == e)
            if len(rows):
                found = self.expert_bits(e, x[rows])
                for t, k, f in zip(rows, columns, found, strict=True):
                    y[t] = fma32(weights[t, k : k + 1], f, y[t])
        return y


def dispatch(ids: I32, n_experts: int) -> tuple[list[int], list[int]]:
    """Group slots by expert: (where each expert's begin, and the end; the slots)."""
    groups = [[s for s, e in enumerate(ids) if e == expert] for expert in range(n_experts)]
    return [0, *np.cumsum([len(group) for group in groups]).tolist()], [s for group in groups for s in group]


# ---------------------------------------------------------------- routing


def route(logits: NDArray, kind: str, top_k: int, renormalize: bool = True) -> tuple[I32, F64]:
    """Experts by falling logit, ties to the lower id, and their weights."""
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :top_k].astype(np.int32)
    if kind == "topk-softmax":
        return ids, softmax(np.take_along_axis(logits, ids, 1).astype(np.float64))
    weights = np.take_along_axis(softmax(logits.astype(np.float64)), ids, 1)
    return ids, weights / weights.sum(axis=1, keepdims=True) if renormalize else weights


def scores(logits: F64, kind: str) -> F64:
    """What an expert's weight is made of."""
    if "softmax" in kind:
        return softmax(logits)
    if "sigmoid" in kind:
        return sigmoid(logits)
    return np.sqrt(np.logaddexp(0, logits))


def choices(
    logits: NDArray,
    kind: str,
    correction: NDArray,
    *,
    n_groups: int = 1,
    topk_groups: int = 1,
    group_score: str = "top2",
    masked_score: float = -math.inf,
) -> list[list[float]]:
    """What each token's experts are chosen by, as the models' code reads, a token after the other."""
    found = []
    for row in logits.astype(np.float64):
        choice = (row if kind == "topk-sigmoid" else scores(row, kind)) + correction.astype(np.float64)
        groups = choice.reshape(n_groups, -1).tolist()
        worth = [sum(sorted(group)[-2:]) if group_score == "top2" else max(group) for group in groups]
        kept = sorted(range(n_groups), key=lambda g: (-worth[g], g))[:topk_groups]
        found.append([x if g in kept else masked_score for g, group in enumerate(groups) for x in group])
    return found


def score_weights(
    logits: NDArray, kind: str, ids: I32, *, renormalize: bool = True, scale: float = 1.0, epsilon: float = 1e-20
) -> F64:
    """The weights of each token's experts, however they were chosen."""
    weights = np.take_along_axis(scores(logits.astype(np.float64), kind), ids.astype(np.int64), 1)
    return scale * (weights / (weights.sum(axis=1, keepdims=True) + epsilon) if renormalize else weights)


class Rings:
    """The balancing rule, a line a sentence, in integers.

    Every expert has a ring over the last ``window`` tokens. `choose` gives a token's experts by its logits, or what
    else they are chosen by (-inf: not at all); `push` then records their routing weights.
    """

    def __init__(self, n_experts: int, top_k: int, window: int, threshold: float, candidates: int, prefer: str) -> None:
        self.top_k, self.threshold, self.candidates, self.prefer = top_k, threshold, candidates, prefer
        self.experts = range(n_experts)
        self.rings = [[0] * window for _ in self.experts]
        self.sums = [0] * n_experts
        self.at = 0

    def choose(self, logits: list[float]) -> list[int]:
        def by_score(e: int) -> tuple[float, int]:
            return -logits[e], e

        def by_load(e: int) -> tuple[int, int]:
            return self.sums[e], e

        bar = self.threshold * sum(self.sums)  # an expert's sum times n_experts against this: no division
        calm = {e for e in self.experts if not self.sums[e] * len(self.experts) > bar}
        ranked = [e for e in sorted(self.experts, key=by_score) if logits[e] > -math.inf]
        left = [e for e in ranked[: self.candidates] if e in calm]
        if len(left) >= self.top_k:
            chosen = sorted(left, key=by_load if self.prefer == "emptiest" else by_score)[: self.top_k]
        else:
            chosen = left + [e for e in ranked[self.candidates :] if e in calm]
            chosen += sorted(set(ranked) - set(chosen), key=by_load)
            chosen = chosen[: self.top_k]
        return sorted(chosen, key=by_score)

    def push(self, chosen: list[int], weights: list[float]) -> None:
        entries = dict(zip(chosen, weights, strict=True))
        for e in self.experts:
            entry = round(entries.get(e, 0) * 2**24)
            self.sums[e] += entry - self.rings[e][self.at]
            self.rings[e][self.at] = entry
        self.at = (self.at + 1) % len(self.rings[0])


class Gumbel:
    """Gumbel(0, 1) numbers of xorshift128+ (shifts 23, 18, 5), seeded through splitmix64."""

    def __init__(self, seed: int) -> None:
        self.words = []
        for _ in range(2):
            seed = (seed + 0x9E3779B97F4A7C15) % 2**64
            z = (seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
            z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
            self.words.append(z ^ (z >> 31))

    def __next__(self) -> float:
        one, zero = self.words
        drawn = (one + zero) % 2**64
        one ^= one << 23 & (2**64 - 1)
        self.words = [zero, one ^ zero ^ (one >> 18) ^ (zero >> 5)]
        return -math.log(-math.log(((drawn >> 12) + 0.5) * 2.0**-52))


# ---------------------------------------------------------------- a model


@dataclass(frozen=True)
class Classifier:
    """A small token classifier and its bundle."""

    embedding: F32  # (V, H)
    mixer: F32  # (2 context + 1, H, H)
    gate: F32  # (E, H)
    experts: Ffns
    head: F32  # (C, H)
    head_bias: F32
    top_k: int = 2
    kind: str = "topk-softmax"

    @classmethod
    def make(
        cls,
        seed: int = 1,
        *,
        vocab: int = 50,
        hidden: int = 24,
        inter: int = 10,
        n_experts: int = 6,
        n_classes: int = 5,
        context: int = 2,
        **rest: object,
    ) -> Classifier:
        rule = {"activation": rest.pop("activation", "silu"), "gated": rest.pop("gated", True)}
        mixer = numbers(seed + 10, 2 * context + 1, hidden, hidden) * np.float32(0.25)
        return cls(
            numbers(seed + 11, vocab, hidden),
            mixer if context else np.eye(hidden, dtype=np.float32)[np.newaxis],
            numbers(seed + 12, n_experts, hidden),
            Ffns.make(seed + 20, n_experts, hidden, inter, **rule),
            numbers(seed + 13, n_classes, hidden),
            numbers(seed + 14, n_classes),
            **rest,
        )

    def config(self) -> dict[str, object]:
        (vocab, hidden), n_experts, n_classes = self.embedding.shape, len(self.gate), len(self.head)
        balance = {"enabled": False, "window": 16, "threshold": 1.5, "candidates": self.top_k, "prefer": "emptiest"}
        return {
            "schema_version": 1,
            "task": "token-classification",
            "vocab_size": vocab,
            "hidden_size": hidden,
            "intermediate_size": self.experts.down.shape[2],
            "n_experts": n_experts,
            "top_k": self.top_k,
            "n_classes": n_classes,
            "classes": [f"class {c}" for c in range(n_classes)],
            "activation": self.experts.activation,
            "gated": self.experts.gated,
            "dtype": "float32",
            "context": len(self.mixer) // 2,
            "tokenizer": "tokenizer.model",
            "router": {"kind": self.kind, "gating": "exact"},
            "balance": balance,
            "artifact": "experts/expert_{i}.bin",
        }

    def write(self, folder: Path, **config: object) -> Path:
        """Write the bundle, all but its tokenizer; ``config`` overrides keys of config.json."""
        (folder / "experts").mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(self.config() | config))
        (folder / "embedding.bin").write_bytes(self.embedding.astype("<f4").tobytes())
        if len(self.mixer) > 1:
            (folder / "context.bin").write_bytes(self.mixer.astype("<f4").tobytes())
        (folder / "router_weights.bin").write_bytes(self.gate.astype("<f4").tobytes())
        (folder / "head.bin").write_bytes(self.head.astype("<f4").tobytes() + self.head_bias.astype("<f4").tobytes())
        self.experts.write(folder / "experts")
        return folder

    def mix(self, ids: list[int]) -> F64:
        """Hidden states: each neighbour's embedding through its offset's matrix."""
        context, embedding = len(self.mixer) // 2, self.embedding.astype(np.float64)
        x = np.zeros((len(ids), self.embedding.shape[1]))
        for t in range(len(ids)):
            for offset in range(-context, context + 1):
                if 0 <= t + offset < len(ids):
                    x[t] += self.mixer[offset + context].astype(np.float64) @ embedding[ids[t + offset]]
        return x

    def infer(self, ids: list[int]) -> tuple[F64, I32]:
        """(class probabilities (T, C), expert ids (T, K)) in float64."""
        x = self.mix(ids)
        chosen, weights = route(x @ self.gate.T.astype(np.float64), self.kind, self.top_k)
        return softmax(self.experts(x, chosen, weights) @ self.head.T.astype(np.float64) + self.head_bias), chosen
