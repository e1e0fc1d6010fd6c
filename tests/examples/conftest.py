"""The tiny checkpoint with a tokenizer, made once for all example tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def texts_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # A conftest may be loaded before tests/conftest.py has chosen how Triton runs.
    from pcpkit.model.tiny import make_tiny_checkpoint

    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "checkpoint")
