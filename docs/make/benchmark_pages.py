"""The page of every benchmark: declared text and columns, then its gates and its machine."""

from __future__ import annotations

from typing import Final

from docs.make.generation_pages import CAPACITY, ENGINE, PERPLEXITY, QUALITY
from docs.make.mining_pages import MATCHING, MINING, SCALING
from docs.make.training_pages import DDP, STEP, STEP_ON_GPU
from docs.make.wikitext import WIKITEXT
from tasks.report.page_template import Part, Report
from tasks.report.tables import Table, table_markdown

PAGES: Final[dict[str, Part]] = {
    "mining": MINING,
    "matching": MATCHING,
    "mining_scaling": SCALING,
    "ddp_vs_zero2": DDP,
    "distill_step": STEP,
    "distill_gpu": STEP_ON_GPU,
    "engine": ENGINE,
    "perplexity": PERPLEXITY,
    "generation_quality": QUALITY,
    "cache_capacity": CAPACITY,
    "wikitext_rules": WIKITEXT,
}


def benchmark_page(report: Report) -> str:
    """Return the page of a benchmark's results, its gates and its machine at the end.

    Raises:
        KeyError: If there is no page for the benchmark, or the results lack a field.
    """
    parts = (PAGES[report["benchmark"]], _gates, _machine)
    return "\n\n".join(filter(None, (part(report) for part in parts))) + "\n"


def _gates(report: Report) -> str:
    """Return the gates and whether all results were equal."""
    if "gates" not in report:
        return ""
    rows = tuple(
        (name.replace("_", " "), f"{value:,}", f"{limit:,}", "met" if passed else "missed")
        for name, (value, limit, passed) in report["gates"].items()
    )
    table = table_markdown(Table("", ("gate", "value", "limit", ""), rows, ""))
    return f"{table}\n\nEqual results: {'yes' if report['equal'] else 'NO'}."


def _machine(report: Report) -> str:
    """Return where and with what was measured."""
    found = report["facts"]
    libraries = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    commit = f" Commit {found['commit'][:12]}." if found["commit"] else ""
    return f"Machine: {found['platform']}, {found['cores']} cores. {libraries}.{commit}"
