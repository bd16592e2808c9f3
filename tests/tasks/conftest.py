"""Fixtures of the tests of several rooms of the pipeline."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def store(empty_store: Path, tmp_path: Path) -> str:
    """The address of an empty store of one's own."""
    return f"sqlite:///{shutil.copy(empty_store, tmp_path / 'mlflow.db')}"
