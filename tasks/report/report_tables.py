"""The report's smaller tables, as columns of what each row is about."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, Final

from tasks.report.comparison import OWN_METHOD, TASK_TR
from tasks.report.comparison_table import STATES, metric_column
from tasks.report.report_data import ReportData
from tasks.report.tables import DASH, Column, Table, make_table, number_column, shown
from umim_core.adaptation.settings import BASE
from umim_core.rules.grams import ORDERS

_RULES: Final = Column("rules", attrgetter("label"), left=True)
_SETTING: Final = Column("setting", attrgetter("setting"), left=True)
_PHASE: Final = Column("phase", attrgetter("phase"), left=True)


def tables(data: ReportData) -> list[Table]:
    """Return the tables that the data has rows for, in the order to be shown."""
    made = (_accuracy, _alignment, _perplexity, _parts, _throughput, _break_even, _rules)
    return [table for make in made if (table := make(data)).rows]


def _accuracy(data: ReportData) -> Table:
    rows = [
        (row, task, setting, next(iter(score.values())))
        for row in data.base_rows()
        for (task, setting), score in row.scores.items()
        if setting != BASE or row.method == OWN_METHOD
    ]
    tasks = list(dict.fromkeys(task for _, task, _, _ in rows))
    several = len(tasks) > 1
    columns = (
        Column("rules", lambda found: found[0].label, left=True),
        *([Column("task", lambda found: found[1], left=True)] if several else []),
        Column("setting", lambda found: found[2], left=True),
        number_column("TR %", lambda found: found[0].score(found[2], found[1], TASK_TR), 1, 100),
        number_column("accuracy %", lambda found: found[3].value, 1, 100),
        number_column("± %", lambda found: found[3].stderr, 1, 100),
    )
    guesses = [
        f"{shown(chance, 1, scale=100)} %" + (f" on {task}" if several else "")
        for task in tasks
        if (chance := data.chance_of(task)) is not None
    ]
    guess = f" Guessing gives {', '.join(guesses)}." if guesses else ""
    note = "TR: on the task's own sequences. ±: one standard error." + guess
    return make_table("Task accuracy by setting", columns, rows, note)


def _alignment(data: ReportData) -> Table:
    names = ("top1", "top3", "top10", "topp", "mrr", "kl", "top1_states", "kl_states")
    headings = ("Top-1", "Top-3", "Top-10", "Top-p", "MRR", "KL", "Top-1 states", "KL states")
    metrics = (metric_column(*pair, 3) for pair in zip(headings, names, strict=True))
    return make_table(
        "Alignment with the base model",
        (_RULES, _SETTING, *metrics),
        [row for row in data.rows if any(row.metric(name) is not None for name in names)],
        "On rows that predict what follows the same raw token. KL in nats, lower is better; the "
        f"others 0 to 1, higher is better. Top-p: p = 0.9. Rows are unit ends, {STATES}",
    )


def _perplexity(data: ReportData) -> Table:
    texts = {"in-domain": ""} | {corpus: f"_ood_{corpus}" for corpus in data.corpora()}
    return make_table(
        "Perplexity",
        (
            *(_RULES, _SETTING),
            *(
                metric_column(f"{text} {shown_as}", f"ppl_{model}{ending}", 2)
                for text, ending in texts.items()
                for model, shown_as in (("base", "base"), ("umim", "UMIM"))
            ),
        ),
        [row for row in data.rows if any(name.startswith("ppl_") for name in row.metrics)],
        "Per raw token, every token scored after the state that decoding passes through before "
        "it. Corpora other than in-domain had no part in rules or training.",
    )


def _parts(data: ReportData) -> Table:
    def column(heading: str, metric: str, digits: int, scale: float = 1) -> Column:
        return number_column(
            heading, lambda found: found[0].metric(f"{metric}_part_{found[1]}"), digits, scale
        )

    return make_table(
        "Parts of the corpus",
        (
            Column("rules", lambda found: found[0].label, left=True),
            Column("setting", lambda found: found[0].setting, left=True),
            Column("test text", lambda found: found[1], left=True),
            column("TR %", "token_reduction", 1, 100),
            column("Top-1", "top1", 3),
            column("Top-10", "top10", 3),
            column("MRR", "mrr", 3),
            column("KL", "kl", 3),
            column("PPL base", "ppl_base", 2),
            column("PPL UMIM", "ppl_umim", 2),
            column("increase in nats", "nats_increase", 3),
            column("±", "nats_increase_se", 3),
        ),
        [(row, part) for row in data.rows for part in row.parts],
        "Each part's own test documents. Increase: ln(PPL UMIM / PPL base) with its standard error "
        "over rows, paired.",
    )


def _throughput(data: ReportData) -> Table:
    return make_table(
        "Throughput",
        (
            *(_RULES, _PHASE),
            Column("rows × tokens", lambda row: f"{row.batch_size} × {row.prompt_tokens:,}"),
            number_column("TR %", attrgetter("token_reduction"), 1, 100),
            number_column("base tok/s", attrgetter("base_tokens_per_s"), 0),
            number_column("UMIM tok/s", attrgetter("umim_tokens_per_s"), 0),
            number_column("UMIM / base", attrgetter("ratio"), 2),
            number_column("bound", attrgetter("bound"), 2),
            number_column("base KV MiB", attrgetter("base_kv_bytes"), 2, 2**-20),
            number_column("UMIM KV MiB", attrgetter("umim_kv_bytes"), 2, 2**-20),
        ),
        data.throughput,
        "Raw tokens per second; matching and merging are part of UMIM's time. Prefill ends with "
        "the first token; a request is prefill and decode. Bound: the largest ratio that the TR "
        "can give. KV: keys and values at the end of the phase.",
    )


def _break_even(data: ReportData) -> Table:
    return make_table(
        "Where merging pays",
        (
            *(_RULES, _PHASE),
            number_column("batch size", attrgetter("batch_size"), 0),
            Column(
                "prompt tokens measured", lambda row: ", ".join(f"{n:,}" for n in row.prompt_tokens)
            ),
            Column(
                "pays from", lambda row: f"{row.pays_from:,} tokens" if row.pays_from else "never"
            ),
        ),
        data.break_even,
        "The least measured prompt length from which UMIM is faster, the lower quartile of its "
        "speed-up included, at that and every longer one.",
    )


def _rules(data: ReportData) -> Table:
    rows = [
        (counts.label, step, found)
        for counts in data.rule_counts
        for step, found in (
            ("reach the threshold", counts.raw),
            ("after the overlap filter", counts.overlap),
            ("rules", counts.rules),
        )
        if found
    ]

    def of_order(order: int) -> Callable[[Any], str]:
        return lambda row: f"{row[2][order]:,}" if order in row[2] else DASH

    columns = (
        Column("rule set", lambda row: row[0], left=True),
        Column("step", lambda row: row[1], left=True),
        *(Column(f"{order} tokens", of_order(order)) for order in ORDERS),
        Column("all", lambda row: f"{sum(row[2].values()):,}"),
    )
    return make_table("Rules by order", columns, rows, "Distinct n-grams.")
