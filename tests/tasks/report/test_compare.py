"""Names of the comparison's rows in MLflow's lists."""

from __future__ import annotations

from tasks.report.compare import cell_row, run_label
from umim_core.config.recipe import Cell


def test_runs_of_cells_that_differ_in_one_policy_have_names_of_their_own() -> None:
    cells = [
        Cell(backbone="umim-docs-llama", tau=tau, containment=containment, positions=positions)
        for tau in (5, 50)
        for containment in ("drop", "keep")
        for positions in ("none", "learned")
    ]
    names = [run_label(cell_row(cell)) for cell in cells]
    assert len(set(names)) == len(cells)
    assert names[3] == "WT docs-llama, τ 5 (keep, learned positions)"
