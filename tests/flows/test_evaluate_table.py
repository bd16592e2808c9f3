"""The table that evaluating a recipe returns, without its stages."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from flows import pipeline_flows
from tasks.report.comparison import cell_row
from umim_core.config.recipe import Cell


def test_evaluating_returns_every_row_and_names_no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    run = MagicMock(recipe=SimpleNamespace(seed=0, model_dump=lambda mode: {}))
    parts = MagicMock(train=lambda run: ([], []))
    cells = [Cell(backbone="umim-docs-llama", tau=tau) for tau in range(100, 120)]
    rows = [cell_row(cell, metrics={"top1": 0.5}) for cell in cells]
    monkeypatch.setattr(pipeline_flows, "open_pipeline", lambda *names: nullcontext(run))
    monkeypatch.setattr(pipeline_flows, "parts", parts)
    monkeypatch.setattr(pipeline_flows, "comparison_rows", lambda *of: rows)
    monkeypatch.setattr(pipeline_flows, "record_comparison", lambda *of: None)
    table = pipeline_flows.evaluate.fn("any")
    assert all(f"  {row.tau}  " in table for row in rows) and "see the report" not in table
