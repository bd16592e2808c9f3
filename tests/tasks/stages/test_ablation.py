"""An ablation's table, page and figures: they say what the data says, and stay readable."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from support.tiny_ablations import GRID, MEASURES, ablation
from tasks.report.ablation_page import (
    FIGURES,
    AblationData,
    ablation_table,
    figure_svg,
)
from tasks.report.compare import (
    ShippedResult,
    cell_label,
    cell_row,
    comparison_rows,
)
from tasks.report.comparison import COMPARISON_PARAMS
from tasks.report.comparison_table import comparison
from tasks.run.stage import StageSpec, run_stage
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.config.recipe import Cell
from umim_core.rules.origin import RuleOrigin
from umim_core.rules.ruleset import RuleSet


def test_the_table_shows_what_differs_and_what_was_measured() -> None:
    table = ablation_table(ablation())
    assert table.headings == ("backbone", "τ", "containment", *MEASURES)
    assert [row[:3] for row in table.rows] == [(b, str(t), c) for b, t, c in GRID]
    assert table.rows[0][3:6] == ("31.5", "18,000", "0.6848")
    assert "Which rows are unit ends depends on the rules" in table.note


def test_every_difference_has_a_column() -> None:
    rows = [
        cell_row(Cell(backbone="b")),
        cell_row(Cell(backbone="b", depth=3, positions="learned")),
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


LIMITS = [
    ({"rule_budget": 9000}, "at most 9,000 rules", ("9,000", "–", "–")),
    ({"revision": "abc"}, "revision abc", ("–", "–", "abc")),
    (
        {"source": "confidence", "confidence_tokens": 5000},
        "asked about 5,000 tokens",
        ("–", "5,000", "–"),
    ),
]


@pytest.mark.parametrize(("fields", "words", "shown"), LIMITS, ids=lambda value: str(value)[:20])
def test_cells_that_differ_only_in_a_limit_are_told_apart(
    fields: dict[str, object], words: str, shown: tuple[str, ...]
) -> None:
    cells = [Cell.model_validate({"backbone": "b"} | extra) for _, extra in ((0, {}), (1, fields))]
    row = cell_row(cells[1])
    assert words in row.label
    assert words in cell_label(cells[1])
    assert cell_row(cells[0]).label == "b, τ 5"
    assert set(row.params()) - set(COMPARISON_PARAMS) == set(fields) - {"source"}
    assert set(cell_row(cells[0]).params()) == set(COMPARISON_PARAMS)
    rows = [cell_row(Cell.model_validate({"backbone": "b"} | f)) for f, _, _ in LIMITS]
    table = comparison(rows)
    first = table.headings.index("most rules")
    assert table.headings[first : first + 3] == ("most rules", "tokens asked", "revision")
    index = [f for f, _, _ in LIMITS].index(fields)
    assert table.rows[index][first : first + 3] == shown


def test_a_shipped_checkpoint_with_rules_by_confidence_states_no_probability(
    tmp_path: Path,
) -> None:
    shipped = Checkpoint.load("umim-docs-llama")
    spans = RuleSet.from_spans([(1, 2)])
    rules = RuleSet(
        spans.ids_by_order,
        spans.support_by_order,
        RuleOrigin(
            tau=1,
            overlap="none",
            containment="keep",
            source="confidence",
            tokenizer_fingerprint=shipped.rules.origin.tokenizer_fingerprint,
        ),
    )
    folder = tmp_path / "checkpoint"
    replace(shipped, rules=rules).save(folder)
    measured = run_stage(tmp_path, StageSpec("evaluate", 1, {}, {}), lambda _: {"top1": 0.5})
    (row,) = comparison_rows([], [ShippedResult(str(folder), measured, measured)], 0)
    assert row.rules.min_probability is None
    assert row.brief == "umim-docs-llama, τ 1 (confidence, shipped)"
    assert cell_row(Cell(backbone="b")).rules.min_probability == 0.0


def test_data_survives_being_saved() -> None:
    data = ablation()
    assert AblationData.model_validate_json(data.model_dump_json()) == data


@pytest.mark.parametrize("name", sorted(FIGURES))
def test_a_figure_has_a_line_per_variant_and_a_label_per_point(name: str) -> None:
    svg = figure_svg(ablation(), name)
    assert svg == figure_svg(ablation(), name)
    ElementTree.fromstring(svg)  # noqa: S314  # our own drawing
    labels = re.findall(r">τ (\d+)</text>", svg)
    assert sorted(map(int, labels)) == sorted(tau for _, tau, _ in GRID)
    for text in ("llama", "gpt2", "containment drop", "containment keep"):
        assert svg.count(f">{text}</text>") == 1
