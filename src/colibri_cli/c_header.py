"""Where the way in from C is."""

from importlib.resources import files


def get_include() -> str:
    """Return the folder of ``colibri.h``, for a C compiler's ``-I``.

    ``libcolibri.a``, for programs without Python, is in ``lib`` beside that folder; in a Python process
    ``colibri_cli._core.__file__`` is the library that exports the same functions. docs/c.md has both.
    """
    return str(files("colibri_cli") / "include")
