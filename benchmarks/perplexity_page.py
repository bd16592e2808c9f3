"""The page of ``benchmarks/perplexity.py``."""

from __future__ import annotations

from benchmarks.common import Report
from benchmarks.tables import gate_table, machine, spread, table


def perplexity_page(report: Report) -> str:
    """Return the page of ``benchmarks/perplexity.py``."""
    rows = [
        [
            f"{backbone}: {name}",
            f"{side['rules']:,}",
            f"{side['token_reduction']:.1%}",
            spread(measured["base model"]["seconds"], " s", 3),
            spread(side["seconds"], " s", 3),
            spread(side["times_base"]),
            spread(side["listing_seconds"], " s", 3),
            spread(side["listing_times"], "", 1),
            f"{side['difference']:.1e}",
        ]
        for backbone, measured in report["backbones"].items()
        for name, side in measured.items()
        if "rules" in side
    ]
    head = ["backbone: rules", "rules", "TR", "base", "ours", "times base"]
    head += ["listing of one row", "times ours", "difference"]
    parts = [
        "# Perplexity: one forward against the base model and the listing",
        f"{report['rows']} rows of {report['length']} tokens on {report['device']}, float32. "
        "*plain*: no rule lies inside another; *nested*: all frequent spans. The listing runs a "
        "forward over the units and one more for every token hidden in a span, for the first row. "
        "Ratios are medians over alternating pairs, with quartiles; *difference*: largest of a "
        "token's log-probability between both, in nats.",
        table(head, rows),
    ]
    return "\n\n".join([*parts, gate_table(report), machine(report)]) + "\n"
