"""The figures of attention maps and of surrogates against their tokens."""

from __future__ import annotations

from xml.etree import ElementTree

from tasks.report.charts import svg
from tasks.report.report_data import AttentionExample, ReportData, SimilarityRow
from tasks.report.report_figures import ReportFigure, draw_figures

ATTENTION = AttentionExample(
    label="tiny, layer 2",
    units=("a", "b $c", "", "a very long unit of text"),
    tokens=(1, 2, 1, 4),
    before=((1, 0, 0, 0), (0.5, 0.5, 0, 0), (0.2, 0.3, 0.5, 0), (0.1, 0.2, 0.3, 0.4)),
    after=((1, 0, 0, 0), (0.25, 0.75, 0, 0), (0.2, 0.3, 0.5, 0), (0.1, 0.2, 0.3, 0.4)),
)
SIMILARITY = (
    SimilarityRow(order=2, spans=1234, by_offset=(0.1, -0.1), mean=0.05, random=0.0),
    SimilarityRow(order=3, spans=5, by_offset=(0.1, 0.2, 0.3), mean=0.05, random=0.0),
)


def shown(figure: ReportFigure) -> set[str]:
    drawn = svg(figure.figure, figure.name, figure.title)
    root = ElementTree.fromstring(drawn)  # noqa: S314  # our own
    return {"".join(node.itertext()) for node in root.iter() if node.tag.endswith("text")}


def test_both_are_figures_of_the_report() -> None:
    data = ReportData(recipe="tiny", attention=ATTENTION, similarity=SIMILARITY)
    figures = {figure.name: figure for figure in draw_figures(data)}
    assert set(figures) == {"attention", "similarity"}
    assert {"a", "b $c (2)", "␣", "a very long u… (4)"} <= shown(figures["attention"])
    texts = shown(figures["similarity"])
    assert {"(1,234 spans)", "(5 spans)", "mean of the span", "random token", "token 3"} <= texts
    assert "tiny, layer 2" in figures["attention"].caption


def test_the_same_data_gives_the_same_bytes() -> None:
    data = ReportData(recipe="tiny", attention=ATTENTION, similarity=SIMILARITY)
    first, second = ([svg(f.figure, f.name, f.title) for f in draw_figures(data)] for _ in "ab")
    assert first == second


def test_without_measurements_there_is_no_figure() -> None:
    assert draw_figures(ReportData(recipe="tiny")) == []
