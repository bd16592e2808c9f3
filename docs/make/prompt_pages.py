"""Second halves of ``benchmarks/token_reduction``: what a shortened prompt costs behind it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from matplotlib.figure import Figure

from docs.make.reduction_curves import (
    DASHES,
    POLICIES,
    Curve,
    add_legend,
    draw_curve,
    line_of,
    summarised,
)
from tasks.report.page_template import Report, page
from tasks.report.report_drawing import MARKERS, PALETTE

PROMPT_TITLE: Final = "Perplexity behind shortened prompts against their token reduction"


def has_prompts(report: Report) -> bool:
    """Return whether second halves were measured."""
    return any(_halves(report))


def _halves(report: Report) -> Iterator[Report]:
    """Yield the points of second halves that were reached, the policy in words."""
    for name, found in report["subjects"].items():
        for point in found.get("second_halves", []):
            if "unreached" not in point:
                age = f", age {point['age']}" if "age" in point else ""
                tail = None if "age" in point else point["raw_tail"]
                label = POLICIES[point["policy"]] + age
                yield point | {"subject": name, "label": label, "tail": tail}


def _bases(report: Report) -> str:
    """Say what the base model's perplexity of the second halves is."""
    found = report["subjects"].values()
    values = [f"{x['ppl_base_of_halves']:.2f}" for x in found if "ppl_base_of_halves" in x]
    return ", ".join(dict.fromkeys(values))


_SECTION: Final = page(
    """\
## Behind shortened prompts

![Perplexity behind shortened prompts]({name}-prompt.svg)

The first half of each row is shortened as a prompt is, with its last tokens raw where there is a
*raw tail*; the second half stays raw, and its perplexity is measured. This is what merging in the
prompt alone costs. *TR* is that of whole first halves, raw tails included; of span eviction it is
the cache's. *PPL ratio*: over the base model, which reads both halves raw ({base}), with the paired
standard error over rows.

@ halves
checkpoint      | {subject}
< rules chosen by | {label}
TR asked        | {target?-:.0%}
raw tail        | {tail?-}
TR of prompts   | {token_reduction:.2%}
rules           | {rules:,}
PPL             | {ppl:.2f}
PPL ratio       | {ppl_ratio:.3f}
""",
    halves=_halves,
)


def prompt_section(report: Report) -> str:
    """Return the page's section; empty where no second halves were measured."""
    return _SECTION(report | {"base": _bases(report)}) if has_prompts(report) else ""


def prompt_figure(report: Report) -> Figure:
    """Draw the perplexity ratio behind prompts, a line per checkpoint and raw tail.

    One policy of each checkpoint is drawn, and span eviction.
    """
    curves = _curves(report)
    figure = Figure(figsize=(8.4, 4.8 + 0.22 * ((len(curves) + 1) // 2)))
    axes = figure.subplots()
    for curve in curves:
        draw_curve(axes, curve, "ppl_ratio")
    evicted = any("age" in point for curve in curves for point in curve.points)
    saved = "Token reduction of prompts (%" + ("; span eviction: of the cache)" if evicted else ")")
    axes.axhline(1.0, color=PALETTE[-1], linewidth=0.8, linestyle=":")
    axes.set(xlabel=saved, ylabel="Perplexity of the text behind, times the base model's")
    axes.set_xlim(left=0)
    add_legend(figure, curves)
    return figure


def _curves(report: Report) -> list[Curve]:
    """Return one line per checkpoint and raw tail, and one of span eviction."""
    names, shown = list(report["subjects"]), list(_halves(report))
    tails = sorted({point["tail"] for point in shown} - {None})
    found = []
    for name in names:
        own = [point for point in shown if point["subject"] == name]
        lines = [
            (
                f"last {tail} tokens raw" if tail else "merged whole",
                [p for p in own if p["tail"] == tail],
            )
            for tail in tails
        ]
        lines.append((POLICIES["eviction"], [p for p in own if p["tail"] is None]))
        for place, (words, part) in enumerate(lines):
            if points := line_of(part, summarised(part) or ""):
                colour = names.index(name) if len(names) > 1 else place
                found.append(
                    Curve(
                        ", ".join([name] * (len(names) > 1) + [words]),
                        points,
                        PALETTE[colour % len(PALETTE)],
                        MARKERS[place % len(MARKERS)],
                        DASHES[place % len(DASHES)],
                    )
                )
    return found
