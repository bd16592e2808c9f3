"""Pages of the benchmarks of evaluation: lm-eval's stock tasks, and perplexity."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tasks.report.page_template import Report, page, walk

_UNMERGED: Final = {
    "hf": "base (lm-eval's `hf`)",
    "none": "base (`merge=none`)",
    "no rules": "ours, empty rule set",
}
# Test sets of SmolLM2-135M-Instruct, as its authors and leaderboards give them.
_PUBLISHED: Final = {
    "arc_easy": "53.8-54.1 (acc)",
    "piqa": "66.6-66.9 (acc)",
    "openbookqa": "33.2 (acc_norm)",
    "hellaswag": "43.0 (acc_norm)",
}


def _scores(report: Report) -> Iterator[Report]:
    """Yield base and settings of every task."""
    for row in walk(report, "tasks.*task.sides.*side"):
        if row["side"] in (report["base"], *report["settings"]):
            yield _labelled(row, report)


def _means(report: Report) -> Iterator[Report]:
    for row in walk(report, "mean.*side"):
        yield _labelled(row, report)


def _labelled(row: Report, report: Report) -> Report:
    """Return a row with its side in words; the base's differences to itself are absent."""
    side = row["side"]
    names = ("acc_difference", "acc_norm_difference", "choices_changed")
    absent = dict.fromkeys(names) if side == report["base"] else {}
    return row | {"label": _UNMERGED.get(side, side)} | absent


def _equality(report: Report) -> Iterator[Report]:
    """Yield how the sides that merge nothing compare with lm-eval's own model."""
    for row in walk(report, "tasks.*task.against_hf.*side"):
        same = row.get("same_call", True)  # results of before it was noted
        times = row["seconds"] / row["hf_seconds"] if same else None
        yield row | {"label": _UNMERGED[row["side"]], "times": times}


def _sets(report: Report) -> Iterator[Report]:
    """Yield size and origin of every task's questions, and published figures."""
    for task, found in report["tasks"].items():
        one = next(iter(found["sides"].values()))
        yield {"task": task, **one, "published": _PUBLISHED.get(task, "-")}


_AGAINST_HF: Final = page(
    """\
## Against lm-eval's own model

The same weights through `--model hf`. *Difference*: largest of a log-likelihood, in nats; *other
choices*: questions where another answer is the likeliest. Seconds run from the loaded task to its
metrics, once each, batches of {batch_size}; *times* compares seconds of one call alone.

@ equality
task          | {task}
< model       | {label}
difference    | {difference:.1e}
other choices | {other_choices}
seconds       | {seconds:,.1f}
`hf`          | {hf_seconds:,.1f}
times         | {times?-:.2f}

Gates of differences are in units of what they allow: 1e-4 nats for the base, 1e-3 for the empty
rule set, whose forwards have other shapes.
""",
    equality=_equality,
)
_KEPT: Final = page(
    """\
Cells of this call: {cells.measured}; kept from earlier calls: {cells.kept}. Seconds of the latter
may be of another machine, load or commit than the one below, and no gate compares them.
"""
)
STOCK_TASKS: Final = page(
    """\
# Stock tasks of lm-evaluation-harness: {backbone}

Frozen backbone *{backbone}*, {dtype}, no examples in the prompt, no chat template. A *setting* is a
checkpoint with what it merges: *prompt* is the context, of which a *raw tail* leaves the last
tokens as they are; *all* is context and answer. *TR*: tokens removed, realised, over contexts and
answers; *of contexts*: over whole contexts, raw tails included. Accuracies in per cent ± standard
error. Differences to the base model are paired by question, with the standard error of the paired
difference; *changed*: share of questions where another answer is the likeliest.

The questions are **development splits**: cut from the published training parts (ARC, OpenBookQA),
development parts (COPA, a sample of HellaSwag) and half of the validation part of PIQA. HellaSwag
rows have a placeholder in place of the activity label. Published test figures of
SmolLM2-135M-Instruct stand here for orientation only and cannot be compared: other questions, and
the weights here are those of a Q4_1 file, dequantised.

@ sets
task              | {task}
split             | {split}
questions         | {questions:,} of {of:,}
published, test % | {published}

## Accuracy

@ scores
task             | {task}
< setting        | {label}
TR               | {token_reduction:.1%}
of contexts      | {context_token_reduction?-:.1%}
acc              | {acc!p:.1f}
acc_norm         | {acc_norm?-!p:.1f}
acc - base       | {acc_difference?-!p:.1f}
acc_norm - base  | {acc_norm_difference?-!p:.1f}
changed          | {choices_changed?-:.1%}
seconds          | {seconds:,.1f}

Mean over the tasks; one without acc_norm counts its acc there.

@ means
setting          | {label}
TR               | {token_reduction:.1%}
of contexts      | {context_token_reduction?-:.1%}
acc              | {acc!p:.1f}
acc_norm         | {acc_norm!p:.1f}
acc - base       | {acc_difference?-!p:.1f}
acc_norm - base  | {acc_norm_difference?-!p:.1f}
seconds          | {seconds:,.1f}

The gate: a setting that merges contexts loses at most 1.0 point of mean accuracy where it removes
15 % of their tokens or more, else at most 0.5 where it removes 8 % or more.

@ against_hf

## Checkpoints

@ checkpoints.*checkpoint
checkpoint | {checkpoint}
rules      | {rules:,}
< module digest | {module_digest:.12}
< rules digest  | {rules_digest:.12}

Measured, and this page written, by `python -m benchmarks.stock_tasks`; task data {data_digest:.12},
backbone {backbone_fingerprint:.12}.

@ kept
""",
    scores=_scores,
    means=_means,
    against_hf=lambda report: _AGAINST_HF(report) if any(_equality(report)) else "",
    sets=_sets,
    kept=lambda report: _KEPT(report) if report.get("cells", {}).get("kept") else "",
)
PERPLEXITY: Final = page(
    """\
# Perplexity: one forward against the base model and the listing

{rows} rows of {length} tokens on {device}, float32. *plain*: no rule lies inside another; *nested*:
all frequent spans. The listing runs a forward over the units and one more for every token hidden in
a span, for the first row. Ratios are medians over alternating pairs, with quartiles; *difference*:
largest of a token's log-probability between both, in nats.

Text: {text?}.

@ ours
backbone: rules    | {backbone}: {name}
rules              | {rules:,}
TR                 | {token_reduction:.1%}
base               | {base model.seconds:.3f s}
ours               | {seconds:.3f s}
times base         | {times_base:.2f}
listing of one row | {listing_seconds:.3f s}
times ours         | {listing_times:.1f}
difference         | {difference:.1e}
""",
    ours=lambda report: (
        row for row in walk(report, "backbones.*backbone.*name") if row["name"] != "base model"
    ),
)
