"""README's table: UMIM next to truncation and the best other method, from committed results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from docs.make.document import RESULTS
from tasks.report.render import Report
from tasks.report.tables import DASH, Table, table_markdown
from umim_core.baselines.methods import side_of

_SPELLING: Final = {
    "ehpc": "EHPC",
    "h2o": "H2O",
    "llmlingua": "LLMLingua",
    "llmlingua2": "LLMLingua-2",
    "streaming-llm": "StreamingLLM",
}
_HEADINGS: Final = ("", "base model", "UMIM", "truncation", "best other method", "saving")
_SMALL: Final = "SmolLM2-135M"
_LARGE: Final = "Qwen2.5-Coder-0.5B"
# Model, result file, lists of questions whose answers are counted.
_ANSWERS: Final = (
    (_SMALL, "answers-smollm2", ("chats",)),
    (_SMALL, "answers-smollm2", ("documents",)),
    (_LARGE, "answers-qwen-coder-0.5b", ("chats",)),
    (_LARGE, "answers-qwen-coder-0.5b", ("documents",)),
)
_SIDE: Final = "umim, raw tail 16"


def readme_table(folder: Path = RESULTS) -> str:
    """Return the table in Markdown, six rows of six cells."""
    rows = [_answers(model, _read(folder, name), lists) for model, name, lists in _ANSWERS]
    rows.append(_functions(_LARGE, _read(folder, "problems-qwen")))
    rows.append(_quality(_SMALL, _read(folder, "merged_quality-smollm2")["subjects"]["adapters"]))
    return table_markdown(Table("", _HEADINGS, tuple(rows), "")) + "\n"


def _answers(model: str, report: Report, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return how many accepted answers of the base model each side keeps."""
    lists = [report["lists"][name] for name in names]
    answers = {
        side: sum(questions["sides"][side]["kept"] for questions in lists)
        for side in lists[0]["sides"]
    }
    merged = {name for name in answers if name.startswith("umim")}
    others = {name: answers[name] for name in answers.keys() - merged - {"base", "truncation"}}
    best = max(  # of equal ones one that shortens the prompt, too
        sorted(others), key=lambda name: (others[name], side_of(name) != "cache"), default=None
    )
    savings = sorted(questions["sides"][_SIDE]["saving"] for questions in lists)
    return (
        f"{model}: answers kept, {' and '.join(names)}",
        str(answers["base"]),
        str(answers[_SIDE]),
        str(answers["truncation"]),
        DASH if best is None else f"{_shown(best)} {others[best]}{_place(side_of(best))}",
        "-".join(f"{share * 100:.0f}" for share in savings) + " %",
    )


def _shown(method: str) -> str:
    """Return a baseline's name as its authors write it."""
    return _SPELLING.get(method, method)


def _place(side: str) -> str:
    return " (cache alone)" if side == "cache" else ""


def _functions(model: str, report: Report) -> tuple[str, ...]:
    """Return how many functions of HumanEval each side solves."""
    functions = report["sets"]["humaneval"]
    solved = [str(functions["sides"][side]["solved"]) for side in ("base", "umim", "truncation")]
    saving = f"{functions['saving'] * 100:.0f} %"
    return f"{model}: HumanEval, solved of {functions['problems']}", *solved, DASH, saving


def _quality(model: str, figures: Report) -> tuple[str, ...]:
    """Return the perplexity of raw text behind a merged and behind a truncated prompt."""
    umim, truncation = (
        _ratio(figures[name]) for name in ("prompt_ppl_ratio", "truncation_ppl_ratio")
    )
    saving = f"{figures['prompt_saving'] * 100:.0f} %"
    return f"{model}: perplexity behind the prompt", "1", umim, truncation, DASH, saving


def _ratio(error: dict[str, float]) -> str:
    return f"{error['mean']:.3f} ± {error['std']:.3f}"


def _read(folder: Path, name: str) -> Report:
    report: Report = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    return report
