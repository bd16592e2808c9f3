"""Small ablations with invented results."""

from __future__ import annotations

import itertools

from tasks.report.ablation_page import AblationCell, AblationData, Budget
from tasks.report.compare import cell_row
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
