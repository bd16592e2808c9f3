"""Names of the comparison's rows in MLflow's lists."""

from __future__ import annotations

import pytest

from tasks.report.compare import require_own_names, run_label
from tasks.report.comparison import ComparisonRow, cell_row
from umim_core.config.recipe import Cell
from umim_core.errors import ConfigError


def test_runs_of_cells_that_differ_in_one_policy_have_names_of_their_own() -> None:
    cells = [
        Cell(
            backbone="umim-docs-llama", tau=tau, containment=containment, module_positions=positions
        )
        for tau in (5, 50)
        for containment in ("drop", "keep")
        for positions in ("none", "learned")
    ]
    names = [run_label(cell_row(cell)) for cell in cells]
    assert len(set(names)) == len(cells)
    assert names[3] == "WT τ 5 docs-llama (keep, learned positions)"


def test_depth_adapters_and_chosen_spans_tell_cells_apart_everywhere() -> None:
    inside = {"residual": "last", "unit_positions": "preserved"}
    cells = [
        Cell(backbone="umim-docs-llama", spans=1000),
        Cell(backbone="umim-docs-llama", spans=2000),
        Cell(backbone="umim-docs-llama", merge_depth=1, **inside),
        Cell(backbone="umim-docs-llama", merge_depth=2, **inside),
        Cell(backbone="umim-docs-llama", adapter_rank=4),
        Cell(backbone="umim-docs-llama"),
    ]
    rows = [cell_row(cell) for cell in cells]
    require_own_names("novels", cells)
    assert len({run_label(row) for row in rows}) == len(cells)
    assert len({str(row.params()) for row in rows}) == len(cells)
    read = [ComparisonRow.model_validate(row.model_dump(mode="json")) for row in rows]
    assert read == rows


def test_cells_that_would_share_a_name_are_refused() -> None:
    cells = [Cell(backbone=f"{owner}/Llama-3.2-1B") for owner in ("meta-llama", "unsloth")]
    with pytest.raises(ConfigError, match="a name of its own"):
        require_own_names("novels", cells)
