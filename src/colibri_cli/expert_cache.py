"""On-demand loading: the experts used last stay in memory, up to a count."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from colibri_cli import forks
from colibri_cli.errors import ColibriError, InvalidInput
from colibri_cli.formats.checked_file import CheckedFile
from colibri_cli.formats.files import unreadable
from colibri_cli.formats.packed import header_for

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from colibri_cli._core import Expert
    from colibri_cli.formats.experts import ExpertShape


class ExpertFile:
    """An expert on disk, as it was when it was added: a file that has changed since is refused, not mixed in."""

    __slots__ = ("_identity", "path")

    def __init__(self, path: str | os.PathLike[str], shape: ExpertShape) -> None:
        self.path = Path(path).absolute()  # the working folder may change before the file is read
        with CheckedFile(path) as file:
            header_for(shape, file)
            self._identity = _identity(os.fstat(file.stream.fileno()))

    def check_unchanged(self) -> None:
        """Refuse a file that is another one, or has been written to, since it was added."""
        try:
            found = _identity(self.path.stat())
        except OSError as error:
            raise unreadable(self.path, error) from error
        if found != self._identity:
            raise InvalidInput(
                expected="the file that was opened",
                got="one that has changed since",
                at=str(self.path),
                hint="after changing an expert's file, call replace(i, path)",
            )

    def read_ahead(self) -> None:
        """Ask the system to read the file while this thread goes on."""
        with suppress(OSError):  # the load itself will report what is wrong
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(descriptor)


def _identity(stat: os.stat_result) -> tuple[int, int, int, int]:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


class _Entry:
    __slots__ = ("error", "expert", "in_use", "loading", "ready")

    def __init__(self) -> None:
        self.expert: Expert | None = None
        self.error: ColibriError | MemoryError | None = None
        self.ready = threading.Lock()  # held until the load is over; the interpreter's own, which no signal splits
        self.ready.acquire()
        self.loading = True
        self.in_use = 1

    def over(self) -> None:
        """Let those go on who wait for the load."""
        if self.loading:
            self.loading = False
            self.ready.release()


class ExpertCache:
    """Least-recently-used cache of loaded experts; each operation is O(1).

    An expert in use is never evicted, so concurrent calls may hold more than ``group`` between them; what is over
    goes as soon as it is released. One load serves every thread that waits for it.

    Parameters
    ----------
    load : callable
        Makes an Expert of an ExpertFile.
    group : int
        Experts kept, and experts that one call takes at a time.
    """

    def __init__(self, load: Callable[[ExpertFile], Expert], group: int) -> None:
        self.group = group
        self.hits = 0
        self.misses = 0
        self.evictions = 0
        self.loads = 0
        self._load = load
        self._lock = threading.RLock()
        self._entries: dict[ExpertFile, _Entry] = {}
        self._idle: OrderedDict[ExpertFile, None] = OrderedDict()  # not in use, least recently used first
        forks.watch(self)

    @property
    def resident(self) -> int:
        """Experts in memory now."""
        return len(self._entries)

    @property
    def resident_bytes(self) -> int:
        """Bytes of their weights."""
        with self._lock:
            return sum(entry.expert.n_bytes for entry in self._entries.values() if entry.expert is not None)

    def expect(self, files: Sequence[ExpertFile]) -> None:
        """Read ahead what the next acquire will want."""
        with self._lock:
            missing = [file for file in files if file not in self._entries]
        for file in missing[: self.group]:
            file.read_ahead()

    def acquire(self, files: Sequence[ExpertFile]) -> list[Expert]:
        """Load what is missing and hold all of ``files``; on an error none of them is held."""
        held: list[Expert] = []
        try:
            for file in files:
                while not self._hold(file, held):  # the thread that was loading it was interrupted: take its place
                    pass
        except BaseException:
            self.release(files[: len(held)])
            raise
        return held

    def release(self, files: Sequence[ExpertFile]) -> None:
        """Let go of ``files``; the least recently used of those that nobody holds make room."""
        with self._lock:
            for file in files:
                self._let_go(file, self._entries[file])
            self._shrink()

    def forget(self, file: ExpertFile) -> None:
        """Drop a file that no new call will ask for, unless a call still holds it."""
        with self._lock:
            if file in self._idle:
                del self._idle[file], self._entries[file]

    def _hold(self, file: ExpertFile, held: list[Expert]) -> bool:
        """Add a file's expert to ``held``; False: whoever was loading it gave up without a reason."""
        entry, mine = None, False
        try:
            with self._lock:
                entry = self._entries.get(file)
                if entry is None:
                    entry, mine = _Entry(), True
                    self._entries[file] = entry
                    self.misses += 1
                else:
                    entry.in_use += 1
                    self._idle.pop(file, None)
                    self.hits += 1
                self._shrink()
            if mine:
                self._fill(file, entry)
            with entry.ready:
                pass
            if entry.expert is not None:
                held.append(entry.expert)
                return True
        except BaseException:  # of a signal handler, too: nobody may be left waiting
            with self._lock:
                if entry is not None and self._entries.get(file) is entry:
                    if entry.expert is None and mine:
                        del self._entries[file]
                    else:
                        self._let_go(file, entry)
            if entry is not None and mine:
                entry.over()
            raise
        if entry.error is not None:
            raise entry.error
        return False

    def _fill(self, file: ExpertFile, entry: _Entry) -> None:
        try:
            entry.expert = self._load(file)
            with self._lock:
                self.loads += 1
        except (ColibriError, MemoryError) as error:
            entry.error = error
        finally:
            if entry.expert is None:
                with self._lock:
                    self._entries.pop(file, None)
            entry.over()

    def _let_go(self, file: ExpertFile, entry: _Entry) -> None:
        entry.in_use -= 1
        if entry.in_use == 0:
            self._idle[file] = None

    def after_fork(self) -> None:
        """In a forked child: no other thread loads or holds anything."""
        self._lock = threading.RLock()
        self._entries = {file: entry for file, entry in self._entries.items() if entry.expert is not None}
        for entry in self._entries.values():
            entry.in_use = 0
            entry.ready = threading.Lock()
        self._idle = OrderedDict.fromkeys(self._entries)
        self._shrink()

    def _shrink(self) -> None:
        while len(self._entries) > self.group and self._idle:
            file, _ = self._idle.popitem(last=False)
            del self._entries[file]
            self.evictions += 1
