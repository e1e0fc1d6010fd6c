"""The small model, made once for all engine tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pcpkit.model.decoder import TextModel


@pytest.fixture(scope="session")
def model() -> TextModel:
    # A conftest may be loaded before tests/conftest.py has chosen how Triton runs.
    from .small_model import small_model

    return small_model()
