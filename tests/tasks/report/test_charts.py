from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from tasks.report.charts import Line, Panel, chart, svg


def lines(count: int, **of: object) -> list[Line]:
    return [Line(f"line {n}", [(0.0, n), (1.0, n + 1)], n, **of) for n in range(count)]


def test_points_have_their_texts_and_levels_are_drawn() -> None:
    line = Line("", [(0.0, 1.0), (2.0, 3.0)], texts=["τ 5", "τ 50"], errors=[0.5, 0.25])
    (axes,) = chart([Panel([line], levels=[(2.0, None)])]).axes
    assert [text.get_text() for text in axes.texts] == ["τ 5", "τ 50"]
    assert list(axes.lines[-1].get_ydata()) == [2.0, 2.0]
    ((bars,),) = (container.lines[2] for container in axes.containers)
    assert [segment[:, 1].tolist() for segment in bars.get_segments()] == [[0.5, 1.5], [2.75, 3.25]]


@pytest.mark.parametrize("index", [0, 12])
def test_an_svg_is_the_same_every_time_and_its_ids_are_its_own(index: int) -> None:
    panel = Panel([Line("a", [(0, 0), (1, 1)], index)])
    first, second = (svg(chart([panel]), "name", 'A "title"') for _ in range(2))
    assert first == second
    root = ElementTree.fromstring(first)  # noqa: S314  # our own drawing
    assert root.get("aria-label") == 'A "title"'
    assert all(name.startswith("name-") for name in re.findall(r' id="([^"]+)"', first))
    assert "currentColor" in first and "#22252a" not in first
