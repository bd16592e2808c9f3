"""Table of an ablation: columns left out, notes, figures taken back."""

from __future__ import annotations

from support.tiny_ablations import MEASURES, ablation, cell
from tasks.report.ablation_page import AblationCell, ablation_table


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
