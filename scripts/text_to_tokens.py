#!/usr/bin/env python3
"""UTF-8 text on standard input to raw little-endian int32 token ids on standard output.

Needs nothing but sentencepiece: ``echo "hello world" | python3 scripts/text_to_tokens.py > input.bin``.
"""

import argparse
import array
import sys
from pathlib import Path

try:
    from sentencepiece import SentencePieceProcessor
except ImportError:
    print("Expected the package sentencepiece, got none - at this Python (pip install sentencepiece)", file=sys.stderr)
    sys.exit(2)

BUNDLED = Path(__file__).resolve().parent.parent / "models" / "tokenizer.model"

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--tokenizer", default=BUNDLED, help="a sentencepiece model (default: %(default)s)")
tokenizer = parser.parse_args().tokenizer
if sys.stdout.isatty():
    parser.error("standard output is a terminal; add > input.bin")
try:
    processor = SentencePieceProcessor(model_file=str(tokenizer))
except (OSError, RuntimeError) as error:
    parser.error(f"{tokenizer}: {error}")
try:
    text = sys.stdin.buffer.read().decode("utf-8-sig")
except UnicodeDecodeError as error:
    sys.exit(f"Expected text in UTF-8, got {error.reason} - at standard input")
ids = array.array("i", processor.encode(text))
if sys.byteorder == "big":
    ids.byteswap()
sys.stdout.buffer.write(ids.tobytes())
