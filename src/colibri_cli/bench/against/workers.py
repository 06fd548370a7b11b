"""The parent's side of a worker: start it, ask it, and say what became of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from multiprocessing.connection import Pipe
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

_LAST_WORDS = 300  # characters of a reason


class WorkerLost(Exception):
    """A worker ended or did not answer; the message says how."""


class Worker:
    """A process that runs one arm.

    Parameters
    ----------
    folder : path
        An empty folder, for the peer's files and the worker's standard error.
    """

    def __init__(self, folder: Path) -> None:
        self._errors = folder / "stderr.txt"
        self._connection, theirs = Pipe()
        # It imports from where this process does, and not from the folder that it happens to be started in.
        command = [sys.executable, "-P", "-m", f"{__package__}.worker", str(theirs.fileno())]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(  # noqa: S603  # this interpreter, and a module of this package
                command, stdin=subprocess.DEVNULL, stderr=errors, pass_fds=[theirs.fileno()], env=environment
            )
        theirs.close()

    def send(self, request: str, *arguments: object) -> None:
        """Ask without waiting for the answer.

        Raises
        ------
        WorkerLost
            It has ended.
        """
        try:
            self._connection.send((request, *arguments))
        except OSError:
            raise WorkerLost(self._end()) from None

    def receive(self, seconds: float) -> Any:
        """Wait for the answer.

        Raises
        ------
        WorkerLost
            It has ended, or has not answered in time; then it is ended.
        """
        try:
            if self._connection.poll(seconds):
                return self._connection.recv()
        except (EOFError, OSError):
            raise WorkerLost(self._end()) from None
        self.close()
        raise WorkerLost(f"no answer within {seconds:.0f} seconds")

    def ask(self, seconds: float, request: str, *arguments: object) -> Any:
        """Send and receive."""
        self.send(request, *arguments)
        return self.receive(seconds)

    def close(self) -> None:
        """End it, whatever it is doing."""
        self._connection.close()
        self._process.kill()
        self._process.wait()

    def _end(self) -> str:
        """Say how it ended: a signal or an exit code, and the last line it wrote."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self.close()
        code = self._process.returncode
        how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        lines = self._errors.read_text("utf-8", "replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"{how}: {last[:_LAST_WORDS]}" if last else how
