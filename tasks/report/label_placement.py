"""Labels of points: each on the emptiest place around its point, off lines and other labels.

Sizes are estimated, not measured, so that the result depends on the data alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

Points = NDArray[np.float64]
_FONT: Final = 8.5  # points
_SPACING: Final = 2.0  # of the samples of a line, in points
_LEADER: Final = 16.0  # a label that is farther away is tied to its point by a line
_REACH: Final = (7.0, 9.0, 12.0, 16.0, 22.0, 30.0, 40.0)  # from the point to the label's near edge
_ANGLES: Final = np.deg2rad(np.arange(0, 360, 15))
_LABEL, _POINT, _LINE, _FAR = 40.0, 15.0, 1.0, 0.12  # what it costs to cover one, or to be far


def place_labels(
    axes: Axes,
    labels: Sequence[tuple[float, float, str, str]],
    lines: Sequence[Sequence[tuple[float, float]]] = (),
) -> None:
    """Write a label near each point, off the lines, the points and the other labels if it can.

    Args:
        axes: Where everything is drawn, with final limits, and the figure's legend too.
        labels: (x, y, text, colour) of each point.
        lines: (x, y) of the points of each line that is drawn.
    """
    figure = axes.get_figure(root=True)
    if figure is None or not labels:
        return
    figure.draw_without_rendering()  # the layout decides where data coordinates lie
    scale = 72.0 / figure.dpi
    frame = axes.get_window_extent().get_points() * scale

    def on_paper(points: Sequence[tuple[float, float]]) -> Points:
        return np.asarray(axes.transData.transform(np.asarray(points, np.float64))) * scale

    anchors = on_paper([(x, y) for x, y, _, _ in labels])
    samples = np.concatenate([np.zeros((0, 2)), *(_sampled(on_paper(line)) for line in lines)])
    taken: list[Points] = []
    for at, (x, y, text, colour) in zip(anchors, labels, strict=True):
        size = np.array([0.62 * _FONT * len(text), 1.1 * _FONT])
        boxes = _candidates(at, size)
        costs = [_cost(box, far, frame, taken, anchors, samples) for box, far in boxes]
        box, far = boxes[int(np.argmin(costs))]
        taken.append(box)
        left, right = box[:, 0] - at[0]
        # Text is narrower than its estimate: it begins, or ends, at the edge next to the point.
        side, edge = _nearest(left, right)
        axes.annotate(
            text,
            (x, y),
            xytext=(edge, float(box[:, 1].mean() - at[1])),
            textcoords="offset points",
            ha=side,
            va="center",
            fontsize=_FONT,
            color=colour,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6}
            if far > _LEADER
            else None,
        )


def _nearest(left: float, right: float) -> tuple[str, float]:
    """Return how text is aligned, and where, between edges left and right of its point."""
    if left >= 0.0:
        return "left", left
    return ("right", right) if right <= 0.0 else ("center", (left + right) / 2)


def _sampled(line: Points) -> Points:
    """Return points along a line, close together."""
    pieces = [line]
    for start, end in pairwise(line):
        count = int(np.hypot(*(end - start)) / _SPACING) + 2
        pieces.append(start + np.linspace(0, 1, count)[:, None] * (end - start))
    return np.concatenate(pieces)


def _candidates(at: Points, size: Points) -> list[tuple[Points, float]]:
    """Return boxes (low corner, high corner) around a point, each with its distance."""
    found = []
    for far in _REACH:
        for angle in _ANGLES:
            way = np.array([np.cos(angle), np.sin(angle)])
            middle = at + way * (far + size / 2)  # the nearest edge or corner is near, in any way
            found.append((np.stack([middle - size / 2, middle + size / 2]), far))
    return found


def _cost(
    box: Points,
    far: float,
    frame: Points,
    taken: Sequence[Points],
    anchors: Points,
    samples: Points,
) -> float:
    if (box[0] < frame[0]).any() or (box[1] > frame[1]).any():
        return float("inf")
    covered = sum(1 for other in taken if (box[0] < other[1]).all() and (other[0] < box[1]).all())
    return (
        _LABEL * covered
        + _POINT * _inside(anchors, box, 4)
        + _LINE * _inside(samples, box, 1)
        + _FAR * far
    )


def _inside(points: Points, box: Points, margin: float) -> int:
    return int(((points > box[0] - margin) & (points < box[1] + margin)).all(axis=1).sum())
