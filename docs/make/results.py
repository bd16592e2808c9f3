"""Pages and figures of result files, each made of its file alone, and of all files together.

A result file says what it is: ``"benchmark": NAME`` or, as flows write it, ``"kind": "ablation"``
or ``"kind": "adaptation"``. A benchmark without a template is run no more: its page is no longer
made. A figure ends with the digest of the results that it was drawn from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

from docs.make.document import RESULTS, ROOT, Document
from tasks.report.ablation import FIGURES, ablation_page, figure_svg
from tasks.report.adaptation import adaptation_page, adaptation_rows, adaptation_svg
from tasks.report.charts import Line, Panel, chart, svg_file
from tasks.report.render import Report, environment, page
from umim_core.adaptation.settings import ADAPTED, WT
from umim_core.config.form import ModuleForm
from umim_core.store.artifacts import read_json, sha256_file
from umim_core.throughput.break_even import ThroughputRow, break_even

PART_LABELS: Final = {
    "": "all parts together",
    "_part_general": "general English",
    "_part_wikitext2": "WikiText-2",
    "_part_docstrings": "docstrings",
}
_SHOWN_KINDS: Final = ("tool schemas", "tool results", "code", "prose")  # of README's figure
_SETTINGS: Final = (WT, "WT + Rules", ADAPTED, "input-adapter", "lora")
TEMPLATES: Final = Path(__file__).parent / "templates"


def _engine(report: Report) -> Report:
    """Add from which length on merging pays, by backbone."""
    measured = {
        name: [ThroughputRow(**row) for row in figures["rows"]]
        for name, figures in report["backbones"].items()
    }
    return {"pays": {name: break_even(rows) for name, rows in measured.items()}}


def shipped_parts(report: Report) -> Report:
    """Add the parts of a shipped model's corpus by name, and its form."""
    form = report["module"]["form"]
    parts = []
    for name, part in report["corpus"].items():
        digests = [
            pair
            for split, files in part["files"].items()
            for pair in (files.items() if isinstance(files, Mapping) else [("", files)])
        ]
        parts.append(part | {"part": part_label(f"_part_{name}"), "digests": digests})
    return {
        "parts": parts,
        "deviations": ModuleForm.model_validate(form | {"module_positions": "none"}).deviations(),
    }


def part_label(suffix: str) -> str:
    """Return the name of a test text for people, from the suffix of its numbers."""
    return PART_LABELS.get(suffix, suffix.removeprefix("_part_"))


ROWS: Final[dict[str, Callable[[Report], Report]]] = {
    "engine": _engine,
    "shipped_model": shipped_parts,
}


def documents(folder: Path = RESULTS) -> list[Document]:
    return [one for results in sorted(folder.glob("*.json")) for one in documents_of(results)]


def documents_of(results: Path) -> list[Document]:
    """Return the page and the figures of a result file; nothing for a file of another kind."""
    report: Any = read_json(results)
    mark = f"<!-- results {sha256_file(results)} -->\n"
    figures: dict[str, Callable[[], str]] = {}
    further: list[Document] = []
    if report.get("kind") == "ablation":
        write_page = partial(ablation_page, report)
        figures = {f"{results.stem}-{name}": partial(figure_svg, report, name) for name in FIGURES}
    elif report.get("kind") == "adaptation":
        write_page = partial(adaptation_page, report, f"{results.stem}.svg")
        figures = {results.stem: partial(adaptation_svg, report)}
    elif (TEMPLATES / f"{report.get('benchmark')}.md").is_file():
        write_page = partial(benchmark_page, report)
        if report["benchmark"] == "positions":
            drawing = environment(TEMPLATES).get_template("positions.svg")
            figures = {results.stem: partial(drawing.render, report, shown=_SHOWN_KINDS)}
        elif report["benchmark"] == "calls":
            figures = {results.stem: partial(_calls_svg, report)}
        elif report["benchmark"] == "shipped_model":
            card = ROOT / "umim_core" / "embedded" / "assets" / report["checkpoint"] / "README.md"
            further = [Document(card, partial(_card, report))]
    else:
        return []
    return [
        Document(results.with_suffix(".md"), write_page),
        *(Document(results.with_name(f"{s}.svg"), draw, mark) for s, draw in figures.items()),
        *further,
    ]


def _card(report: Report) -> str:
    return page("shipped_card.md", report | shipped_parts(report), TEMPLATES) + "\n"


def _calls_svg(report: Report) -> str:
    """Return calls kept and nats of right calls over what is saved of the schemas."""
    sides = sorted(report["sides"], key=itemgetter("tools_saved"))
    base = next(side for side in sides if side["side"] == "base")
    fewest = min(side["questions"] for side in sides)  # those that all sides were asked
    kinds = {"UMIM": [base]}
    for side in sides:
        kind = "UMIM" if side["side"].startswith("umim") else side["side"]
        if side["questions"] == fewest and side is not base:
            kinds.setdefault(kind, []).append(side)

    def panel(label: str, height: Callable[[Report], float], level: float) -> Panel:
        lines = [
            Line(kind, [(100 * side["tools_saved"], height(side)) for side in shown], index)
            for index, (kind, shown) in enumerate(kinds.items())
        ]
        axes = {"xlabel": "Saved of the schemas' tokens (%)", "ylabel": label}
        return Panel(lines, axes=axes, levels=[level])

    nats = "Nats of right calls (1: the base's)"
    panels = [
        panel("Calls kept (% of the base's)", lambda x: 100 * x["kept"][0] / x["kept"][1], 98),
        panel(nats, lambda x: x["nats"] / x["base_nats"], 1.05),
    ]
    figure = chart(panels)
    return svg_file(figure, f"calls-{report['checkpoint']}", "Calls and what is saved of schemas")


def benchmark_page(report: Report) -> str:
    name = report["benchmark"]
    rows = ROWS[name](report) if name in ROWS else {}
    runs = (ROOT / "benchmarks" / f"{name}.py").exists()
    command = {"command": f"python -m benchmarks.{name}" if runs else None}
    parts = (
        page(f"{name}.md", report | rows, TEMPLATES),
        page("benchmark_end.md", report | command, TEMPLATES),
    )
    return "\n\n".join(parts) + "\n"


def adaptation_summary() -> str:
    """Return the page with a row of every result file of an adaptation, at its lowest threshold."""
    files, shown = [], []
    for file in sorted(RESULTS.glob("adaptation-*.json")):
        report: Any = read_json(file)
        files.append({"name": report["name"], "stem": file.stem})
        for place in report["backbones"]:
            rows = adaptation_rows(place)
            lowest = min((row["tau"] for row in rows if row["tau"] is not None), default=None)
            own = {row["setting"]: row for row in rows if row["tau"] in (None, lowest)}
            shown.append({**report, **place, "rows": {x: own[x] for x in _SETTINGS if x in own}})
    values = {"files": files, "shown": shown}
    return page("adaptation_summary.md", values, TEMPLATES) + "\n"


def missed_gates() -> str:
    """Return a line for every result file that misses a gate."""
    missed = []
    for file in sorted(RESULTS.glob("*.json")):
        report: Any = read_json(file)
        gates = report.get("gates", {})
        own = {name: gate[:2] for name, gate in gates.items() if not gate[2]}
        if own:
            name = max(own, key=lambda name: _times_off(*own[name]))
            value, limit = own[name]
            counts = {"stem": file.stem, "missed": len(own), "gates": len(gates)}
            missed.append(counts | {"name": name, "value": value, "limit": limit})
    return page("missed_gates.md", {"missed": missed}, TEMPLATES) + "\n"


def _times_off(value: float, limit: float) -> float:
    """Return how many times a value is above or below its limit."""
    low, high = sorted((value, limit))
    return high / low if low > 0 else float("inf")
