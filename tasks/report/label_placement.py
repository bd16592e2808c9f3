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
_LABEL, _POINT, _LINE, _FAR = 40.0, 15.0, 1.0, 0.12  # what it costs to cover one, or to be far
# Places around a point: distance to the label's near edge [C] and direction [C, 2].
_FARS, _ANGLES = (
    grid.ravel()
    for grid in np.meshgrid(
        (7.0, 9.0, 12.0, 16.0, 22.0, 30.0, 40.0), np.deg2rad(np.arange(0, 360, 15)), indexing="ij"
    )
)
_WAYS: Final = np.stack([np.cos(_ANGLES), np.sin(_ANGLES)], axis=1)


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
        middles = at + _WAYS * (_FARS[:, None] + size / 2)  # the nearest edge or corner is near
        boxes = np.stack([middles - size / 2, middles + size / 2], axis=1)  # [C, low or high, 2]
        costs = _LABEL * _covered(taken, boxes) + _POINT * _inside(anchors, boxes, 4)
        costs += _LINE * _inside(samples, boxes, 1) + _FAR * _FARS
        costs[((boxes[:, 0] < frame[0]) | (boxes[:, 1] > frame[1])).any(axis=1)] = np.inf
        best = int(np.argmin(costs))
        box, far = boxes[best], _FARS[best]
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


def _covered(taken: Sequence[Points], boxes: Points) -> Points:
    """Return how many of the labels that have a place each box would cover [C]."""
    covered = [((boxes[:, 0] < b[1]) & (b[0] < boxes[:, 1])).all(axis=1) for b in taken]
    return np.sum(covered, axis=0, dtype=np.float64) if covered else np.zeros(len(boxes))


def _inside(points: Points, boxes: Points, margin: float) -> Points:
    """Return how many points lie in each box or near it [C]."""
    low, high = boxes[:, None, 0] - margin, boxes[:, None, 1] + margin
    return np.asarray(((points > low) & (points < high)).all(axis=2).sum(axis=1), np.float64)
