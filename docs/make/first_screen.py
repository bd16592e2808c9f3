"""Results on README.md's first screen: quality, tasks and speed of the default checkpoint."""

from __future__ import annotations

import json
from typing import Final

from docs.make.document import RESULTS
from docs.make.shipped_model import LABELS
from tasks.report.page_template import Report, page, walk

_QUALITY: Final = "smollm2"
_TASKS: Final = "stock_tasks"
_SPEED: Final = "engine-smollm2"
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
""",
    texts=lambda report: (
        row | {"text": row["name"]}
        for row in walk(report, "texts.*name")
        if row["name"] != LABELS[""]
    ),
)


def first_screen() -> str:
    """Return the table and the sentences, made of the three result files."""
    tasks, speed = _read(_TASKS), _read(_SPEED)
    return _TABLE(
        {
            "texts": _read(_QUALITY)["texts"],
            **_merged(tasks),
            "prefill": speed["cases"][_CASE]["phases"]["prefill"],
        }
    )


def _merged(tasks: Report) -> Report:
    """Return the means of the base and of the first setting that merges contexts."""
    found = tasks["settings"].items()
    label, setting = next(pair for pair in found if pair[1]["merge"] == "prompt")
    but = f", but for their last {setting['raw_tail']} tokens" if setting["raw_tail"] else ""
    return {"base": tasks["mean"][tasks["base"]], "merged": tasks["mean"][label], "but": but}


def _read(name: str) -> Report:
    found: Report = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found
