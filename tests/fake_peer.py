"""A peer that is always installed: plain NumPy, and every way in which a peer can fail."""

import os
import sys
import time
from dataclasses import replace

import numpy as np

from colibri_cli.bench.peers.peer import Bound, Kind, Peer

KINDS = ("right", "wrong", "nan", "raises", "crashes", "hangs", "breaks")
PEER = Peer(
    name="fake",
    requirements=("fake>=1",),
    modules=("fake_peer",),
    kinds=(*(Kind(name, "float32", 32) for name in KINDS), Kind("wide", "float32", 32, multiple=1024)),
    lacks={"int4": "it knows nothing of it"},
)


def only(*kinds: str) -> Peer:
    """The peer with some of its kinds."""
    return replace(PEER, kinds=tuple(kind for kind in PEER.kinds if kind.name in kinds))


class FakeEngine:
    def __init__(self, kind, shape, weights):
        self.kind, self.shape, self.weights = kind.name, shape, weights
        self.n_calls = 0

    def versions(self):
        return {"fake": f"1.0, {os.getpid()}, {'colibri_cli._core' in sys.modules}"}

    def prepare(self, threads):
        if self.kind == "raises":
            raise RuntimeError(f"no {threads} threads here")

    def bind(self, batch):
        kept = [None]

        def call():
            self.n_calls += 1
            if self.kind == "crashes":
                os.abort()
            if self.kind == "hangs":
                time.sleep(600)
            if self.kind == "breaks" and self.n_calls > 2:  # right at first, and lost while it is timed
                sys.stderr.write("it broke\n")
                sys.stderr.flush()
                os._exit(3)
            kept[0] = self.run(batch)

        return Bound(call, lambda: kept[0])

    def run(self, batch):
        os.write(1, b"noise on standard output\n")  # must not reach the parent's
        y = np.zeros_like(batch.hidden)
        for t, (x, ids, weights) in enumerate(zip(batch.hidden, batch.ids, batch.weights, strict=True)):
            for e, weight in zip(ids, weights, strict=True):
                gate, up = np.split(self.weights.gate_up[e] @ x, 2)
                y[t] += weight * (self.weights.down[e] @ (gate / (1 + np.exp(-gate)) * up))
        if self.kind == "wrong":
            y[-1] = y[0]
        if self.kind == "nan":
            y[0, 0] = np.nan
        return y


def load(kind, shape, weights, folder):
    assert not list(folder.glob("*.f32"))
    return FakeEngine(kind, shape, weights)
