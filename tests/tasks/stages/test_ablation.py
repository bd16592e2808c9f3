"""An ablation's table, page and figures: they say what the data says, and stay readable."""

from __future__ import annotations

import itertools

from tasks.report.ablation import AblationCell, AblationData, Budget, ablation_table
from tasks.report.comparison import cell_row, comparison
from umim_core.config.recipe import Cell

GRID = list(itertools.product(("llama", "gpt2"), (5, 50, 500), ("drop", "keep")))
MEASURES = ["TR %", "rules", "Top-1", "Top-3", "Top-10", "Top-p", "MRR", "KL"]


def cell(
    backbone: str, tau: int, containment: str, steps: float = 300, **of_cell: object
) -> AblationCell:
    reduction = 0.6 / tau**0.4 + 0.01 * (containment == "keep")
    metrics = {"token_reduction": reduction, "rules": 9e4 / tau, "top1": 1 - reduction}
    metrics |= {"top3": 0.7, "top10": 0.71, "topp": 0.9, "mrr": 0.8, "kl": 2 * reduction}
    made = Cell.model_validate(
        {"backbone": backbone, "tau": tau, "containment": containment, **of_cell}
    )
    row = cell_row(made, metrics=metrics)
    return AblationCell(row=row, rules={2: 3, 3: 2, 4: 1}, training={"steps": steps})


def ablation(*cells: AblationCell) -> AblationData:
    return AblationData(
        name="small-grid",
        description="A *small* grid.",
        seed=17,
        budget=Budget(steps=300, rows=8, tokens=512),
        machine={"platform": "Linux"},
        versions={"torch": "2"},
        cells=cells or tuple(cell(*which) for which in GRID),
    )


def test_the_table_shows_what_differs_and_what_was_measured() -> None:
    table = ablation_table(ablation())
    assert table.headings == ("backbone", "τ", "containment", *MEASURES)
    assert [row[:3] for row in table.rows] == [(b, str(t), c) for b, t, c in GRID]
    assert table.rows[0][3:6] == ("31.5", "18,000", "0.6848")
    assert "Which rows are unit ends depends on the rules" in table.note


def test_every_difference_has_a_column() -> None:
    rows = [
        cell_row(Cell(backbone="b")),
        cell_row(Cell(backbone="b", depth=3, module_positions="learned")),
        cell_row(Cell(backbone="b", kind="linear", overlap="none")),
        cell_row(Cell(backbone="b", source="confidence", min_probability=0.6)),
    ]
    shown = comparison(rows)
    first = shown.headings.index("rules by")
    names = ("rules by", "overlap", "containment", "positions", "depth", "kind")
    assert shown.headings[first : first + 6] == names
    assert [row[first : first + 6] for row in shown.rows] == [
        ("frequency", "greedy", "drop", "none", "1", "attention"),
        ("frequency", "greedy", "drop", "learned", "3", "attention"),
        ("frequency", "none", "drop", "none", "1", "linear"),
        ("confidence 0.6", "none", "keep", "none", "1", "attention"),
    ]


def with_metrics(made: AblationCell, **metrics: float) -> AblationCell:
    row = made.row.model_copy(update={"metrics": made.row.metrics | metrics})
    return made.model_copy(update={"row": row})


def test_what_no_cell_measured_has_no_column_and_a_gap_is_a_dash() -> None:
    first, second = cell("llama", 5, "drop"), with_metrics(cell("gpt2", 5, "drop"), ppl_umim=7.0)
    table = ablation_table(ablation(first, second))
    assert table.headings == ("backbone", "τ", *MEASURES, "PPL UMIM")
    assert [row[-1] for row in table.rows] == ["–", "7.00"]


def test_metrics_over_states_have_columns_and_a_legend() -> None:
    made = with_metrics(cell("llama", 5, "keep"), top1_states=0.51, kl_states=1.5)
    table = ablation_table(ablation(made))
    assert table.headings[-2:] == ("Top-1 states", "KL states")
    assert table.rows[0][-2:] == ("0.5100", "1.500")
    assert "every state that decoding passes through" in table.note
