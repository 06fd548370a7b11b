"""Every kernel test runs once for each instruction set that this build holds and this processor runs."""

from collections.abc import Iterator

import pytest

from colibri_cli import _core


@pytest.fixture(params=_core.isa_names())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Choose an instruction set for one test."""
    before = _core.isa()
    _core.use_isa(request.param)
    yield request.param
    _core.use_isa(before)
