"""Page and figure of ``benchmarks.second_half``: baselines at matched token reduction."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Final

from matplotlib.figure import Figure

from docs.make.reduction_curves import Curve, add_legend, draw_curve
from tasks.report.page_template import Report, page
from tasks.report.report_drawing import PALETTE, mark

SECOND_HALF_TITLE: Final = "Perplexity of raw second halves against reduction"
_SAVES: Final = {"prompt": "prefill and KV", "cache": "KV"}
_CLEAR: Final = 2.0  # standard errors of a difference that counts


def _label(point: Report, report: Report) -> str:
    """Return a method in words; UMIM with its checkpoint where there are several."""
    if point["method"] != "umim":
        return str(point["method"])
    several = f" {point['checkpoint']}" if len(report["subjects"]) > 1 else ""
    tail = f", {point['tail']} raw" if point["tail"] else ""
    return f"UMIM{several}{tail}"


def _measured(report: Report) -> Iterator[Report]:
    """Yield the points that were measured, target by target, best first."""
    points = [point for point in report["points"] if "ppl" in point]
    for point in sorted(points, key=lambda one: (one["target"], one["ppl"])):
        saves = _SAVES[point["side"]]
        yield point | {"label": _label(point, report), "saves": saves}


def _absent(report: Report) -> str:
    """Say what was not measured, and why."""
    words = {"unreached": "the rules reach", "not_run": "not run:"}
    found: dict[str, list[str]] = {}
    for point in report["points"]:
        for kind in words.keys() & point.keys():
            reason = f"{_label(point, report)} ({words[kind]} {point[kind]})"
            found.setdefault(reason, []).append(f"{point['target']:.0%}")
    parts = [f"{reason} at {', '.join(targets)}" for reason, targets in found.items()]
    return "Without a figure: " + "; ".join(parts) + "." if found else ""


def _losses(report: Report) -> str:
    """Say which methods are clearly better than UMIM, by target; each with the TR of its cache."""
    parts = []
    for target, points in groupby(_measured(report), key=lambda point: float(point["target"])):
        compared = [point for point in points if point.get("umim_ratio") is not None]
        better = [
            f"{point['label']} ({ratio['mean']:.3f}, TR {point['cache_reduction']:.1%})"
            for point in compared
            if (ratio := point["umim_ratio"])["std"] is not None
            and ratio["mean"] + _CLEAR * ratio["std"] < 1.0
        ]
        none = "none" if compared else "not compared, UMIM has no figure"
        parts.append(f"at {target:.0%}: {', '.join(better) or none}")
    return (
        f"Better than UMIM by more than {_CLEAR:g} standard errors of the paired difference (ratio "
        "to UMIM, TR of its cache): " + "; ".join(parts) + "."
    )


SECOND_HALF: Final = page(
    """\
# Baselines at matched token reduction: {backbone}

![Perplexity of raw second halves against reduction]({name}.svg)

{texts.test.rows} windows of {window} tokens of *{texts.test.name}* (ids {texts.test.digest:.12}),
{dtype}. The first half of a window is shortened, the second stays raw, and every token of it is a
target: what a method deletes is never one. UMIM and what follows its rules take those of least
damage that save the TR asked for of {texts.cut.rows} rows of *{texts.cut.name}*, to within one
rule. Token reducers and policies of the KV cache drop exactly as many tokens of each window as the
rules of {compared_with} save of it; beyond what all its rules save, the share that is asked for.
*TR* is realised; *missing*: what a method keeps beyond its budget.

*Saves*: methods of the prompt save prefill and KV cache; methods of the cache read the whole prompt
and save KV cache alone. *PPL ratio*: over the base model, which reads both halves raw (PPL
{base.ppl:.2f}); *to UMIM*: over {compared_with} at the same target; below 1 is better than it. Both
with standard errors, paired by window.

@ shown
TR asked     | {target:.0%}
< method     | {label}
< saves      | {saves}
TR of prompt | {token_reduction:.1%}
TR of cache  | {cache_reduction:.1%}
missing      | {shortfall:.1%}
PPL          | {ppl:.2f}
PPL ratio    | {ppl_ratio:.3f}
to UMIM      | {umim_ratio?-:.3f}

@ losses

@ absent

## Cost

Of one first half, the base model's: {base.prefill_flops!G:.1f} GFLOPs of prefill (estimated),
{base.kv_bytes!i:.2f} MiB of KV cache, {base.prefill_seconds!m:.0f} ms of prefill (median, one at a
time). Compressing: estimated operations and measured time of choosing tokens, or of matching and
merging; a policy of the cache chooses inside the prefill. Times are taken one method after the
other and not next to a prefill, so they hold where the machine did nothing else;
`benchmarks.reducers` times both in turn.

@ shown
TR asked        | {target:.0%}
< method        | {label}
< saves         | {saves}
prefill, GFLOPs | {prefill_flops!G:.1f}
KV, MiB         | {kv_bytes!i:.2f}
compressing, GFLOPs | {compress_flops?-!G:.2f}
compressing, ms | {compress_seconds?-!m:.1f}

## Checkpoints

@ subjects.*subject
checkpoint      | {subject}
rules           | {rules:,}
< residual      | {residual}
< positions     | {unit_positions}
< module digest | {module_digest:.12}
< rules digest  | {rules_digest:.12}

Measured, and this page written, by `python -m benchmarks.second_half`.
""",
    shown=_measured,
    losses=_losses,
    absent=_absent,
)


_WIDE, _NARROW = 3.2, 1.2  # among twenty lines one is looked for


def second_half_figure(report: Report) -> Figure:
    """Draw the perplexity ratio against reduction, a line per method; of the cache dashed."""
    lines: dict[str, list[Report]] = {}
    for point in _measured(report):
        shown = point | {"token_reduction": point["cache_reduction"]}
        lines.setdefault(point["label"], []).append(shown)
    curves = [
        Curve(
            label,
            points,
            *mark(place),
            dash="-" if points[0]["side"] == "prompt" else "--",
            width=_WIDE if label.startswith("UMIM") else _NARROW,
        )
        for place, (label, points) in enumerate(sorted(lines.items()))
    ]
    figure = Figure(figsize=(8.4, 5.0 + 0.22 * ((len(curves) + 1) // 2)))
    axes = figure.subplots()
    for curve in curves:
        draw_curve(axes, curve, "ppl_ratio")
    axes.axhline(1.0, color=PALETTE[-1], linewidth=0.8, linestyle=":")
    axes.set(
        xlabel="Reduction (%): of the prompt; dashed: of the KV cache alone",
        ylabel="Perplexity of the second half, times the base model's",
    )
    axes.set_xlim(left=0)
    add_legend(figure, curves)
    return figure
