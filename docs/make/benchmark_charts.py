"""Charts of benchmarks: what each panel and line shows, made of a result file alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from matplotlib.figure import Figure

from docs.make.benchmark_rows import (
    MERGE_LABELS,
    POLICIES,
    featured,
    half_points,
    line_of,
    method_points,
    quality_line,
    quality_texts,
    reduction_points,
)
from tasks.report.charts import PALETTE, Line, Panel, chart, look
from tasks.report.render import Report, walk

_MIB: Final = 2.0**20
_DASHES: Final = ("-", "--", ":")
_DRAWN: Final = "top-p 0.9, temperature 0.8"
_QUALITY_LINES: Final = {
    "prompt": "merged prompt alone",
    "all": "merged while decoding, all rules",
    "decode_min_probability": "where tokens were likely",
    "decode_max_damage": "by cheap rules",
    "span_eviction": "span eviction, nothing merged",
}
_WIDE, _NARROW = 3.2, 1.2  # a reader looks for one among twenty lines


@dataclass(frozen=True)
class Drawing:
    """A chart of a benchmark.

    Attributes:
        draw: Draws it from the results.
        file: Its file's stem; ``{name}`` is that of the results.
        title: What it shows.
        wanted: Whether the results have it.
    """

    draw: Callable[[Report], Figure]
    file: str
    title: str
    wanted: Callable[[Report], bool] = lambda report: True


def _capacity(report: Report) -> Figure:
    """Draw the cache memory of a row, and how many rows fit into the same memory."""
    budget = f"{report['budget_bytes'] / _MIB:,.0f} MiB"
    panels = []
    for name, subject in report["subjects"].items():
        for field, per, title, label, shown in (
            ("bytes_mean", _MIB, "cache of a row", "MiB (mean)", "{:.2f}"),
            ("sequences", 1.0, f"rows in {budget}, at the final length", "Rows", "{:,.0f}"),
        ):
            bars: dict[str, dict[str, float]] = {}
            for row in sorted(subject["rows"], key=lambda row: int(row["prompt_tokens"])):
                group = bars.setdefault(f"{row['prompt_tokens']:,}", {})
                group[MERGE_LABELS[row["merge"]]] = row[field] / per
            axes = {"title": f"{name}: {title}", "xlabel": "Prompt length (raw tokens)"}
            axes["ylabel"] = label
            panels.append(Panel(bars=bars, values=shown, axes=axes))
    return chart(panels, columns=2, height=3.3)


def _wikitext(report: Report) -> Figure:
    """Draw token reduction against the number of rules, one panel per tokenizer."""
    panels = []
    for tokenizer in report["tokenizers"]:
        shown = {cell["tau"] for cell in tokenizer["cells"]}
        curves: dict[str, list[Report]] = {}
        for point in tokenizer["curve"]:
            curves.setdefault(f"{point['overlap']} + {point['containment']}", []).append(point)
        lowest = min(curves, key=lambda name: float(curves[name][0]["token_reduction"]))
        lines = []
        for index, (name, own) in enumerate(curves.items()):
            points = [(point["rules"], 100 * point["token_reduction"]) for point in own]
            dots = [place for place, point in enumerate(own) if point["tau"] in shown]
            texts = [f"τ {p['tau']}" if p["tau"] in shown and name == lowest else "" for p in own]
            lines.append(Line(name, points, index, texts=texts, look={"markevery": dots}))
        axes = {"title": f"{tokenizer['name']} tokenizer", "xscale": "log", "ylim": (0, None)}
        axes |= {"xlabel": "Number of rules", "ylabel": "Token reduction on the test split (%)"}
        panels.append(Panel(lines, axes=axes))
    return chart(panels)


def _quality(report: Report) -> Figure:
    """Draw the perplexity ratio against Gen-KV TR, a panel per model, a line per kind of bound."""
    panels = []
    for subject in walk(report, "subjects.*subject"):
        rows = [row for row in quality_texts(subject) if row["decoding"] == _DRAWN]
        lines = []
        for index, (name, label) in enumerate(_QUALITY_LINES.items()):
            own = [row for row in rows if row["ppl_ratio"] and quality_line(row) == name]
            own.sort(key=lambda row: float(row["metrics"]["gen_kv_reduction"]["mean"]))
            points = [
                (100 * row["metrics"]["gen_kv_reduction"]["mean"], row["ppl_ratio"]["mean"])
                for row in own
            ]
            errors = [row["ppl_ratio"]["std"] or 0.0 for row in own]
            lines += [Line(label, points, index, errors)] if points else []
        axes = {"title": subject["subject"], "xlabel": "Gen-KV TR (%)"}
        panels.append(Panel(lines, axes=axes, levels=[(1.0, None)]))
        if len(panels) == 1:
            axes["ylabel"] = "Perplexity, times the base model's"
    return chart(panels, height=5.0)


def _against_reduction(points: Sequence[Report], quantity: str) -> dict[str, Any]:
    """Return points and error bars of a quantity against token reduction in per cent."""
    values = [point[quantity] for point in points]
    places = [100 * point["token_reduction"] for point in points]
    return {
        "points": [(x, value["mean"]) for x, value in zip(places, values, strict=True)],
        "errors": [value["std"] or 0.0 for value in values],
    }


def _reduction(report: Report) -> Figure:
    """Draw the three quantities against token reduction, a line per checkpoint and policy."""
    names = list(report["subjects"])
    shown = [point for point in reduction_points(report) if "unreached" not in point]
    curves = [
        (policy, name, points)
        for policy in POLICIES
        for name in names
        if (points := line_of([p for p in shown if p["subject"] == name], policy))
    ]
    policies = list(dict.fromkeys(policy for policy, _, _ in curves))
    quantities = {"top1": "Top-1", "kl": "KL (nats)"}
    quantities["ppl_ratio"] = "Perplexity, times the base model's"
    panels = []
    for quantity, title in quantities.items():
        lines = []
        for policy, name, points in curves:
            place = policies.index(policy)
            label = ", ".join([name] * (len(names) > 1) + [POLICIES[policy]])
            colour = names.index(name) if len(names) > 1 else place
            dash = {"color": PALETTE[colour], "linestyle": _DASHES[place % len(_DASHES)]}
            own = _against_reduction(points, quantity)
            lines.append(Line(label, index=place, look=dash, **own))
        low = {"ylim": (0, None)} if quantity == "kl" else {}
        axes = {"title": title, "xlim": (0, None), "xlabel": _saved("Token reduction", curves)}
        panels.append(Panel(lines, axes=axes | low))
    return chart(panels)


def _saved(of: str, curves: Sequence[tuple[str, str, list[Report]]]) -> str:
    evicted = any("age" in point for _, _, points in curves for point in points)
    return f"{of} (%" + ("; span eviction: of the cache)" if evicted else ")")


def _prompts(report: Report) -> Figure:
    """Draw the perplexity ratio behind prompts, a line per checkpoint and raw tail.

    One policy of each checkpoint is drawn, and span eviction.
    """
    names, shown = list(report["subjects"]), half_points(report)
    tails = sorted({point["tail"] for point in shown} - {None})
    kinds = {tail: f"last {tail} tokens raw" if tail else "merged whole" for tail in tails}
    kinds[None] = POLICIES["eviction"]
    curves = []
    for name in names:
        for place, (tail, words) in enumerate(kinds.items()):
            own = [p for p in shown if p["subject"] == name and p["tail"] == tail]
            if points := line_of(own, featured(own)):
                curves.append((words, name, points, place))
    lines = []
    for words, name, points, place in curves:
        colour = names.index(name) if len(names) > 1 else place
        dash = {"color": PALETTE[colour], "linestyle": _DASHES[place % len(_DASHES)]}
        label = ", ".join([name] * (len(names) > 1) + [words])
        lines.append(Line(label, index=place, look=dash, **_against_reduction(points, "ppl_ratio")))
    saved = _saved("Token reduction of prompts", [curve[:3] for curve in curves])
    axes = {"xlim": (0, None), "xlabel": saved}
    axes["ylabel"] = "Perplexity of the text behind, times the base model's"
    return chart([Panel(lines, axes=axes, levels=[(1.0, None)])], height=4.8)


def _second_half(report: Report) -> Figure:
    """Draw the perplexity ratio against reduction, a line per method; of the cache dashed."""
    own: dict[str, list[Report]] = {}
    for point in method_points(report):
        shown = point | {"token_reduction": point["cache_reduction"]}
        own.setdefault(point["label"], []).append(shown)
    lines = []
    for index, (label, points) in enumerate(sorted(own.items())):
        width = _WIDE if label.startswith("UMIM") else _NARROW
        dash = "-" if points[0]["side"] == "prompt" else "--"
        how = look(index) | {"linewidth": width, "linestyle": dash}
        lines.append(Line(label, index=index, look=how, **_against_reduction(points, "ppl_ratio")))
    axes = {
        "xlabel": "Reduction (%): of the prompt; dashed: of the KV cache alone",
        "ylabel": "Perplexity of the second half, times the base model's",
        "xlim": (0, None),
    }
    return chart([Panel(lines, axes=axes, levels=[(1.0, None)])], height=5.0)


DRAWINGS: Final[dict[str, list[Drawing]]] = {
    "cache_capacity": [
        Drawing(
            _capacity,
            "cache_capacity",
            "Cache memory of a row, and rows that fit into the same memory",
        )
    ],
    "wikitext_rules": [
        Drawing(_wikitext, "wikitext2-tr-against-rules", "Token reduction against number of rules")
    ],
    "second_half": [
        Drawing(_second_half, "{name}", "Perplexity of raw second halves against reduction")
    ],
    "generation_quality": [
        Drawing(
            _quality,
            "{name}",
            "Perplexity of generated text against token reduction of the cache",
        )
    ],
    "token_reduction": [
        Drawing(_reduction, "{name}", "Top-1, KL and perplexity ratio against token reduction"),
        Drawing(
            _prompts,
            "{name}-prompt",
            "Perplexity behind shortened prompts against their token reduction",
            lambda report: bool(half_points(report)),
        ),
    ],
}
