"""The page of a task adaptation: figures by setting, what they bear out, their limits.

Made of ``adaptation.json`` alone. Nothing here draws, so the page needs no drawing library.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tasks.paper.adaptation_rows import CLEAR, CONTROL, RULES_ALONE, adaptation_rows, clear, label
from tasks.report.page_template import Report, each, filled_in, page
from umim_core.adaptation.settings import ADAPTED, find_setting, setting_names

ADAPTATION_TITLE: Final = "Accuracy change against token reduction"


def _verdict(place: Report) -> str:
    """Return what the figures of a backbone bear out, a line each."""
    rows = adaptation_rows(place)
    lines = [
        *_guessing(place),
        _against(rows, "Accuracy", "difference", "error", "{difference!p:+.1f} points"),
        _against(
            rows,
            "Margin",
            "margin_difference",
            "margin_difference_se",
            "{margin_difference:+.3f} nats",
        ),
        *_over_rules(rows),
        *_controls(rows),
    ]
    return "\n".join(f"- {line}" for line in lines)


def _against(rows: list[Report], name: str, quantity: str, error: str, shown: str) -> str:
    """Say which rows lie clearly above the base model, clearly below it, and how many neither."""
    sides: dict[int, list[str]] = {1: [], -1: [], 0: []}
    for row in rows:
        told = f"{label(row)} ({filled_in(shown, row)})"
        sides[clear(row[quantity], row[error])].append(told)
    above, below = (", ".join(sides[side]) or "none" for side in (1, -1))
    return (
        f"{name}, clearly above the base model: {above}; clearly below: {below}; not told apart "
        f"from it: {len(sides[0])} of {len(rows)}."
    )


def _guessing(place: Report) -> Iterator[str]:
    """Say so where the base model does not do the task."""
    base, chance = place["base"], place.get("chance")
    if chance is not None and clear(base["accuracy"] - chance, base.get("accuracy_se")) < 1:
        yield (
            f"The base model ({base['accuracy']:.1%}) is not clearly better than guessing "
            f"({chance:.1%}): what merging costs or training adds says little here."
        )


def _compared(row: Report, name: str) -> str:
    """Return a row's difference to another model in words, paired by question."""
    found = row["against"][name]
    words = {1: "clearly more", -1: "clearly less", 0: "not told apart"}
    side = words[clear(found["difference"], found["error"])]
    return f"{label(row)} {filled_in('{difference!p:+.1f}', found)} points ({side})"


def _over_rules(rows: list[Report]) -> Iterator[str]:
    """Say what training adds to the task's rules, at equal threshold."""
    trained = [row for row in rows if RULES_ALONE in row["against"]]
    for tau in dict.fromkeys(row["tau"] for row in trained):
        found = [_compared(row, RULES_ALONE) for row in trained if row["tau"] == tau]
        yield f"Training, against the rules alone: {', '.join(found)}."


def _controls(rows: list[Report]) -> Iterator[str]:
    """Say how settings that merge compare with training of the same kind that merges nothing."""
    controls = [row for row in rows if row["kind"] == CONTROL]
    if not controls:
        yield "No control without merging was run: what training alone would give is not known."
    for name in (control["setting"] for control in controls):
        adapted = [row for row in rows if row["setting"] == ADAPTED and name in row["against"]]
        if adapted:
            told = ", ".join(_compared(row, name) for row in adapted)
            yield f"Against {name}, which merges nothing: {told}."


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


def _comparisons(report: Report) -> str:
    """Say how many comparisons with the base model the page makes."""
    count = sum(len(adaptation_rows(place)) for place in report["backbones"])
    return (
        f"- {count} accuracies are compared with a base model; of so many, about "
        f"{0.05 * count:.1f} would seem clear by chance."
    )


def _seeds(report: Report) -> str:
    """Say what is not known of other seeds."""
    if len(report["seeds"]) > 1:
        return (
            "- Errors count questions and seeds; of the rules and the questions there is one draw."
        )
    return "- One seed: how much another run of the same training would differ is not known."


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
            parts.append(f"*{name}*: control, trained on the same preferences without merging")
    return "; ".join(parts) + "."


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
over seeds | {spread?–!p:.1f}
gained   | {gained?–:.0f}
lost     | {lost?–:.0f}
margin change, nats | {margin_change?–:+.3f}
""",
    verdict=_verdict,
    shown=_shown,
)
_RUNS: Final = page(
    """\
### Trainings of {checkpoint}

@ runs
< setting | {setting}
τ        | {tau?–}
seed     | {seed}
steps    | {steps:,}
best step | {best_step?–:,}
steps skipped | {skipped?–:,}
accuracy % | {accuracy!p:.1f}
""",
    runs=_runs,
)
_PAGE: Final = page(
    f"""\
# Adaptation to {{task}}: {{name}}

![{ADAPTATION_TITLE}]({{file}})

What the paper's {{figure?}} shows, on other backbones.

Every setting answers the same {{questions.test:,}} test questions of `{{task}}`. *TR*: share of
context tokens that merging saves. *Change*: accuracy minus the base model's; ± is the standard
error over questions, paired by question. *Over seeds*: standard deviation of the accuracy.
*Gained*, *lost*: questions that are right and were wrong with the base model, and the reverse.
*Margin*: mean log-probability per token of the right answer minus that of the best wrong one, in
nats. Accuracy counts the answer of the highest mean log-probability. *Clearly*: beyond {CLEAR:g}
standard errors of the difference, over questions and, where there are several, over seeds.

Guessing answers {{chance?:.0%}} of the questions rightly.

@ backbones

## How it was made

@ settings

Rules: bigrams of {{questions.train:,}} training questions that occur τ times or more. Selected on
{{questions.valid:,}} validation questions; texts of at most {{max_tokens:,}} tokens; {{dtype}}.

SFT: at most {{sft.max_steps?:,}} steps of {{sft.batch_size?}} questions, learning rate
{{sft.learning_rate?:g}}.

DPO: at most {{dpo.max_steps?:,}} steps of {{dpo.batch_size?}} questions, learning rate
{{dpo.learning_rate?:g}}.

DPO of the controls: at most {{control_dpo.max_steps?:,}} steps of {{control_dpo.batch_size?}}
questions, learning rate {{control_dpo.learning_rate?:g}}.

@ runs

@ missing

## Limits

@ comparisons

@ spread

- One task, one split of its questions, and the models above: nothing follows for others.

`python -m flows run adaptation/{{name}}` measures it again. This page and its figure are
made of its `adaptation.json` alone.

Commit {{commit?:.12}}.
""",
    backbones=each("backbones.*place", _BACKBONE),
    runs=each("backbones.*place", _RUNS),
    settings=_settings,
    missing=_missing,
    comparisons=_comparisons,
    spread=_seeds,
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
