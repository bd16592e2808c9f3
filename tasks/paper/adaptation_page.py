"""The page of a task adaptation: figures by setting, what they bear out, their limits.

Made of ``adaptation.json`` alone. Nothing here draws, so the page needs no drawing library.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tasks.paper.adaptation_rows import CLEARLY, RULES_ALONE, adaptation_rows, label
from tasks.paper.adaptation_verdict import number_compared, verdict
from tasks.report.page_template import Report, each, page
from umim_core.adaptation.settings import WT, find_setting, setting_names

ADAPTATION_TITLE: Final = "Accuracy change against token reduction"


def _shown(place: Report) -> Iterator[Report]:
    """Yield the base model, then every row."""
    base = place["base"]
    accuracy = {"mean": base["accuracy"], "std": base.get("accuracy_se")}
    yield {"setting": "base", "token_reduction": 0.0, "seeds": "", "accuracy": accuracy}
    for row in adaptation_rows(place):
        yield row | {
            "accuracy": {"mean": row["accuracy"], "std": None},
            "seeds": row["seeds"] if row["trained"] else "",
        }


def _runs(place: Report) -> Iterator[Report]:
    for point in place["points"]:
        if point.get("steps") is not None:
            yield point


def _missing(report: Report) -> str:
    """Name trained settings that have fewer seeds than were asked for."""
    asked = len(report["seeds"])
    few = [
        f"{label(row)} on {place['backbone']} {row['seeds']}"
        for place in report["backbones"]
        for row in adaptation_rows(place)
        if row["trained"] and row["seeds"] < asked
    ]
    return f"Of {asked} seeds, there are fewer of: {'; '.join(few)}." if few else ""


def _seeds(report: Report) -> str:
    """Say what is not known of other seeds."""
    if len(report["seeds"]) > 1:
        return "- *Clearly* counts questions and seeds; of rules and questions there is one draw."
    return (
        "- One seed: how much another run of the same training would differ is not known. What is "
        "clear holds for these runs."
    )


def _rounding(report: Report) -> str:
    """Say what scores in bfloat16 hide."""
    if report["dtype"] != "bfloat16":
        return ""
    return (
        "- Models are scored in bfloat16, which keeps 8 significant bits: small changes of a "
        "margin may be rounding, and answers that are nearly as probable may change places."
    )


def _trainings(report: Report) -> str:
    """Say how each training that was run was run."""
    settings = {"SFT": report.get("sft"), "DPO": report.get("dpo")}
    controls = {f"DPO of {name}": by for name, by in report["control_dpo"].items()}
    return "\n\n".join(
        _training(words, by, report["questions"])
        for words, by in (settings | controls).items()
        if by is not None
    )


def _training(words: str, by: Report, questions: Report) -> str:
    """Say how long a training may be and what selects its step, as the training loop does."""
    passes, batch = by["max_epochs"], by["batch_size"]
    whole = max(1, passes * questions["train"] // batch)
    limit = f" ({passes} passes over the training questions)" if whole < by["max_steps"] else ""
    selected = min(questions["valid"], by["validation_rows"])
    accurate = "highest accuracy (then the lowest loss)"
    best = "lowest cross-entropy" if words == "SFT" else accurate
    return (
        f"{words}: at most {min(by['max_steps'], whole):,} steps of {batch} questions{limit}, "
        f"learning rate {by['learning_rate']:g}. Of the start and every {by['validate_every']:,}th "
        f"step, the one with the {best} on {selected:,} validation questions "
        "is taken."
    )


def _kept(report: Report) -> str:
    """Say how many trainings were worse than their start wherever they were validated."""
    runs = [point for place in report["backbones"] for point in _runs(place)]
    kept = sum(point.get("best_step") == 0 for point in runs)
    words = f"{kept} of {len(runs)} trainings kept their start: no later step was better."
    return words if runs else ""


def _settings(report: Report) -> str:
    """Say what the settings that were measured are made of."""
    named = dict.fromkeys(p["setting"] for place in report["backbones"] for p in place["points"])
    rules = {"corpus": "the corpus's rules", "task": "the task's rules", "none": "no rules"}
    training = {
        "none": "not trained further",
        "distill": "distilled on the corpus",
        "sft": "distilled on the task's texts (SFT)",
        "dpo": "then trained on preferences between answers (DPO)",
    }
    parts = []
    for name in named:
        if name in setting_names():
            row = find_setting(name)
            start = "random weights" if row.start is None else row.start
            begin = "" if row.training in ("none", "distill") else f"from {start}, "
            parts.append(f"*{name}*: {begin}{rules[row.rules]}, {training[row.training]}")
        else:
            parts.append(f"*{name}*: control, trained by DPO on the same answers, without merging")
    return "; ".join(parts) + "."


def _offsets(report: Report) -> str:
    """Say where settings lack the rule rows that WT has."""
    lines = []
    for place in report["backbones"]:
        own, kept = _most_rows(place, WT), _most_rows(place, RULES_ALONE)
        if own > kept:
            lines.append(
                f"WT of {place['checkpoint']} has {own:,} rule rows, offsets of its own for "
                f"frequent rules; settings that start from it keep those of the task's rules, at "
                f"most {kept:,}."
            )
    return " ".join(lines)


def _most_rows(place: Report, setting: str) -> int:
    found = (p.get("rule_rows", 0) for p in place["points"] if p["setting"] == setting)
    return max(found, default=0)


_BACKBONE: Final = page(
    """\
## {checkpoint} on {backbone}

@ verdict

@ shown
< setting | {setting}
τ        | {tau?–}
seeds    | {seeds}
rules    | {rules?–:,.0f}
TR       | {token_reduction:.1%}
TR with answers | {input_reduction?–:.1%}
accuracy % | {accuracy!p:.1f}
change, points | {change?–!p:+.1f}
clear beyond, points | {reach?–!p:.1f}
over seeds | {spread?–!p:.1f}
gained   | {gained?–:.0f}
lost     | {lost?–:.0f}
margin change, nats | {margin_change?–:+.3f}
clear beyond, nats | {margin_reach?–:.3f}
""",
    verdict=verdict,
    shown=_shown,
)
_RUNS: Final = page(
    """\
### Trainings of {checkpoint}

@ runs
< setting | {setting}
τ        | {tau?–}
seed     | {seed}
steps    | {steps:,.0f}
best step | {best_step?–:,.0f}
steps skipped | {skipped?–:,.0f}
accuracy % | {accuracy!p:.1f}
""",
    runs=_runs,
)
_PAGE: Final = page(
    f"""\
# Adaptation to {{task}}: {{name}}

![{ADAPTATION_TITLE}]({{file}})

To be compared with the paper's {{figure?}}.

Every setting answers the same {{questions.test:,}} test questions of `{{task}}`. *TR*: share of
context tokens that merging saves. *Change*: accuracy minus the base model's; ± is the standard
error over questions alone, paired by question. *Over seeds*: standard deviation of the accuracy.
*Clearly*: {CLEARLY}. *Clear beyond* is that limit, half of a 95 % interval, which the figure's bars
show.
*Gained*, *lost*: questions that are right and were wrong with the base model, and the reverse.
*Margin*: mean log-probability per token of the right answer minus that of the best wrong one, in
nats. Accuracy counts the answer of the highest mean log-probability.

Guessing answers {{chance?:.0%}} of the questions rightly.

@ backbones

## How it was made

{{description?}}

@ settings

@ offsets

Rules: bigrams of {{questions.train:,}} training questions that occur τ times or more. Texts have at
most {{max_tokens:,}} tokens; scores are computed in {{dtype}}.

@ trainings

@ kept

@ runs

@ missing

## Limits

@ comparisons

@ spread

@ rounding

- One task, one split of its questions, and the models above: nothing follows for others.

`python -m flows run adaptation/{{name}}` measures it again. This page and its figure are
made of its `adaptation.json` alone.

SHA-256 of the test questions: {{question_digests.test?:.12}}.
""",
    backbones=each("backbones.*place", _BACKBONE),
    runs=each("backbones.*place", _RUNS),
    settings=_settings,
    offsets=_offsets,
    missing=_missing,
    comparisons=number_compared,
    spread=_seeds,
    rounding=_rounding,
    trainings=_trainings,
    kept=_kept,
)


def adaptation_page(report: Report, figure: str = "adaptation.svg") -> str:
    """Return the page in markdown.

    Args:
        report: Content of ``adaptation.json``.
        figure: Name of the figure's file, next to the page.

    Raises:
        KeyError: If the content lacks a field that the page shows.
    """
    return _PAGE(report | {"file": figure}) + "\n"
