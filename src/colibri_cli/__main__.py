"""``python -m colibri_cli`` is ``colibri``."""

import sys

from colibri_cli.cli import main

sys.exit(main())
