"""Zip archives as data files use them: a checked index and whole members."""

from __future__ import annotations

import struct
import zipfile
import zlib
from typing import TYPE_CHECKING

from colibri_cli.errors import InvalidInput
from colibri_cli.formats.tensor import shown

if TYPE_CHECKING:
    from colibri_cli.formats.checked_file import CheckedFile

MAGIC = b"PK\x03\x04"
_ENCRYPTED = 0x1
_LOCAL_HEADER = struct.Struct("<26xHH")  # the lengths of the name and of the extra field


class Archive:
    """The members of a zip archive by name.

    Only the central directory is parsed by `zipfile`; members are read here, so that no size but a
    checked one is ever allocated.

    Parameters
    ----------
    file : CheckedFile
        Must stay open while members are read.

    Raises
    ------
    InvalidInput
        Not a zip archive, a damaged one, a name given twice, encryption, another compression than deflate.
    """

    def __init__(self, file: CheckedFile) -> None:
        self._file = file
        self._members: dict[str, zipfile.ZipInfo] = {}
        try:
            with zipfile.ZipFile(file.stream) as archive:
                members = archive.infolist()
        except (zipfile.BadZipFile, NotImplementedError, OSError, ValueError, OverflowError, struct.error) as error:
            raise InvalidInput(expected="a whole zip archive", got=shown(str(error)).lower(), at=file.name) from error
        for member in members:
            at = f"{file.name}: {shown(member.filename)}"
            if member.filename in self._members:
                raise InvalidInput(expected="each member once", got="a second one of this name", at=at)
            if member.flag_bits & _ENCRYPTED:
                raise InvalidInput(expected="a plain member", got="an encrypted one", at=at)
            if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                got = f"compression method {member.compress_type}"
                raise InvalidInput(expected="a stored or deflated member", got=got, at=at)
            self._members[member.filename] = member

    def names(self) -> list[str]:
        """Return the members' names in the archive's order."""
        return list(self._members)

    def is_compressed(self, name: str) -> bool:
        """Tell whether a member is deflated, so that it may be larger than the file."""
        return self._members[name].compress_type != zipfile.ZIP_STORED

    def size(self, name: str) -> int:
        """Return the uncompressed size of a member, in bytes, as the index states it."""
        return self._members[name].file_size

    def head(self, name: str, size: int) -> bytes:
        """Return the first ``size`` bytes of a member, or all of a shorter one; no checksum is compared."""
        # Deflate never needs more than 5 bytes a block above the size of what it holds.
        return self._inflated(name, min(self._members[name].compress_size, size + (size >> 3) + 64), size)

    def read(self, name: str, limit: int) -> bytes:
        """Return a whole member and compare its checksum.

        A stored checksum of 0 means "not computed": ``torch.serialization.set_crc32_options`` writes it.

        Raises
        ------
        InvalidInput
            More than ``limit`` bytes, damaged, or another size than the index states.
        """
        member = self._members[name]
        at = f"{self._file.name}: {shown(name)}"
        if member.file_size > limit:
            raise InvalidInput(expected=f"at most {limit} bytes", got=f"{member.file_size} bytes", at=at)
        data = self._inflated(name, member.compress_size, member.file_size + 1)
        if len(data) != member.file_size:
            got = f"{len(data)} bytes" if len(data) < member.file_size else "more"
            raise InvalidInput(expected=f"{member.file_size} bytes", got=got, at=at)
        if member.CRC not in (0, zlib.crc32(data)):
            got = f"{zlib.crc32(data):08x}: the member is damaged"
            raise InvalidInput(expected=f"CRC-32 {member.CRC:08x}", got=got, at=at)
        return data

    def _inflated(self, name: str, stored: int, limit: int) -> bytes:
        """Read ``stored`` bytes of a member and return at most ``limit`` bytes of what they hold."""
        member = self._members[name]
        at = f"{self._file.name}: {shown(name)}"
        header = self._file.read(member.header_offset, _LOCAL_HEADER.size)
        if not header.startswith(MAGIC):
            raise InvalidInput(expected="a local file header", got=header[:4].hex(" "), at=at)
        offset = member.header_offset + _LOCAL_HEADER.size + sum(_LOCAL_HEADER.unpack(header))
        data = self._file.read(offset, stored)
        if member.compress_type == zipfile.ZIP_STORED:
            return data[:limit]
        try:
            return zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, limit)
        except zlib.error as error:
            raise InvalidInput(expected="a deflated member", got=str(error).lower(), at=at) from error
