"""Charts: looks that differ, one legend, labels of points, bars, files on white."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from tasks.report.charts import Line, Panel, chart, look, png, svg, svg_file


def lines(count: int, **of: object) -> list[Line]:
    return [Line(f"line {n}", [(0.0, n), (1.0, n + 1)], n, **of) for n in range(count)]


def test_forty_looks_differ() -> None:
    looks = [look(index) for index in range(40)]
    assert len({tuple(sorted(one.items())) for one in looks}) == 40
    assert len({one["color"] for one in looks[:10]}) == 10
    pairs = {(one["color"], one["marker"]) for one in looks}
    assert len(pairs) == 40  # told apart without their dashes, too


def test_fifteen_lines_have_fifteen_looks_and_one_legend_that_fits() -> None:
    figure = chart([Panel(lines(15))])
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    (legend,) = figure.legends
    drawn = {
        (handle.get_color(), handle.get_marker(), handle.get_linestyle())
        for handle in legend.legend_handles
    }
    assert len(drawn) == 15
    assert legend.get_window_extent().x1 <= figure.bbox.x1
    (axes,) = figure.axes
    assert not legend.get_window_extent().overlaps(axes.get_window_extent())


def test_a_long_name_in_the_legend_is_broken_into_lines_that_fit() -> None:
    words = "umim-docs-llama, τ 5 (" + ", ".join(["a policy of its form"] * 5) + ", shipped)"
    figure = chart([Panel([Line(words, [(0, 0)]), Line("short", [(1, 1)], 1)])])
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    (drawn,) = figure.legends
    assert drawn.get_window_extent().x1 <= figure.bbox.x1
    assert " ".join(drawn.get_texts()[0].get_text().splitlines()) == words


def test_lines_of_one_label_in_several_panels_have_one_entry() -> None:
    figure = chart([Panel(lines(2)), Panel(lines(2)), Panel(lines(3)), Panel(lines(1))])
    assert len(figure.axes) == 4
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["line 0", "line 1", "line 2"]


def test_points_have_their_texts_and_levels_are_drawn() -> None:
    line = Line("", [(0.0, 1.0), (2.0, 3.0)], texts=["τ 5", "τ 50"], errors=[0.5, 0.25])
    (axes,) = chart([Panel([line], levels=[(2.0, None)])]).axes
    assert [text.get_text() for text in axes.texts] == ["τ 5", "τ 50"]
    assert list(axes.lines[-1].get_ydata()) == [2.0, 2.0]
    ((bars,),) = (container.lines[2] for container in axes.containers)
    ends = [segment[:, 1].tolist() for segment in bars.get_segments()]
    assert ends == [[0.5, 1.5], [2.75, 3.25]]


def test_bars_stand_in_groups_with_their_values() -> None:
    bars = {"256": {"base": 2.0, "UMIM": 1.0}, "512": {"base": 4.0}}
    figure = chart([Panel(bars=bars, values="{:.1f}")])
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["256", "512"]
    assert [text.get_text() for text in axes.texts] == ["2.0", "4.0", "1.0"]


@pytest.mark.parametrize("index", [0, 12])
def test_an_svg_is_the_same_every_time_and_its_ids_are_its_own(index: int) -> None:
    panel = Panel([Line("a", [(0, 0), (1, 1)], index)])
    first, second = (svg(chart([panel]), "name", 'A "title"') for _ in range(2))
    assert first == second
    root = ElementTree.fromstring(first)  # noqa: S314  # our own drawing
    assert root.get("aria-label") == 'A "title"'
    assert all(name.startswith("name-") for name in re.findall(r' id="([^"]+)"', first))
    assert "currentColor" in first and "#22252a" not in first


def test_a_file_of_its_own_stands_on_white() -> None:
    text = svg_file(chart([Panel(lines(1))]), "x", "X")
    assert '<rect width="100%" height="100%" fill="#fff"/>' in text
    assert "currentColor" not in text
    assert png(chart([Panel(lines(1))])).startswith(b"\x89PNG")
