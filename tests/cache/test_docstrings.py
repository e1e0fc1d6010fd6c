"""The examples in the docstrings of `pcpkit.cache` run as printed."""

from __future__ import annotations

import doctest
from types import ModuleType

import pytest

from pcpkit.cache import blocks, prefix, replay, snapshot


@pytest.mark.parametrize("module", [blocks, prefix, replay, snapshot], ids=lambda m: m.__name__)
def test_examples(module: ModuleType) -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0
