"""The tiny checkpoint with a tokenizer, made once for all example tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from pcpkit.model.tiny import make_tiny_checkpoint


@pytest.fixture(scope="session")
def texts_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "checkpoint")
