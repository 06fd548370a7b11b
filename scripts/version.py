#!/usr/bin/env python3
"""Print the package's version, which colibri_cli/__init__.py states, for meson.build."""

import re
from pathlib import Path

source = Path(__file__).parents[1] / "src" / "colibri_cli" / "__init__.py"
print(re.search(r'^__version__ = "(.+)"$', source.read_text(encoding="utf-8"), re.M)[1])  # type: ignore[index]  # always there
