"""Check a built wheel: what must be in it, what must not, and how large the core may be.

usage: check_wheel.py FOLDER
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

CORE_LIMIT = 300 * 1024  # bytes, stripped
NEEDED = (
    "py.typed",
    "_core.pyi",
    "schema/config.schema.json",
    "schema/layers.schema.json",
    "models/config.json",
    "models/tokenizer.model",
)


def check(wheel: Path) -> list[str]:
    """Return what is wrong with a wheel."""
    problems = []
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        names = archive.namelist()
        problems += [f"missing: {name}" for name in NEEDED if f"colibri_cli/{name}" not in names]
        problems += [f"source in the wheel: {name}" for name in names if name.endswith((".pyx", ".pxd", ".c", ".h"))]
        cores = [name for name in names if name.startswith("colibri_cli/_core.") and name.endswith(".so")]
        if len(cores) != 1:
            return [*problems, f"expected one compiled module, got {cores}"]
        core = Path(archive.extract(cores[0], folder))
        subprocess.run(["strip", core], check=True)
        size = core.stat().st_size
        print(f"{wheel.name}: {wheel.stat().st_size:,} bytes; _core stripped {size:,} of {CORE_LIMIT:,}")
        if size > CORE_LIMIT:
            problems.append(f"_core is {size:,} bytes, more than {CORE_LIMIT:,}")
    return problems


def main() -> int:
    """Check every wheel in the folder."""
    wheels = list(Path(sys.argv[1]).glob("*.whl"))
    problems = [problem for wheel in wheels for problem in check(wheel)] if wheels else ["no wheel"]
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
