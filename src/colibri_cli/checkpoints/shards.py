"""The safetensors files of a checkpoint: one or many, mapped, and what their headers say together."""

from __future__ import annotations

import mmap
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from colibri_cli import _core
from colibri_cli.errors import InvalidInput, UsageError
from colibri_cli.formats import safetensors
from colibri_cli.formats.checked_file import CheckedFile
from colibri_cli.formats.files import unreadable
from colibri_cli.formats.json_objects import read_object
from colibri_cli.formats.tensor import shown

if TYPE_CHECKING:
    import os
    from types import TracebackType

    import numpy.typing as npt

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 1 << 27
_SHARD_NAME = re.compile(r"[\w.-]+\.safetensors", re.ASCII)


class Shard:
    """One file, mapped read-only and watched: cut short in place, it reads as zeros, and `check` tells.

    Mapped and not read, so that weights which lie as the kernels take them are never copied on the way, and so that
    several processes that pack the same checkpoint share its pages. Pages that have been used are given back by
    `forget`, which keeps the process as small as one expert.
    """

    def __init__(self, file: CheckedFile) -> None:
        self.entries = safetensors.entries(file)
        try:
            self._pages = mmap.mmap(file.stream.fileno(), file.size, access=mmap.ACCESS_READ)
        except OSError as error:
            raise unreadable(file.name, error) from error
        except ValueError as error:  # it has shrunk since its size was asked
            raise InvalidInput(expected=f"{file.size} bytes", got="a file that shrank", at=file.name) from error
        self._bytes: npt.NDArray[Any] = np.frombuffer(self._pages, np.uint8)
        self._watch = _core.Watch(self._bytes, file.name)

    @property
    def name(self) -> str:
        """The file's path."""
        return self._watch.name

    def check(self) -> None:
        """Refuse what was read if the file has been cut short since it was mapped.

        Raises
        ------
        InvalidInput
        """
        self._watch.check()

    def bytes(self, begin: int, end: int) -> npt.NDArray[np.uint8]:
        """View the bytes between two offsets."""
        return self._bytes[begin:end]

    def expect(self, begin: int, end: int) -> None:
        """Ask the system to read these bytes ahead."""
        self._advise(mmap.MADV_WILLNEED, begin, end)

    def forget(self, begin: int, end: int) -> None:
        """Give back the pages of these bytes; a view of them reads the file again."""
        self._advise(mmap.MADV_DONTNEED, begin, end)

    def _advise(self, advice: int, begin: int, end: int) -> None:
        first = begin // mmap.PAGESIZE * mmap.PAGESIZE
        if end > first:
            self._pages.madvise(advice, first, end - first)


class Stored:
    """A tensor in a shard."""

    __slots__ = ("entry", "name", "shard")

    def __init__(self, name: str, shard: Shard, entry: safetensors.Entry) -> None:
        self.name = name
        self.shard = shard
        self.entry = entry

    @property
    def at(self) -> str:
        """Its place, for messages."""
        return f"{self.shard.name}: {shown(self.name)}"


class Shards:
    """All tensors of a checkpoint by name. Use it as a context manager.

    Parameters
    ----------
    directory : path-like
        Holds model.safetensors, or model.safetensors.index.json and the files that it lists. Of both the single file
        counts, as in transformers.

    Raises
    ------
    UsageError
        A file is missing or cannot be read.
    InvalidInput
        A file is damaged; a tensor is in two files; the index names a file elsewhere, or one that lacks the tensor.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self.tensors: dict[str, Stored] = {}
        self._shards: list[Shard] = []
        single, index = self.directory / SINGLE, self.directory / INDEX
        if single.exists():
            self._add(single)
        elif index.exists():
            self._add_indexed(index)
        else:
            raise UsageError(expected=f"{SINGLE} or {INDEX}", got="neither", at=str(self.directory))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.check()

    def check(self) -> None:
        """Refuse what was read if a file has been cut short since it was opened.

        Raises
        ------
        InvalidInput
        """
        for shard in self._shards:
            shard.check()

    def _add(self, path: Path) -> None:
        with CheckedFile(path) as file:
            shard = Shard(file)
        for name, entry in shard.entries.items():
            if name in self.tensors:
                got = f"it in {self.tensors[name].shard.name} too"
                raise InvalidInput(expected="each tensor in one file", got=got, at=f"{shard.name}: {shown(name)}")
            self.tensors[name] = Stored(name, shard, entry)
        self._shards.append(shard)

    def _add_indexed(self, index: Path) -> None:
        with CheckedFile(index) as file:
            if file.size > _MAX_INDEX_BYTES:
                raise InvalidInput(
                    expected=f"at most {_MAX_INDEX_BYTES:,} bytes", got=f"{file.size:,} bytes", at=file.name
                )
            places = read_object(file.read(0, file.size), file.name).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise InvalidInput(expected="an object of file names", got="something else", at=f"{index}: $.weight_map")
        for name, shard in places.items():
            if not isinstance(shard, str) or not _SHARD_NAME.fullmatch(shard):
                got = shown(shard) if isinstance(shard, str) else "something else"
                raise InvalidInput(
                    expected="a .safetensors file beside the index", got=got, at=f"{index}: $.weight_map.{shown(name)}"
                )
        for shard in sorted(set(places.values())):
            self._add(self.directory / shard)
        for name, shard in places.items():
            found = self.tensors.get(name)
            if found is None or Path(found.shard.name).name != shard:
                got = "no such tensor there" if found is None else f"it in {Path(found.shard.name).name}"
                raise InvalidInput(expected=f"it in {shard}", got=got, at=f"{index}: $.weight_map.{shown(name)}")
        # What the index does not list is no part of the checkpoint.
        self.tensors = {name: stored for name, stored in self.tensors.items() if name in places}
