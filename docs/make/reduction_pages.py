"""Page, figure and part of README of ``benchmarks/token_reduction``: quality by token reduction."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from matplotlib.figure import Figure

from docs.make.prompt_pages import prompt_section
from docs.make.reduction_curves import (
    DASHES,
    POLICIES,
    Curve,
    add_legend,
    draw_curve,
    line_of,
)
from tasks.report.page_template import Report, page, walk
from tasks.report.report_drawing import MARKERS, PALETTE

TITLE: Final = "Top-1, KL and perplexity ratio against token reduction"
_GIVEN: Final = {
    None: "",  # results of before the origin was noted
    False: ", other rows than quality",
    True: ", given: not checked",
}
_PANELS: Final = {
    "top1": "Top-1",
    "kl": "KL (nats)",
    "ppl_ratio": "Perplexity, times the base model's",
}


def _shown(report: Report) -> Iterator[Report]:
    """Yield the points that were reached, the policy in words."""
    for point in walk(report, "subjects.*subject.points.*number"):
        if "unreached" not in point:
            aligned = {x: point["alignment"][x] for x in ("top1_states", "kl_states")}
            age = f", age {point['age']}" if "age" in point else ""
            yield point | aligned | {"label": POLICIES[point["policy"]] + age}


def _texts(report: Report) -> str:
    """Say what was read, and how much of it."""
    test, cut = (report["texts"][use] for use in ("test", "cut"))
    return (
        f"Measured on {test['rows']} rows of {report['length']} tokens of *{test['name']}* (ids "
        f"{test['digest'][:12]}), evenly spaced. Each policy keeps as many rules as give the token "
        f"reduction asked for on {cut['rows']} rows of *{cut['name']}* (ids {cut['digest'][:12]}), "
        "to within one rule; *TR* is that of the measured rows." + _protected(report["protect"])
    )


def _protected(patterns: list[str]) -> str:
    return f" No rule holds a token of: {', '.join(patterns)}." if patterns else ""


def _unreached(report: Report) -> str:
    """Name the reductions that the rules do not give."""
    lines = [
        f"- {point['subject']}, {POLICIES[point['policy']]}, {point['target']:.0%}: "
        f"{point['unreached']}"
        for point in walk(report, "subjects.*subject.points.*number")
        if "unreached" in point
    ]
    return "\n".join(["Not reached:", "", *lines]) if lines else ""


def _subjects(report: Report) -> Iterator[Report]:
    for found in walk(report, "subjects.*subject"):
        damage = found.get("damage")
        yield {"damage_text": _damage(damage) if damage else "-", **found}


def _damage(found: Report) -> str:
    module = "" if found["own_module"] else ", with another module"
    given = _GIVEN[found.get("given")]
    return f"{found['tokens']:,} tokens ({found['text_digest'][:12]}){module}{given}"


REDUCTION: Final = page(
    """\
# Quality against token reduction

@ texts

![Top-1, KL and perplexity ratio against token reduction]({name}.svg)

*Top-1*: how often the most probable next token is the base model's; *KL*: divergence from the base
model in nats, both at unit ends as in the paper; *states*: the same at every state that decoding
passes through. *PPL ratio*: perplexity over that of the base model on the same rows, with the
paired standard error. ± is the standard error over rows of text. Rules are chosen by *least damage*
(divergence of an occurrence over the tokens that it saves), *highest count* in the corpus they were
mined from, or *most saved tokens* (count times n - 1). *Span eviction* merges nothing: with all
rules, a span keeps only its last column in the KV cache from an age in tokens on; *TR* is then the
cache's, and the prefill is whole.

@ shown
checkpoint      | {subject}
< rules chosen by | {label}
TR asked        | {target?-:.0%}
TR              | {token_reduction:.2%}
rules           | {rules:,}
Top-1           | {top1:.3f}
states          | {top1_states:.3f}
KL              | {kl:.3f}
states          | {kl_states:.3f}
PPL             | {ppl:.2f}
PPL ratio       | {ppl_ratio:.3f}

@ unreached

@ prompts

## Checkpoints

*Damage on*: the text that the damage of the rules was measured on. Of a table that was *given*,
only a text that is exactly the rows of quality was refused: it may hold some of them. *Rule rows*:
rules with a learned vector of their own.

@ subjects
checkpoint     | {subject}
< backbone     | {backbone}
rules          | {rules:,}
< residual     | {residual}
< positions    | {unit_positions}
rule rows      | {rule_rows:,}
steps          | {steps?-}
PPL base       | {ppl_base?-:.2f}
< damage on    | {damage_text}

Measured, and this page written, by `python -m benchmarks.token_reduction`.
""",
    texts=_texts,
    shown=_shown,
    unreached=_unreached,
    prompts=prompt_section,
    subjects=_subjects,
)


def reduction_figure(report: Report) -> Figure:
    """Draw the three quantities against token reduction, a line per checkpoint and policy."""
    curves = _curves(report)
    figure = Figure(figsize=(12.6, 4.6 + 0.22 * ((len(curves) + 2) // 3)))
    evicted = any(point["policy"] == "eviction" for curve in curves for point in curve.points)
    saved = "Token reduction (%" + ("; span eviction: of the cache)" if evicted else ")")
    for axes, (quantity, label) in zip(figure.subplots(1, 3), _PANELS.items(), strict=True):
        for curve in curves:
            draw_curve(axes, curve, quantity)
        axes.set(xlabel=saved, title=label)
        axes.set_xlim(left=0)
        if quantity == "kl":
            axes.set_ylim(bottom=0)
    add_legend(figure, curves)
    return figure


def _curves(report: Report) -> list[Curve]:
    """Return one line per checkpoint and policy."""
    names, shown = list(report["subjects"]), list(_shown(report))
    lines = [
        (policy, name, points)
        for policy in POLICIES
        for name in names
        if (points := line_of([p for p in shown if p["subject"] == name], policy))
    ]
    policies = list(dict.fromkeys(policy for policy, _, _ in lines))
    found = []
    for policy, name, points in lines:
        place = policies.index(policy)
        colour = names.index(name) if len(names) > 1 else place
        found.append(
            Curve(
                ", ".join([name] * (len(names) > 1) + [POLICIES[policy]]),
                points,
                PALETTE[colour % len(PALETTE)],
                MARKERS[place],
                DASHES[place % len(DASHES)],
            )
        )
    return found
