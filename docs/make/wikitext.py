"""Page and figure of ``benchmarks/wikitext_rules.py``."""

from __future__ import annotations

import math
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tasks.report.page_template import Report, each, page, walk
from tasks.report.report_drawing import PALETTE

_ROOM_FOR_NAMES: Final = 6.0  # times the most rules
_NAME_GAP: Final = 2.4  # percentage points between the names of two policies
Point = dict[str, Any]


def _thresholds(results: Report) -> str:
    taus = [point["tau"] for point in walk(results, "tokenizers.*number.curve.*point")]
    return (
        "Every line is one policy (overlap + containment), τ falling from "
        f"{max(taus):,} at its left end to {min(taus)}; the dots are rows of the tables."
    )


def _inputs(results: Report) -> str:
    digests = [f"{s}.txt {digest[:12]}" for s, digest in results["corpus"]["sha256"].items()]
    digests += [f"{t['name']} tokenizer.json {t['sha256'][:12]}" for t in results["tokenizers"]]
    return f"SHA-256 of the inputs: {', '.join(digests)}."


WIKITEXT: Final = page(
    """\
# WikiText-2: rules and token reduction by threshold and filter policy

Rules are mined on the training split as one string, in segments of {segment_length} tokens. TR is
the realised token reduction on the test split, cut the same way. Counts are given for 2-, 3- and
4-grams: frequent (at least τ), after the overlap filter, after both filters. *Collisions*: share of
rules that have the surrogate of another rule in a module without positions. *Infix-free*: no rule
lies inside another.

![Token reduction against number of rules](wikitext2-tr-against-rules.svg)

@ thresholds

@ tokenizers

@ inputs

Measured, and this page written, by `python -m benchmarks.wikitext_rules`.
""",
    thresholds=_thresholds,
    inputs=_inputs,
    tokenizers=each(
        "tokenizers.*number",
        page("""\
## {name} tokenizer

{train.tokens:,} training tokens in {train.segments:,} segments, {test.tokens:,} test tokens in
{test.segments:,} segments.

@ cells.*cell
> τ                     | {tau}
< overlap               | {overlap}
< containment           | {containment}
frequent 2 / 3 / 4      | {raw:,}
after overlap 2 / 3 / 4 | {after_overlap:,}
rules 2 / 3 / 4         | {rules:,}
all rules               | {rules!+:,}
TR                      | {token_reduction:.2%}
collisions              | {collision_rate:.2%}
< infix-free            | {infix_free:yes|no}
"""),
    ),
)


def wikitext_figure(results: Report) -> Figure:
    """Draw token reduction against the number of rules, one panel per tokenizer."""
    figure = Figure(figsize=(12.6, 4.9))
    first: Axes | None = None
    for number, tokenizer in enumerate(results["tokenizers"], 1):
        axes = figure.add_subplot(1, len(results["tokenizers"]), number, sharey=first)
        first = first or axes
        _draw_curves(axes, tokenizer["curve"], {cell["tau"] for cell in tokenizer["cells"]})
        axes.set(title=f"{tokenizer['name']} tokenizer", xscale="log", xlabel="Number of rules")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_ylabel("Token reduction on the test split (%)")
        axes.set_ylim(bottom=0)
        axes.set_xlim(right=axes.get_xlim()[1] * _ROOM_FOR_NAMES)
    return figure


def _draw_curves(axes: Axes, points: list[Point], marked: set[int]) -> None:
    """Draw each policy with its name at the end and a dot at the marked thresholds."""
    curves: dict[str, list[Point]] = {}
    for point in points:
        curves.setdefault(f"{point['overlap']} + {point['containment']}", []).append(point)
    colours = dict(zip(curves, PALETTE, strict=False))
    lowest = -math.inf  # where the next name may stand
    for name in sorted(curves, key=lambda name: float(curves[name][0]["token_reduction"])):
        x = [point["rules"] for point in curves[name]]
        y = [100 * point["token_reduction"] for point in curves[name]]
        axes.plot(x, y, color=colours[name])
        label = {"textcoords": "offset points", "color": colours[name]}
        for point, at, high in zip(curves[name], x, y, strict=True):
            if point["tau"] not in marked:
                continue
            axes.plot([at], [high], marker="o", markersize=5, color=colours[name])
            if math.isinf(lowest):  # the lowest curve speaks for all
                below = {"xytext": (0, -7), "ha": "center", "va": "top", "fontsize": 8.5}
                axes.annotate(f"τ = {point['tau']}", (at, high), **below, **label)
        lowest = max(y[0], lowest + _NAME_GAP)
        white = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
        axes.annotate(name, (x[0], lowest), xytext=(8, 0), va="center", bbox=white, **label)
