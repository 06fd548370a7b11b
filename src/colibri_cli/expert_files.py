"""An expert's file, packed or raw, as what a layer's kernels run."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from colibri_cli import _core, forks
from colibri_cli.expert_arrays import hold
from colibri_cli.formats.checked_file import CheckedFile
from colibri_cli.formats.mapped_file import map_pages, read_aligned
from colibri_cli.formats.packed import HEADER_SIZE, header_for

if TYPE_CHECKING:
    import os

    from colibri_cli.formats.experts import ExpertShape


class ExpertReader:
    """Makes experts of the files of one layer, and counts the bytes that it reads. Threads may share it.

    Parameters
    ----------
    kernel : ExpertKernel
    shape : ExpertShape
        The kernel's.
    """

    def __init__(self, kernel: _core.ExpertKernel, shape: ExpertShape) -> None:
        self.bytes_read = 0
        self._kernel = kernel
        self._shape = shape
        self._lock = threading.Lock()
        forks.watch(self)

    def after_fork(self) -> None:
        """In a forked child: nobody holds the lock."""
        self._lock = threading.Lock()

    def map(self, path: str | os.PathLike[str]) -> _core.Expert:
        """Run an expert on its file's pages; raw weights in a layer of another dtype than float32 are read instead.

        Raises
        ------
        UsageError
            The file is missing or cannot be read.
        InvalidInput
            It is not an expert of the layer's shape.
        """
        with CheckedFile(path) as file:
            header = header_for(self._shape, file)
            if header is None and self._shape.dtype != "float32":
                return self._pack(file)
            pages = map_pages(file)
        watch = _core.Watch(pages, file.name)
        if header is not None:
            return self._kernel.adopt(pages[HEADER_SIZE:], header.biased, watch)
        w1, b1, w2, b2 = self._shape.split(pages.view("<f4"))
        return self._kernel.in_place(w1, w2, b1, b2, watch=watch)

    def read(self, path: str | os.PathLike[str]) -> _core.Expert:
        """Read an expert into memory; raises as :meth:`map`."""
        with CheckedFile(path) as file:
            header = header_for(self._shape, file)
            if header is None:
                return self._pack(file)
            payload = read_aligned(file, HEADER_SIZE)
            self._count(file.size)
        return self._kernel.adopt(payload, header.biased, own=True)

    def _pack(self, file: CheckedFile) -> _core.Expert:
        w1, b1, w2, b2 = self._shape.split(np.frombuffer(file.read(0, self._shape.n_bytes), "<f4"))
        self._count(file.size)
        names = f"{file.name}: w1", f"{file.name}: w2"
        return hold(self._kernel, self._shape.dtype, names, (w1, w2), (b1, b2))

    def _count(self, n_bytes: int) -> None:
        with self._lock:
            self.bytes_read += n_bytes
