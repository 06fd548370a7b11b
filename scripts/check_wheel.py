"""Check a built wheel: what must be in it, what must not, and how large the core may be.

usage: check_wheel.py FOLDER
"""

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

CORE_LIMIT = 300 * 1024  # bytes, stripped
HEADER = "include/colibri.h"
ARCHIVE = "lib/libcolibri.a"
NEEDED = (
    *("py.typed", "_core.pyi", "schema/config.schema.json", "schema/layers.schema.json"),
    *("models/config.json", "models/tokenizer.model", HEADER, ARCHIVE),
)


def check(wheel: Path) -> list[str]:
    """Return what is wrong with a wheel."""
    problems = []
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        names = archive.namelist()
        problems += [f"missing: {name}" for name in NEEDED if f"colibri_cli/{name}" not in names]
        sources = [name for name in names if name.endswith((".pyx", ".pxd", ".c", ".h"))]
        problems += [f"source in the wheel: {name}" for name in sources if name != f"colibri_cli/{HEADER}"]
        cores = [name for name in names if name.startswith("colibri_cli/_core.") and name.endswith(".so")]
        if len(cores) != 1:
            return [*problems, f"expected one compiled module, got {cores}"]
        core = Path(archive.extract(cores[0], folder))
        subprocess.run(["strip", core], check=True)
        size = core.stat().st_size
        print(f"{wheel.name}: {wheel.stat().st_size:,} bytes; _core stripped {size:,} of {CORE_LIMIT:,}")
        if size > CORE_LIMIT:
            problems.append(f"_core is {size:,} bytes, more than {CORE_LIMIT:,}")
        if not problems:
            public = declared(archive.read(f"colibri_cli/{HEADER}").decode())
            problems += differences("_core", defined("-D", core), public | {"PyInit__core"})
            archived = defined("-g", Path(archive.extract(f"colibri_cli/{ARCHIVE}", folder)))
            internal = {name for name in archived - public if name.startswith("clb_")}
            problems += differences(ARCHIVE, archived - internal, public)
    return problems


def declared(header: str) -> set[str]:
    """Return the functions that the public header declares."""
    return set(re.findall(r"^CLB_API [^(]*?(clb_\w+)\(", header, re.MULTILINE))


def defined(kind: str, library: Path) -> set[str]:
    """Return the external symbols that a library defines, dynamic ones (-D) or all (-g)."""
    listing = subprocess.run(["nm", kind, "--defined-only", library], check=True, capture_output=True, text=True)
    symbols = [line.split() for line in listing.stdout.splitlines()]
    return {symbol[2] for symbol in symbols if len(symbol) == 3}


def differences(library: str, found: set[str], wanted: set[str]) -> list[str]:
    """Return what is wrong with what a library exports."""
    problems = [f"{library} does not export {name}" for name in sorted(wanted - found)]
    return problems + [f"{library} exports {name}, which is not public" for name in sorted(found - wanted)]


def main() -> int:
    """Check every wheel in the folder."""
    wheels = list(Path(sys.argv[1]).glob("*.whl"))
    problems = [problem for wheel in wheels for problem in check(wheel)] if wheels else ["no wheel"]
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
