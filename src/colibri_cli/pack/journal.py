"""The folder that a bundle is packed into: who writes it, which layers are finished, and whether there is room."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colibri_cli.bundle import JOURNAL, layer_folder
from colibri_cli.errors import InvalidInput, UsageError
from colibri_cli.formats.files import TEMPORARY, read_bytes, reason, unreadable, write_atomically
from colibri_cli.formats.json_objects import read_object

if TYPE_CHECKING:
    from collections.abc import Iterator

CONFIG = "config.json"


class Folder:
    """A bundle in the making, or a finished one.

    A layer counts as finished once its files are on the disk, not only on their way there: that is waited for while
    the next layer is packed.

    Attributes
    ----------
    path : Path
    complete : bool
        Whether it is a bundle already.
    finished : list of int
        Layers that are on the disk.
    """

    def __init__(self, path: Path, source: dict[str, Any], finished: list[int], *, complete: bool) -> None:
        self.path = path
        self.complete = complete
        self.finished = finished
        self._source = source
        self._disk = ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None

    @classmethod
    @contextmanager
    def claim(cls, path: str | os.PathLike[str], source: dict[str, Any]) -> Iterator[Folder]:
        """Take the folder for this process; what an earlier pack of the same ``source`` finished is kept.

        Raises
        ------
        UsageError
            It cannot be made or written, another process packs into it, or it holds something else.
        """
        folder = Path(path)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise UsageError(expected="a folder to write", got=reason(error), at=os.fspath(path)) from error
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UsageError(
                    expected="a folder of its own", got="one that another process packs into", at=os.fspath(path)
                ) from error
            except OSError as error:
                raise UsageError(
                    expected="a folder that can be locked", got=reason(error), at=os.fspath(path)
                ) from error
            complete = (folder / CONFIG).is_file() and (folder / "layers").is_dir()
            _tidy(folder, complete=complete)
            claimed = cls(folder, source, [] if complete else _finished(folder, source), complete=complete)
            try:
                yield claimed
            finally:
                claimed._disk.shutdown()
        finally:
            os.close(handle)

    def discard(self, layer: int) -> None:
        """Remove what an interrupted pack left of a layer: it is not trusted, and in the way.

        Raises
        ------
        UsageError
            It cannot be removed, or is not in the folder.
        """
        folder = self.layer(layer)
        if folder.parent.is_symlink() or folder.is_symlink():
            raise UsageError(expected="layers in the bundle's own folder", got="a symbolic link", at=str(folder))
        try:
            if folder.exists():
                shutil.rmtree(folder)
        except OSError as error:
            raise UsageError(expected="a folder to write", got=reason(error), at=str(folder)) from error

    def check_room(self, n_bytes: int) -> None:
        """Refuse a disk that has less than ``n_bytes`` left.

        Raises
        ------
        UsageError
        """
        free = shutil.disk_usage(self.path).free
        if free < n_bytes:
            raise UsageError(
                expected=f"{n_bytes / 2**20:,.1f} MiB of room", got=f"{free / 2**20:,.1f} MiB", at=str(self.path)
            )

    def layer(self, number: int) -> Path:
        """Return a layer's folder."""
        return self.path / layer_folder(number)

    def start(self, layer: int) -> Path:
        """Make the layer's folder."""
        if not (self.path / JOURNAL).exists():
            self._note()
        folder = self.layer(layer)
        try:
            (folder / "experts").mkdir(parents=True)
        except OSError as error:
            raise UsageError(expected="a folder to write", got=reason(error), at=str(folder)) from error
        return folder

    def finish(self, layer: int) -> None:
        """Note the layer as finished as soon as its files are on the disk."""
        self.settle()
        self._pending = self._disk.submit(self._finish, layer)

    def settle(self) -> None:
        """Wait until every layer that was finished is on the disk.

        Raises
        ------
        UsageError
            The disk refuses.
        """
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def close(self, config: str) -> None:
        """Write the config, last of all, and drop the journal."""
        write_atomically(self.path / CONFIG, config.encode(), durable=True)
        self._sync(self.path)
        (self.path / JOURNAL).unlink(missing_ok=True)

    def _finish(self, layer: int) -> None:
        folder = self.layer(layer)
        for path in (*folder.rglob("*"), folder, folder.parent):
            self._sync(path)
        self.finished.append(layer)
        self._note()

    def _sync(self, path: Path) -> None:
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        except OSError as error:
            raise UsageError(expected="a disk that keeps what is written", got=reason(error), at=str(path)) from error

    def _note(self) -> None:
        members = {"schema": "colibri.pack-journal/1", "source": self._source, "finished": sorted(self.finished)}
        write_atomically(self.path / JOURNAL, json.dumps(members, indent=2).encode(), durable=True)


def _tidy(folder: Path, *, complete: bool) -> None:
    """Drop what an end at a bad moment left: files that were not whole, and the journal of a finished bundle."""
    left = [entry for entry in folder.iterdir() if entry.name.startswith(TEMPORARY)]
    if complete:
        left.append(folder / JOURNAL)
    for path in left:
        with suppress(OSError):  # on a file system that is read-only now it does no harm
            path.unlink()


def fingerprint(checkpoint: str | os.PathLike[str], dtype: str) -> dict[str, Any]:
    """Tell one pack from another: the checkpoint's files, their sizes and times, and what they become."""
    try:
        files = sorted(p for p in Path(checkpoint).iterdir() if p.suffix in (".json", ".safetensors") and p.is_file())
        stats = [(path.name, path.stat()) for path in files]
    except OSError as error:
        raise unreadable(error.filename or checkpoint, error) from error
    return {"dtype": dtype, "files": [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]}


def _finished(folder: Path, source: dict[str, Any]) -> list[int]:
    """Return the layers that the journal lists as finished; none where the folder is empty."""
    path = folder / JOURNAL
    if not path.exists():
        left = (entry.name for entry in folder.iterdir() if not entry.name.startswith(TEMPORARY))
        other = next(left, None)
        if other is not None:
            raise UsageError(expected="an empty folder", got=f"one that holds {other!r}", at=str(folder))
        return []
    match read_object(read_bytes(path), str(path)):
        case {"schema": "colibri.pack-journal/1", "source": dict(before), "finished": [*finished]}:
            layers = [i for i in finished if isinstance(i, int) and (folder / layer_folder(i)).is_dir()]
            if len(layers) == len(finished):
                _check_source(folder, before, source)
                return layers
    raise InvalidInput(expected="the journal of a pack", got="something else", at=str(path))


def _check_source(folder: Path, before: dict[str, Any], source: dict[str, Any]) -> None:
    if before != source:
        raise UsageError(
            expected="the checkpoint and dtype that this folder was begun with",
            got="others" if before.get("dtype") == source["dtype"] else f"dtype {source['dtype']}",
            at=str(folder),
            hint="remove the folder to begin anew",
        )
