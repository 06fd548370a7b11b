"""The bytes of a JSON file to text, with what is wrong with their encoding."""

from __future__ import annotations

import codecs
import json
import re

from colibri_cli.validate.json_nodes import Fault

INVALID_BYTES = re.compile("[\udc80-\udcff]+")  # as the error handler "surrogateescape" decodes them


def decode(data: bytes | str) -> tuple[str, list[Fault], bool]:
    """Return the text without a byte order mark, what is wrong with its encoding, and whether it is text at all.

    Bytes that are not UTF-8 stand in it as halves of surrogate pairs, each reported.
    """
    if isinstance(data, str):
        data = data.encode(errors="surrogatepass")
    encoding = json.detect_encoding(data).upper()
    if not encoding.startswith("UTF-8"):
        return "", [_encoding_fault(0, encoding if _is_valid(data, encoding) else "binary data")], False
    faults = []
    if data.startswith(codecs.BOM_UTF8):
        data = data.removeprefix(codecs.BOM_UTF8)
        faults.append(Fault(0, "$", "no byte order mark", "U+FEFF", "syntax"))
    text = data.decode(errors="surrogateescape")
    has_nul = "\0" in text
    for match in INVALID_BYTES.finditer(text):
        if has_nul:
            return text, [_encoding_fault(match.start(), "binary data")], False
        found = " ".join(f"0x{ord(c) & 0xFF:02X}" for c in match[0][:4])
        faults.append(_encoding_fault(match.start(), found))
    return text, faults, True


def _is_valid(data: bytes, encoding: str) -> bool:
    try:
        data.decode(encoding)
    except UnicodeDecodeError:
        return False
    return True


def _encoding_fault(start: int, found: str) -> Fault:
    return Fault(start, "$", "text in UTF-8", found, "syntax")
