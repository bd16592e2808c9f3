"""Results on README.md's first screen: quality, tasks and speed of the default checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Final

from docs.make.document import RESULTS
from docs.make.shipped_model import LABELS
from tasks.report.page_template import Report, page, walk
from umim_core.checkpoint.default_checkpoint import DEFAULT_CHECKPOINT
from umim_core.errors import ConfigError

_QUALITY: Final = "smollm2"
_TASKS: Final = "stock_tasks"
_SPEED: Final = "engine-smollm2"
_NEEDLES: Final = "table-long-context-smollm2"
_NEEDLE_SETTINGS: Final = {
    "original": "original",
    "merge_prompt": "merge=prompt",
    "protected": "merge=prompt, digits and 16 raw",
}
_CASE: Final = "float32, 1 x 1024"

_TABLE: Final = page(
    """\
@ texts
< held-out text | {text}
TR              | {token_reduction:.1%}
Top-1           | {top1:.3f}
PPL base        | {ppl_base:.2f}
PPL UMIM        | {ppl_umim:.2f}

Six tasks of lm-eval (ARC, PIQA, OpenBookQA, HellaSwag, COPA): mean accuracy is
{base.acc!p:.1f} % for the base model and {merged.acc!p:.1f} % with merged contexts{but}
(TR of contexts {merged.context_token_reduction:.1%}), a paired difference of
{merged.acc_difference!p:.1f} points. Prefill of 1,024 tokens in float32 on two cores:
{prefill.speedup:.2f} times faster at a TR of {prefill.token_reduction:.1%}.

Numbers in long prompts: of four hidden among {shortest:,} to {longest:,} tokens
(RULER, {needles} questions), the base model finds {original.recall:.0%}, with all rules
{merge_prompt.recall:.0%} (prompt TR {merge_prompt.reduction:.0%}), with
`protect="digits", raw_tail=16` {protected.recall:.0%} (prompt TR {protected.reduction:.0%}).
""",
    texts=lambda report: (
        row | {"text": row["name"]}
        for row in walk(report, "texts.*name")
        if row["name"] != LABELS[""]
    ),
)


def first_screen(folder: Path = RESULTS) -> str:
    """Return the table and the sentences, made of the four result files.

    Args:
        folder: That of the result files.

    Raises:
        ConfigError: If the tasks were not measured with the default checkpoint on merged contexts,
            or the long prompts not under one of the settings that are shown.
    """
    tasks, speed = _read(folder, _TASKS), _read(folder, _SPEED)
    return _TABLE(
        {
            "texts": _read(folder, _QUALITY)["texts"],
            **_merged(tasks),
            **_needles(_read(folder, _NEEDLES)),
            "prefill": speed["cases"][_CASE]["phases"]["prefill"],
        }
    )


def _merged(tasks: Report) -> Report:
    """Return the means of the base and of the checkpoint's first setting that merges contexts."""
    wanted = {"checkpoint": DEFAULT_CHECKPOINT, "merge": "prompt"}
    label = next((x for x, y in tasks["settings"].items() if y | wanted == y), None)
    if label is None:
        raise ConfigError(
            f"{_TASKS}.json must have a setting with {wanted}",
            list(tasks["settings"]),
            f"Measure {DEFAULT_CHECKPOINT} under its own name.",
        )
    setting = tasks["settings"][label]
    but = f", but for their last {setting['raw_tail']} tokens" if setting["raw_tail"] else ""
    return {"base": tasks["mean"][tasks["base"]], "merged": tasks["mean"][label], "but": but}


def _needles(table: Report) -> Report:
    """Return recall and prompt TR of settings, as means over RULER's lengths, and the questions.

    ``shortest`` and ``longest`` are the tokens of prompts.
    """
    rows = [row for row in table["scores"] if "recall" in row]
    found: Report = {}
    for field, setting in _NEEDLE_SETTINGS.items():
        own = [row for row in rows if row["setting"] == setting]
        if not own:
            raise ConfigError(
                f"{_NEEDLES}.json must have a recall under the setting {setting!r}",
                list(dict.fromkeys(row["setting"] for row in rows)),
                "Measure the table anew: python -m flows run tables/long-context-smollm2.",
            )
        reductions = [row["context_token_reduction"] or 0.0 for row in own]
        found[field] = {
            "recall": fmean(row["recall"]["mean"] for row in own),
            "reduction": fmean(reductions),
        }
        found["needles"] = sum(row["questions"] for row in own)
    tokens = [count for row in rows for count in row["prompt_tokens"]]
    found |= {"shortest": min(tokens), "longest": max(tokens)}
    return found


def _read(folder: Path, name: str) -> Report:
    found: Report = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    return found
