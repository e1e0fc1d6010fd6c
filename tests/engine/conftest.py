"""The small model, made once for all engine tests."""

from __future__ import annotations

import pytest

from pcpkit.model.decoder import TextModel

from .small_model import small_model


@pytest.fixture(scope="session")
def model() -> TextModel:
    return small_model()
