"""Fixtures of the tests of several rooms of the pipeline."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture
def store(empty_store: Path, tmp_path: Path) -> str:
    """The address of an empty store of one's own."""
    return f"sqlite:///{shutil.copy(empty_store, tmp_path / 'mlflow.db')}"


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The orders that count stages finish and keep, as they do."""
    from tasks.stages import mine  # it imports Ray

    orders: list[int] = []
    save = mine._save_order

    def note(out: Path, order: int, keys: np.ndarray, support: np.ndarray) -> None:
        save(out, order, keys, support)
        orders.append(order)

    monkeypatch.setattr(mine, "_save_order", note)
    return orders
