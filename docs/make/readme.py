"""Generated parts of README.md and docs/results.md, and two pages of several result files."""

from __future__ import annotations

import io
import re
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, Final, cast

from rich.console import Console
from rich.terminal_theme import TerminalTheme

from docs.make.document import RESULTS, ROOT, Document
from docs.make.results import TEMPLATES, adaptation_summary
from tasks.report.comparison import comparison, summary
from tasks.report.render import Report, environment, page, table_markdown
from tasks.report.report import ReportData
from umim_core.checkpoint.checkpoint_files import named_config, resolve_checkpoint
from umim_core.config.recipe_files import read_recipe_file
from umim_core.model.compression import compress_text
from umim_core.store.artifacts import directory_digest, json_digest, read_json

_PRINTED: Final = ROOT / "infra" / "paper_tables"
_UMIM: Final = "Merge Module"  # as the paper calls it
_TABLED: Final = (ROOT / "README.md", ROOT / "docs" / "results.md")
_PICTURED: Final = "umim-smollm2-135m-adapters"
_TEXT: Final = (
    "The University of California was one of the first in the United States to offer a course on "
    "the history of science. In order to be able to take part, students had to read a number of "
    "books at the beginning of the year, and most of them did so as soon as possible."
)
_GREY: Final = (152, 152, 152)
# Of the picture: colours of the HTML view where a style has one, light under black.
_TERMINAL: Final = TerminalTheme(
    background=(41, 41, 41),
    foreground=(197, 200, 198),
    normal=[(0, 0, 0), _GREY, _GREY, (205, 174, 85), _GREY, _GREY, (95, 184, 198), _GREY],
    bright=[_GREY, _GREY, _GREY, (255, 226, 138), _GREY, _GREY, (155, 231, 242), _GREY],
)
_REMOTE_FONT: Final = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def _read(name: str) -> Any:
    return read_json(RESULTS / f"{name}.json")


def _tools(size: str) -> str:
    return f"umim-qwen-coder-{size}-tools"


def _calls(size: str) -> dict[str, Report]:
    return {side["side"]: side for side in _read(f"calls-{_tools(size)}")["sides"]}


def _above_merging(size: str) -> float:
    config = named_config(_tools(size))
    layers = cast(int, config.backbone_model.config["num_hidden_layers"])
    return (layers - config.merge_depth) / layers


def _english(name: str, subject: str) -> Report:
    """Return what merging costs a model in perplexity of the merged text itself."""
    report = _read(f"merged_quality-{name}")
    merged, base = report["subjects"][subject], report["ppl_base"]
    ratio = merged["ppl_ratio"]
    figures = {"base": base, "umim": base * ratio["mean"], "ratio": ratio}
    return figures | {"saved": merged["token_reduction"]}


def _printed(table: str, model: str) -> dict[str, list[float]]:
    printed: Any = read_recipe_file(_PRINTED / f"{table}.yaml")
    return {row[1]: row[2:] for row in printed["rows"] if row[0] == model}


def _accuracies(model: str) -> Report:
    """Return the paper's mean accuracies of a model, UMIM's next to the best other method's."""
    printed = _printed("05-multiple-choice", model)
    points = {method: mean(row[:10:2]) for method, row in printed.items()}
    base, umim = points.pop("Original"), points.pop(_UMIM)
    best = max(points, key=points.__getitem__)
    return {
        "base": f"{base:.1f}",
        "umim": f"{umim:.1f}",
        "other": f"{points[best]:.1f} {best}",
        "saving": mean(printed[_UMIM][1:10:2]) / 100,
    }


def _perplexities(model: str) -> Report:
    """Return the perplexities of WikiText-103 that the paper prints for a model."""
    printed = _printed("02-perplexity", model)
    (base, *_), (umim, saved, *_) = printed["Original"], printed[_UMIM]
    row = {"model": f"{model}, by the paper", "measured": "perplexity, WikiText-103"}
    return row | {"base": base, "umim": umim, "saved": saved / 100}


def _with_blocks(path: Path) -> str:
    """Return a document whose tables and sentences, each between its marks, are made anew."""
    blocks = (
        environment(TEMPLATES)
        .get_template("readme.md")
        .render(
            read=_read,
            calls=_calls,
            above_merging=_above_merging,
            english=_english,
            accuracies=_accuracies("Llama-3.1-8B"),
            perplexities=[*map(_perplexities, ("GPT2-XL", "Llama-3.2-1B", "Llama-3-8B"))],
        )
    )
    text = path.read_text(encoding="utf-8")
    for block in re.findall(r"<!-- results:\w+ -->\n.*?<!-- /results:\w+ -->", blocks, re.DOTALL):
        first, last = block.splitlines()[0], block.splitlines()[-1]
        between = re.compile(f"{first}\n.*?{last}", re.DOTALL)
        text = block.join(between.split(text))
    return text


def documents() -> list[Document]:
    """Return README.md, the page of results, the picture, and pages of several result files."""
    # Its tokenizer may have to be fetched: whether it is current is known without.
    rules = directory_digest(resolve_checkpoint(_PICTURED) / "rules")
    digest = json_digest([_PICTURED, _TEXT, rules])
    picture = Document(RESULTS / "compress.svg", _picture, f"<!-- text and rules {digest} -->\n")
    return [
        *(Document(path, partial(_with_blocks, path)) for path in _TABLED),
        picture,
        Document(RESULTS / "adaptation.md", adaptation_summary),
        Document(RESULTS / "embedded.md", _pipeline),
    ]


def _picture() -> str:
    """Return a picture of a terminal that shows a compressed text; it fetches no font."""
    console = Console(
        record=True, width=88, file=io.StringIO(), force_terminal=True, color_system="256"
    )
    (view,) = compress_text(_TEXT, _PICTURED).views
    view.show(console)
    picture = console.export_svg(title="umim compress", unique_id=view.name, theme=_TERMINAL)
    return _REMOTE_FONT.sub("", picture) + "\n"


def _pipeline() -> str:
    """Return the page of the table that ``make demo`` prints."""
    data = ReportData.model_validate_json((RESULTS / "embedded.json").read_text(encoding="utf-8"))
    tables = {"printed": summary, "whole": comparison}
    shown = {name: table_markdown(make(data.rows, data.config)) for name, make in tables.items()}
    values = {"host": data.host, "recipe": data.config, **shown}
    return page("embedded.md", values, TEMPLATES) + "\n"
