"""The report's figures of what merging does inside: attention maps, surrogates against tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from matplotlib.figure import Figure

from tasks.report.report_data import AttentionExample, SimilarityRow
from tasks.report.report_drawing import PALETTE, ReportFigure, finish, legend

_LABEL_CHARACTERS: Final = 14


def draw_attention(example: AttentionExample | None) -> ReportFigure | None:
    """Draw attention before and after merging side by side, on one scale; nothing for None."""
    if example is None or not example.units:
        return None
    size = len(example.units)
    figure = Figure(figsize=(12.6, 2.6 + 0.16 * size))
    panels = figure.subplots(1, 2, sharey=True)
    highest = max(max(max(row) for row in grid) for grid in (example.before, example.after))
    names = [_name(*unit) for unit in zip(example.units, example.tokens, strict=True)]
    places = [place + 0.5 for place in range(size)]
    grids = (
        ("before: raw tokens, added up by unit", example.before),
        ("after: units", example.after),
    )
    for axes, (title, grid) in zip(panels, grids, strict=True):
        # Squares and no image: a picture inside SVG would not follow the page's size.
        mesh = axes.pcolormesh(grid, cmap="Blues", vmin=0, vmax=highest, edgecolors="none")
        axes.set_xticks(places, names, rotation=90, fontsize=7.5)
        axes.set_yticks(places, names, fontsize=7.5)
        for label, tokens in zip(axes.get_xticklabels(), example.tokens, strict=True):
            label.set_color(PALETTE[1] if tokens > 1 else label.get_color())
        axes.set(ylim=(size, 0), title=title, xlabel="Attended unit")
        axes.grid(visible=False)
    panels[0].set_ylabel("Attending unit")
    figure.colorbar(mesh, ax=panels, label="Attention weight", shrink=0.8)
    caption = (
        f"{example.label}. Orange: merged spans. The row of a span is that of its last token; each "
        "row adds up to 1. A column that stays dark after merging is a surrogate that later units "
        "go on attending to."
    )
    return finish(figure, "attention", "Attention before and after merging", caption, wide=True)


def draw_similarity(rows: Sequence[SimilarityRow]) -> ReportFigure | None:
    """Draw the cosine of surrogates with their tokens, their mean and a random token, by order."""
    if not rows:
        return None
    figure = Figure(figsize=(6.4, 4.4))
    axes = figure.add_subplot()
    places, names, start = [], [], 0.0
    for row in rows:
        bars = [(f"{place}", value, 0) for place, value in enumerate(row.by_offset, 1)]
        bars += [("mean", row.mean, 1), ("random", row.random, 2)]
        for offset, (name, value, colour) in enumerate(bars):
            axes.bar(start + offset, value, 0.8, color=PALETTE[colour])
            places.append(start + offset)
            names.append(name)
        top = {"xycoords": ("data", "axes fraction"), "fontsize": 8.5, "va": "top"}
        axes.annotate(f"{row.order} tokens ({row.spans:,})", (start, 1.0), **top)
        start += len(bars) + 1
    axes.set_xticks(places, names, rotation=90)
    axes.set_ylabel("Cosine similarity")
    axes.axhline(0.0, color=PALETTE[0], linewidth=0.8)
    axes.margins(y=0.15)
    axes.grid(visible=False, axis="x")
    entries = [("token at that place", 0), ("mean of the span", 1), ("random token", 2)]
    legend(figure, entries, lines=True)
    caption = (
        "Mean cosine of a surrogate with the embeddings of its own tokens (spans of the text)."
    )
    return finish(figure, "similarity", "Surrogates against their tokens", caption)


def _name(text: str, tokens: int) -> str:
    """Return a unit's label: short, on one line, its raw tokens behind it; ``$`` is no formula."""
    shown = " ".join(text.split()) or "␣"
    if len(shown) > _LABEL_CHARACTERS:
        shown = shown[: _LABEL_CHARACTERS - 1] + "…"
    return shown.replace("$", r"\$") + (f" ({tokens})" if tokens > 1 else "")
