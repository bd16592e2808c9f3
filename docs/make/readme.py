"""Generated parts of README.md and docs/results.md, and two pages of several result files."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Final

from docs.make.document import RESULTS, ROOT, Document, with_blocks
from docs.make.results import TEMPLATES, adaptation_summary
from tasks.report.comparison_table import comparison, summary
from tasks.report.render import Report, Table, page, table_markdown
from tasks.report.report_data import ReportData
from umim_core.checkpoint.checkpoint_files import resolve_checkpoint
from umim_core.model.compression import compress_text
from umim_core.store.artifacts import canonical_json, directory_digest, sha256_bytes

_HEADINGS: Final = ("", "base model", "UMIM", "truncation", "saving")
_SMALL: Final = "SmolLM2-135M"
_LARGE: Final = "Qwen2.5-Coder-0.5B"
_ANSWERS: Final = ((_LARGE, "answers-qwen-coder-0.5b"), (_SMALL, "answers-smollm2"))
_QUALITY: Final = (
    (_LARGE, "English", "merged_quality-qwen", "qwen"),
    (_LARGE, "Python", "merged_quality-qwen-python", "qwen"),
    (_SMALL, "English", "merged_quality-smollm2", "adapters"),
)
_SIDE: Final = "umim, raw tail 16"
_TABLED: Final = (ROOT / "README.md", ROOT / "docs" / "results.md")
_PICTURED: Final = "umim-smollm2-135m-adapters"
_TEXT: Final = (
    "The University of California was one of the first in the United States to offer a course on "
    "the history of science. In order to be able to take part, students had to read a number of "
    "books at the beginning of the year, and most of them did so as soon as possible."
)


def readme_table(folder: Path = RESULTS) -> str:
    """Return the table in Markdown: answers, functions, perplexity behind a prompt."""
    rows = [
        _answers(model, asked, _read(folder, name)["lists"][asked]["sides"])
        for model, name in _ANSWERS
        for asked in ("chats", "documents")
    ]
    rows.append(_functions(_LARGE, _read(folder, "problems-qwen")))
    rows += [
        _quality(f"{model}: perplexity after {text}", _read(folder, name)["subjects"][subject])
        for model, text, name, subject in _QUALITY
    ]
    return table_markdown(Table(_HEADINGS, tuple(rows))) + "\n"


def _answers(model: str, asked: str, sides: Report) -> tuple[str, ...]:
    """Return how many accepted answers of the base model each side keeps."""
    kept = [str(sides[side]["kept"]) for side in ("base", _SIDE, "truncation")]
    return f"{model}: answers kept, {asked}", *kept, _percent(sides[_SIDE]["saving"])


def _functions(model: str, report: Report) -> tuple[str, ...]:
    """Return how many functions of HumanEval each side solves."""
    functions = report["sets"]["humaneval"]
    solved = [str(functions["sides"][side]["solved"]) for side in ("base", "umim", "truncation")]
    heading = f"{model}: HumanEval, solved of {functions['problems']}"
    return heading, *solved, _percent(functions["saving"])


def _quality(heading: str, figures: Report) -> tuple[str, ...]:
    """Return the perplexity of raw text after a merged and after a truncated prompt."""
    umim, truncation = (
        _ratio(figures[name]) for name in ("prompt_ppl_ratio", "truncation_ppl_ratio")
    )
    return heading, "1", umim, truncation, _percent(figures["prompt_saving"])


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %"


def _ratio(error: dict[str, float]) -> str:
    return f"{error['mean']:.3f} ± {error['std']:.3f}"


def _read(folder: Path, name: str) -> Report:
    report: Report = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    return report


def documents() -> list[Document]:
    """Return README.md, the page of results, the picture, and pages of several result files."""
    # Its tokenizer may have to be fetched: whether it is current is known without.
    rules = directory_digest(resolve_checkpoint(_PICTURED) / "rules")
    digest = sha256_bytes(canonical_json([_PICTURED, _TEXT, rules]).encode())
    picture = Document(
        RESULTS / "compress.svg",
        lambda: compress_text(_TEXT, _PICTURED).views[0].svg("umim compress") + "\n",
        f"<!-- text and rules {digest} -->\n",
    )
    return [
        *(Document(path, partial(_with_table, path)) for path in _TABLED),
        picture,
        Document(RESULTS / "adaptation.md", adaptation_summary),
        Document(RESULTS / "embedded.md", _pipeline),
    ]


def _with_table(path: Path) -> str:
    """Return a document with README's table between its marks made anew."""
    return with_blocks(path.read_text(encoding="utf-8"), {"results:quality": readme_table()})


def _pipeline() -> str:
    """Return the page of the table that ``make demo`` prints."""
    data = ReportData.model_validate_json((RESULTS / "embedded.json").read_text(encoding="utf-8"))
    tables = {"printed": summary, "whole": comparison}
    shown = {name: table_markdown(make(data.rows, data.config)) for name, make in tables.items()}
    return page("embedded.md", {"host": data.host, **shown}, TEMPLATES) + "\n"
