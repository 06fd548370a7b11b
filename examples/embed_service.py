#!/usr/bin/env python3
"""A threaded HTTP service around one MoE layer: no copies on the way, and experts replaced while it answers.

    POST /layer         hidden states in, hidden states out: raw float32 rows of the layer's hidden size
    PUT  /experts/<i>   a new version of expert i: its raw file

usage: embed_service.py [--port N]            serve on 127.0.0.1 until SIGTERM or ctrl-C
       embed_service.py --demo [--requests N] clients and a deployment against the service, then exit
"""

import argparse
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import numpy as np

from colibri_cli import InvalidInput, Model, MoELayer
from colibri_cli.model import builtin_bundle

MAX_TOKENS = 512  # of one request
N_CLIENTS = 4  # of the demonstration


class Handler(BaseHTTPRequestHandler):
    """One connection: it has a thread, and two buffers that all its requests reuse."""

    server: "Service"
    protocol_version = "HTTP/1.1"  # a connection serves many requests
    disable_nagle_algorithm = True
    timeout = 30  # seconds until a silent connection is closed

    def setup(self) -> None:
        """Make the buffers."""
        super().setup()
        self.hidden = np.empty((MAX_TOKENS, self.server.layer.router.hidden_size), np.float32)
        self.out = np.empty_like(self.hidden)

    def do_POST(self) -> None:  # http.server's name
        """Run the layer on the rows of the body."""
        if self.path != "/layer":
            self.refuse(404, "POST goes to /layer")
            return
        row_bytes = self.hidden.strides[0]
        n_tokens, rest = divmod(self.body_size(), row_bytes)
        if rest or not 0 <= n_tokens <= MAX_TOKENS:
            self.refuse(400, f"POST /layer takes up to {MAX_TOKENS} rows of {row_bytes} bytes")
            return
        # Views, not copies: the socket is read into `hidden`, the kernels read that where it is and write to `out`,
        # and the socket is written from there. The kernels run without the GIL, so other threads go on meanwhile.
        hidden, out = self.hidden[:n_tokens], self.out[:n_tokens]
        if self.rfile.readinto(hidden.data) < hidden.nbytes:
            self.close_connection = True  # the client has gone
            return
        layer = self.server.layer
        try:
            routing = layer.router.route(hidden)
            layer.experts.run(hidden, routing.expert_ids, routing.expert_weights, out)
        except InvalidInput as error:  # a NaN, say
            self.answer(422, str(error).encode())
        else:
            self.answer(200, out)

    def do_PUT(self) -> None:  # http.server's name
        """Replace an expert: calls under way finish with the old one, later calls see the new one."""
        experts = self.server.layer.experts
        path, n_bytes = re.fullmatch(r"/experts/(\d{1,4})", self.path), experts.shape.n_bytes
        if path is None or int(path[1]) >= len(experts):
            self.refuse(404, f"PUT goes to /experts/<i>, i from 0 to {len(experts) - 1}")
            return
        if self.body_size() != n_bytes:
            self.refuse(400, f"PUT /experts/<i> takes {n_bytes} bytes")
            return
        with tempfile.NamedTemporaryFile() as file:  # its pages stay mapped when its name is gone
            file.write(self.rfile.read(n_bytes))
            file.flush()
            try:
                experts.replace(int(path[1]), file.name)
            except InvalidInput as error:  # the old expert stays
                self.answer(422, str(error).encode())
            else:
                self.answer(204)

    def do_GET(self) -> None:  # http.server's name
        """Say that there is nothing to get."""
        self.refuse(404, "POST /layer and PUT /experts/<i> are all there is")

    def body_size(self) -> int:
        """Return the bytes that the client announces, -1 where it announces no number."""
        size = self.headers["Content-Length"] or ""
        return int(size) if re.fullmatch(r"\d{1,9}", size) else -1

    def refuse(self, status: int, message: str) -> None:
        """Answer without having read the body, after which the connection is of no more use."""
        self.close_connection = True
        self.answer(status, f"{message}\n".encode())

    def answer(self, status: int, body: Any = b"") -> None:
        """Send a status and a body, which is anything with the buffer protocol."""
        self.send_response(status)
        if status != 204:
            self.send_header("Content-Length", str(memoryview(body).nbytes))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


class Service(ThreadingHTTPServer):
    """A thread a connection, one layer for all of them; serves while its `with` block runs."""

    daemon_threads = False  # closing waits for the answers under way

    def __init__(self, layer: MoELayer, port: int) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.layer = layer
        self.connections: set[socket.socket] = set()
        self.lock = threading.Lock()

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()  # accept no more
        with self.lock:
            for connection in self.connections:
                with suppress(OSError):  # the client has gone already
                    connection.shutdown(socket.SHUT_RD)  # an idle thread sees the end, a busy one answers first
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Note a new connection, and start its thread."""
        with self.lock:
            self.connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Forget a connection, and close it."""
        with self.lock:
            self.connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report what went wrong in a thread; a client that hangs up is none of it."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def serve(layer: MoELayer, port: int) -> None:
    """Serve until SIGTERM or ctrl-C."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with Service(layer, port) as service:
        print(f"serving on http://127.0.0.1:{service.server_port}", flush=True)
        stop.wait()
    print("stopped", flush=True)


def request(connection: HTTPConnection, method: str, path: str, body: bytes) -> bytes:
    """Send a request of the demonstration and return the answer's body."""
    connection.request(method, path, body)
    response = connection.getresponse()
    answer = response.read()
    if response.status >= 300:
        raise RuntimeError(f"{method} {path}: {response.status} {answer.decode()}")
    return answer


def demo(layer: MoELayer, n_requests: int) -> int:
    """Ask from several threads while an expert is replaced over and over; return the exit code.

    Both versions' answers are known beforehand to the last bit, and differ in every token that the expert takes part
    in: an answer is one of the two, or it is a mixture.
    """
    hidden = np.random.default_rng(1).standard_normal((32, layer.router.hidden_size), dtype=np.float32)
    expert = int(layer.router.route(hidden).load.argmax())
    old = (builtin_bundle() / f"experts/expert_{expert}.bin").read_bytes()
    new = (-np.frombuffer(old, np.float32)).tobytes()
    body, done = hidden.tobytes(), threading.Event()

    def client(address: str) -> tuple[list[bytes], list[float]]:
        answers, milliseconds = [], []
        with closing(HTTPConnection(address)) as connection:
            for _ in range(n_requests):
                start = time.perf_counter()
                answers.append(request(connection, "POST", "/layer", body))
                milliseconds.append((time.perf_counter() - start) * 1e3)
        return answers, milliseconds

    def deploy(address: str) -> int:
        n = 0
        with closing(HTTPConnection(address)) as connection:
            while not done.wait(0.001):
                request(connection, "PUT", f"/experts/{expert}", old if n % 2 else new)
                n += 1
        return n

    with Service(layer, port=0) as service, ThreadPoolExecutor(N_CLIENTS + 1) as threads:
        address = f"127.0.0.1:{service.server_port}"
        with closing(HTTPConnection(address)) as connection:
            known = []
            for version in (new, old):
                request(connection, "PUT", f"/experts/{expert}", version)
                known.append(request(connection, "POST", "/layer", body))
        deployment = threads.submit(deploy, address)
        try:
            results = list(threads.map(client, [address] * N_CLIENTS))
        finally:
            done.set()

    answers = [answer for each, _ in results for answer in each]
    mixtures = sum(answer not in known for answer in answers)
    p50, p99 = np.percentile([ms for _, each in results for ms in each], [50, 99])
    print(f"{len(answers)} answers to {N_CLIENTS} clients; expert {expert} replaced {deployment.result()} times")
    print(f"{answers.count(known[1])} of the old version, {answers.count(known[0])} of the new, {mixtures} mixtures")
    print(f"a request of {len(hidden)} tokens: P50 {p50:.2f} ms, P99 {p99:.2f} ms")
    return 1 if mixtures or known[0] == known[1] else 0


def main() -> int:
    """Run the service, or its demonstration."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=8080, help="0 takes a free one (default: %(default)s)")
    parser.add_argument("--demo", action="store_true", help="clients and a deployment against the service, then exit")
    parser.add_argument("--requests", type=int, default=250, help="of each client (default: %(default)s)")
    flags = parser.parse_args()
    layer = Model.open().layer
    if flags.demo:
        return demo(layer, flags.requests)
    serve(layer, flags.port)
    return 0


if __name__ == "__main__":
    sys.exit(main())
