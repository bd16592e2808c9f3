"""Pages and figures of result files, each made of its file alone.

A result file says what it is: ``"benchmark": NAME`` or, as flows write it, ``"kind": "ablation"``
or ``"kind": "adaptation"``. A figure ends with the digest of the results that it was drawn from.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from matplotlib.figure import Figure

from docs.make.benchmark_figures import capacity_figure, scaling_figure
from docs.make.document import RESULTS, Document
from docs.make.generation_pages import CAPACITY, ENGINE, ENGINE_ON_SMOLLM2
from docs.make.merging_pages import ANSWERS, MERGED_QUALITY
from docs.make.mining_pages import MATCHING, MINING, SCALING
from docs.make.prompt_pages import PROMPT_TITLE, has_prompts, prompt_figure
from docs.make.quality_pages import QUALITY, QUALITY_TITLE, quality_figure
from docs.make.reducer_pages import REDUCERS
from docs.make.reduction_pages import REDUCTION, TITLE, reduction_figure
from docs.make.second_half_pages import SECOND_HALF, SECOND_HALF_TITLE, second_half_figure
from docs.make.shipped_model import NAME, SHIPPED_MODEL
from docs.make.task_pages import PERPLEXITY, STOCK_TASKS
from docs.make.training_pages import (
    DDP,
    LADDER,
    PREFERENCE_STEP,
    STEP,
    STEP_ON_GPU,
    STEP_ON_SMOLLM2,
)
from docs.make.wikitext import WIKITEXT, wikitext_figure
from tasks.paper.adaptation_figure import adaptation_svg
from tasks.paper.adaptation_page import adaptation_page
from tasks.report.ablation_data import AblationData
from tasks.report.ablation_figures import figure_svg
from tasks.report.ablation_page import FIGURES, ablation_page
from tasks.report.page_template import Part, Report, filled_in
from tasks.report.report_drawing import ON_PAPER, STYLE, svg_file
from tasks.report.tables import Table, table_markdown
from umim_core.store.artifacts import sha256_bytes

PAGES: Final[dict[str, Part]] = {
    "mining": MINING,
    "matching": MATCHING,
    "mining_scaling": SCALING,
    "ddp_vs_zero2": DDP,
    "distill_step": STEP,
    "distill_smollm2": STEP_ON_SMOLLM2,
    "distill_gpu": STEP_ON_GPU,
    "preference_step": PREFERENCE_STEP,
    "ladder": LADDER,
    "engine": ENGINE,
    "engine_smollm2": ENGINE_ON_SMOLLM2,
    "perplexity": PERPLEXITY,
    "generation_quality": QUALITY,
    "cache_capacity": CAPACITY,
    "wikitext_rules": WIKITEXT,
    "stock_tasks": STOCK_TASKS,
    "token_reduction": REDUCTION,
    "second_half": SECOND_HALF,
    "reducers": REDUCERS,
    "answers": ANSWERS,
    "merged_quality": MERGED_QUALITY,
    NAME: SHIPPED_MODEL,
}


@dataclass(frozen=True)
class _Drawing:
    """A figure of a benchmark.

    Attributes:
        draw: Draws it from the results.
        file: Its file's stem; fields of the results are filled in.
        title: What it shows.
        style: Of matplotlib.
        wanted: Whether the results have it.
    """

    draw: Callable[[Report], Figure]
    file: str
    title: str
    style: Mapping[str, object]
    wanted: Callable[[Report], bool] = lambda report: True


_PAPER: Final = STYLE | ON_PAPER
_DRAWINGS: Final[dict[str, list[_Drawing]]] = {
    "mining_scaling": [
        _Drawing(
            scaling_figure,
            "mining-scaling",
            "Time and memory of mining against tokens",
            STYLE,
        )
    ],
    "cache_capacity": [
        _Drawing(
            capacity_figure,
            "cache_capacity",
            "Cache memory of a row, and rows that fit into the same memory",
            _PAPER,
        )
    ],
    "wikitext_rules": [
        _Drawing(
            wikitext_figure,
            "wikitext2-tr-against-rules",
            "Token reduction against number of rules",
            STYLE,
        )
    ],
    "second_half": [_Drawing(second_half_figure, "{name}", SECOND_HALF_TITLE, _PAPER)],
    "generation_quality": [_Drawing(quality_figure, "{name}", QUALITY_TITLE, _PAPER)],
    "token_reduction": [
        _Drawing(reduction_figure, "{name}", TITLE, _PAPER),
        _Drawing(prompt_figure, "{name}-prompt", PROMPT_TITLE, _PAPER, has_prompts),
    ],
}


def documents(folder: Path = RESULTS) -> list[Document]:
    """Return the pages and figures of all result files of a folder."""
    return [made for results in sorted(folder.glob("*.json")) for made in documents_of(results)]


def documents_of(results: Path) -> list[Document]:
    """Return the page and the figures of a result file; nothing for a file of another kind."""
    text = results.read_text(encoding="utf-8")
    found = json.loads(text)
    if not isinstance(found, dict):
        return []
    mark = f"<!-- results {sha256_bytes(text.encode())} -->\n"
    figures: dict[str, Callable[[], str]] = {}
    if found.get("kind") == "ablation":
        data = AblationData.model_validate(found)
        page = partial(ablation_page, data)
        figures = {f"{results.stem}-{name}": partial(figure_svg, data, name) for name in FIGURES}
    elif found.get("kind") == "adaptation":
        page = partial(adaptation_page, found, f"{results.stem}.svg")
        figures = {results.stem: partial(adaptation_svg, found)}
    elif (name := found.get("benchmark")) in PAGES:
        page = partial(benchmark_page, found)
        figures = {
            filled_in(drawing.file, found): partial(benchmark_figure, found, place)
            for place, drawing in enumerate(_DRAWINGS.get(name, ()))
            if drawing.wanted(found)
        }
    else:
        return []
    return [
        Document(results.with_suffix(".md"), page),
        *(Document(results.with_name(f"{s}.svg"), draw, mark) for s, draw in figures.items()),
    ]


def benchmark_figure(report: Report, place: int = 0) -> str:
    """Return a figure of a benchmark's results as an SVG file.

    Args:
        report: The results.
        place: Among the benchmark's figures.
    """
    drawing = _DRAWINGS[report["benchmark"]][place]
    draw = partial(drawing.draw, report)
    return svg_file(draw, filled_in(drawing.file, report), drawing.title, drawing.style)


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
    cores = f", {found['cores']} cores" if "cores" in found else ""
    return f"Machine: {found['platform']}{cores}. {libraries}.{commit}"
