"""Generated parts of README.md and docs/results.md, and two pages of several result files."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Final

from docs.make.document import RESULTS, ROOT, Document
from docs.make.results import TEMPLATES, adaptation_summary, read_results
from tasks.report.comparison import comparison, summary
from tasks.report.render import DASH, Report, Table, page, table_markdown
from tasks.report.report import ReportData
from umim_core.checkpoint.checkpoint_files import read_config, resolve_checkpoint
from umim_core.config.recipe_files import read_recipe_file
from umim_core.model.compression import compress_text
from umim_core.store.artifacts import canonical_json, directory_digest, sha256_bytes

_HEADINGS: Final = ("", "base model", "UMIM", "truncation", "best other", "saving")
_SMALL: Final = "SmolLM2-135M"
_LARGE: Final = "Qwen2.5-Coder-0.5B"
_CALLS: Final = {  # with the result file's checkpoint
    _LARGE: "umim-qwen-coder-0.5b-tools",
    "Qwen2.5-Coder-1.5B, quotes behind names merged": "umim-qwen-coder-1.5b-tools",
}
_MERGED: Final = (  # after layer 4, with the result file and its subject
    (_SMALL, "smollm2", "inside"),
    (_LARGE, "qwen", "qwen"),
)
_SIDE: Final = "umim, raw tail 16"
_PAPER: Final = ROOT / "infra" / "paper_tables" / "05-multiple-choice.yaml"
_PERPLEXITY: Final = _PAPER.with_name("02-perplexity.yaml")
_SIZES: Final = ("model", "measured", "base model", "UMIM", "ratio", "tokens saved")
_AUTHORS: Final = "Llama-3.1-8B"
_TABLED: Final = (ROOT / "README.md", ROOT / "docs" / "results.md")
_PICTURED: Final = "umim-smollm2-135m-adapters"
_TEXT: Final = (
    "The University of California was one of the first in the United States to offer a course on "
    "the history of science. In order to be able to take part, students had to read a number of "
    "books at the beginning of the year, and most of them did so as soon as possible."
)


def readme_table() -> str:
    """Return the table: answers, calls, functions, perplexity, a row of the paper's authors."""
    large = _read("answers-qwen-coder-0.5b")
    rows = (
        _answers(_LARGE, "chats", large),
        _answers(_LARGE, "documents", large),
        _calls(_LARGE),
        _functions(_read("problems-qwen-all")["sets"]["humaneval"]),
        _second_halves(_read("second_half-smollm2")["points"]),
        _of_the_authors(),
    )
    return table_markdown(Table(_HEADINGS, rows, left=(0, 4))) + "\n"


def _answers(model: str, asked: str, report: Report) -> tuple[str, ...]:
    """Return how many accepted answers of the base model each side keeps."""
    sides = report["lists"][asked]["sides"]
    kept = [str(sides[side]["kept"]) for side in ("base", _SIDE, "truncation")]
    return f"{model}: answers kept, {asked}", *kept, DASH, _percent(sides[_SIDE]["saving"])


def _functions(functions: Report) -> tuple[str, ...]:
    """Return how many functions of HumanEval each side solves."""
    solved = [str(functions["sides"][side]["solved"]) for side in ("base", "umim", "truncation")]
    heading = f"{_LARGE}: HumanEval, all spans, of {functions['problems']}"
    return heading, *solved, DASH, _percent(functions["saving"])


def _calls(model: str) -> tuple[str, ...]:
    """Return how many of the base model's right function calls each side keeps."""
    sides, white = _sides_of_calls(model), _calls_without_white_space()
    umim = sides["umim"]
    config = read_config(resolve_checkpoint(_CALLS[model]))
    layers = int(config.backbone_model.config["num_hidden_layers"])
    return (
        f"{model}: calls kept, schemas {_percent(umim['tools_saved'])} shorter",
        str(umim["kept"][1]),
        f"{umim['kept'][0]} ({_percent(umim['kept'][0] / umim['kept'][1])})",
        DASH,
        f"{_kept(white)} no white space, {_percent(white['saved'])} saved",
        _percent(umim["saved"] * (layers - config.merge_depth) / layers),
    )


def _calls_without_white_space() -> Report:
    """Return the base model's side with other schemas, which no rule of merging changes."""
    sides = _read(f"calls-{_CALLS[_LARGE]}-quotes-merged")["sides"]
    return next(side for side in sides if side["side"] == "no white space")


def _sides_of_calls(model: str) -> dict[str, Report]:
    sides = _read(f"calls-{_CALLS[model]}")["sides"]
    return {side["side"]: side for side in sides}


def _kept(side: Report) -> str:
    return "{} of {}".format(*side["kept"])


def _second_halves(points: Sequence[Report]) -> tuple[str, ...]:
    """Return the perplexity of raw text after prompts that methods of the prompt shortened."""
    of = {
        point["method"]: point
        for point in points
        if (point["target"], point["tail"], point.get("side")) == (0.2, 0, "prompt")
    }
    umim, truncation = of.pop("umim"), of.pop("truncation")
    best = min(of.values(), key=lambda point: point["ppl_ratio"]["mean"])
    ratios = [_ratio(point["ppl_ratio"]) for point in (umim, truncation, best)]
    ratios[-1] += f" {best['method'].upper()}"
    heading = f"{_SMALL}, the paper's form: perplexity after English"
    return heading, "1", *ratios, _percent(umim["token_reduction"])


def _of_the_authors() -> tuple[str, ...]:
    """Return the mean accuracies that the paper prints for its authors' largest model."""
    rows = [row for row in read_recipe_file(_PAPER)["rows"] if row[0] == _AUTHORS]
    points = {row[1]: mean(row[2:12:2]) for row in rows}
    saving = mean(next(row for row in rows if row[1] == "Merge Module")[3:12:2])
    base, umim = points.pop("Original"), points.pop("Merge Module")
    best = max(points, key=points.__getitem__)
    heading = f"{_AUTHORS}, reported by the paper, not reproduced: accuracy"
    return (
        heading,
        f"{base:.1f}",
        f"{umim:.1f}",
        DASH,
        f"{points[best]:.1f} {best}",
        f"{saving:.0f} %",
    )


def size_table() -> str:
    """Return what merging costs models of growing size; rows of the paper are marked as such."""
    rows = [
        *(_merged_english(*model) for model in _MERGED),
        *map(_calls_of_size, _CALLS),
        *(_reported(model) for model in ("GPT2-XL", "Llama-3.2-1B", "Llama-3-8B")),
    ]
    return table_markdown(Table(_SIZES, rows, left=(0, 1))) + "\n"


def _merged_english(model: str, name: str, subject: str) -> tuple[str, ...]:
    report = _read(f"merged_quality-{name}")
    merged, base = report["subjects"][subject], report["ppl_base"]
    ratio = merged["ppl_ratio"]
    figures = f"{base:.1f}", f"{base * ratio['mean']:.1f}", _ratio(ratio)
    return model, "perplexity, general English", *figures, _percent(merged["token_reduction"])


def _calls_of_size(model: str) -> tuple[str, ...]:
    umim = _sides_of_calls(model)["umim"]
    kept, base = umim["kept"]
    return model, "right calls", str(base), str(kept), f"{kept / base:.2f}", _percent(umim["saved"])


def _reported(model: str) -> tuple[str, ...]:
    """Return the perplexities that the paper prints for WikiText-103."""
    table = {row[1]: row for row in read_recipe_file(_PERPLEXITY)["rows"] if row[0] == model}
    base, (umim, saved) = table["Original"][2], table["Merge Module"][2:4]
    figures = f"{base:.1f}", f"{umim:.1f}", f"{umim / base:.2f}", f"{saved:.0f} %"
    return f"{model}, by the paper", "perplexity, WikiText-103", *figures


def readme_words() -> str:
    """Return the sentences whose figures are those of result files: answers, calls, time."""
    large, small = (_read(f"answers-{name}")["lists"] for name in ("qwen-coder-0.5b", "smollm2"))
    chats, pages = (large[asked]["sides"][_SIDE] for asked in ("chats", "documents"))
    base, white = _sides_of_calls(_LARGE)["base"], _calls_without_white_space()
    umim, truncation = (
        _percent(1 - small["chats"]["sides"][side]["kept"] / small["chats"]["accepted"])
        for side in (_SIDE, "truncation")
    )
    engines = _read("engines")
    llama, vllm = (engines["gates"][f"{name}, CPU"][0] for name in ("llama.cpp's server", "vLLM"))
    answers = (
        f"{_percent(chats['same'])} (chats) and {_percent(pages['same'])} (documents) of "
        f"{_LARGE}'s answers stay word for word. **{_SMALL}** loses {umim} of its answers to "
        f"chats, truncation {truncation}: it shows the method, no more."
    )
    results = _read("second_source-qwen")["kinds"]["results"]
    calls = (
        f"**Calls**: the base model is right on {base['right']} of {base['questions']} questions "
        f"on functions that no training saw. Other methods were asked {white['questions']}. Try "
        f"JSON without white space first: it works in any engine. On tool results "
        f"{results['kept']} of {results['base']} answers were kept "
        "([orders](docs/results/second_source-qwen.md))."
    )
    time = (
        f"**Time** of one CPU thread to the first token, {_SMALL} in the paper's form, "
        f"{_percent(engines['token_reduction'])} of the tokens saved: vLLM is {vllm:.2f} and "
        f"llama.cpp's server {llama:.2f} times as fast ([engines](docs/results/engines.md))."
    )
    return (
        "\n\n".join(
            textwrap.fill(text, 100, break_on_hyphens=False) for text in (answers, calls, time)
        )
        + "\n"
    )


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %"


def _ratio(error: dict[str, float]) -> str:
    return f"{error['mean']:.3f} ± {error['std']:.3f}"


def _read(name: str) -> Report:
    return read_results(RESULTS / f"{name}.json")


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
    """Return a document with README's table and sentences between their marks made anew."""
    blocks = {"quality": readme_table(), "words": readme_words(), "size": size_table()}
    text = path.read_text(encoding="utf-8")
    for name, block in blocks.items():
        between = re.compile(
            rf"(<!-- results:{name} -->\n).*?(<!-- /results:{name} -->)", re.DOTALL
        )
        text = between.sub(lambda match, block=block: match[1] + block + match[2], text)
    return text


def _pipeline() -> str:
    """Return the page of the table that ``make demo`` prints."""
    data = ReportData.model_validate_json((RESULTS / "embedded.json").read_text(encoding="utf-8"))
    tables = {"printed": summary, "whole": comparison}
    shown = {name: table_markdown(make(data.rows, data.config)) for name, make in tables.items()}
    values = {"host": data.host, "recipe": data.config, **shown}
    return page("embedded.md", values, TEMPLATES) + "\n"
