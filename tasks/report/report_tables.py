"""The report's smaller tables, as cells, for HTML and markdown."""

from __future__ import annotations

from tasks.report.comparison import TASK_TR, ComparisonRow
from tasks.report.comparison_table import DASH, STATES, filled, shown
from tasks.report.report_data import CheckpointPlace, ReportData, RuleCounts
from tasks.report.tables import Table
from umim_core.checkpoint.next_steps import after_training

ORDERS = (2, 3, 4)
_MIB = 2**20


def tables(data: ReportData) -> list[Table]:
    """Return the tables that the data has rows for, in the order to be shown."""
    made = [_accuracy(data), _alignment(data), _perplexity(data)]
    made += [_throughput(data), _break_even(data), _rules(data)]
    return [filled(table) for table in made if table.rows]


def commands(place: CheckpointPlace) -> list[str]:
    """Return the commands that use a checkpoint, to be copied."""
    return [line.strip() for line in after_training(place.path)]


def _accuracy(data: ReportData) -> Table:
    rows = tuple(
        (
            row.label,
            setting,
            shown(row.score(setting, task, TASK_TR), 1, scale=100),
            shown(headline.value, 1, scale=100),
            shown(headline.stderr, 1, scale=100),
        )
        for row in data.base_rows()
        for (task, setting), score in row.scores.items()
        for headline in [next(iter(score.values()))]
    )
    guess = "" if data.chance is None else f" Guessing gives {shown(data.chance, 1, scale=100)} %."
    return Table(
        "Task accuracy by setting",
        ("rules", "setting", "TR %", "accuracy %", "± %"),
        rows,
        "TR: on the task's own sequences. ±: one standard error." + guess,
        left=(0, 1),
    )


def _alignment(data: ReportData) -> Table:
    names = ("top1", "top3", "top10", "topp", "mrr", "kl", "top1_states", "kl_states")
    rows = tuple(
        (row.label, row.setting, *(shown(row.metric(name), 3) for name in names))
        for row in data.rows
        if any(row.metric(name) is not None for name in names)
    )
    return Table(
        "Alignment with the base model",
        (
            *("rules", "setting", "Top-1", "Top-3", "Top-10", "Top-p", "MRR", "KL"),
            *("Top-1 states", "KL states"),
        ),
        rows,
        "On rows that predict what follows the same raw token. KL in nats, lower is better; the "
        f"others 0 to 1, higher is better. Top-p: p = 0.9. Rows are unit ends, {STATES}",
        left=(0, 1),
    )


def _perplexity(data: ReportData) -> Table:
    corpora = data.corpora()

    def cells(row: ComparisonRow) -> tuple[str, ...]:
        names = ["", *(f"_ood_{corpus}" for corpus in corpora)]
        pairs = [(row.metric(f"ppl_base{n}"), row.metric(f"ppl_umim{n}")) for n in names]
        return (
            row.label,
            row.setting,
            *(cell for base, umim in pairs for cell in (shown(base, 2), shown(umim, 2))),
        )

    rows = tuple(cells(r) for r in data.rows if any(name.startswith("ppl_") for name in r.metrics))
    headings = ["in-domain base", "in-domain UMIM"]
    headings += [f"{corpus} {model}" for corpus in corpora for model in ("base", "UMIM")]
    return Table(
        "Perplexity",
        ("rules", "setting", *headings),
        rows,
        "Per raw token, every token scored after the state that decoding passes through before "
        "it. Corpora other than in-domain had no part in rules or training.",
        left=(0, 1),
    )


def _throughput(data: ReportData) -> Table:
    def mib(count: int | None) -> str:
        return DASH if count is None else f"{count / _MIB:,.2f}"

    rows = tuple(
        (
            row.label,
            row.phase,
            f"{row.batch_size} × {row.prompt_tokens:,}",
            shown(row.token_reduction, 1, scale=100),
            shown(row.base_tokens_per_s, 0),
            shown(row.umim_tokens_per_s, 0),
            shown(row.ratio, 2),
            shown(row.bound, 2),
            mib(row.base_kv_bytes),
            mib(row.umim_kv_bytes),
        )
        for row in data.throughput
    )
    headings = ("rules", "phase", "rows × tokens", "TR %", "base tok/s", "UMIM tok/s")
    return Table(
        "Throughput",
        (*headings, "UMIM / base", "bound", "base KV MiB", "UMIM KV MiB"),
        rows,
        "Raw tokens per second; matching and merging are part of UMIM's time. Prefill ends with "
        "the first token; a request is prefill and decode. Bound: the largest ratio that the TR "
        "can give. KV: keys and values at the end of the phase.",
        left=(0, 1),
    )


def _break_even(data: ReportData) -> Table:
    rows = tuple(
        (
            row.label,
            row.phase,
            str(row.batch_size),
            ", ".join(f"{length:,}" for length in row.prompt_tokens),
            "never" if row.pays_from is None else f"{row.pays_from:,} tokens",
        )
        for row in data.break_even
    )
    return Table(
        "Where merging pays",
        ("rules", "phase", "batch size", "prompt tokens measured", "pays from"),
        rows,
        "The least measured prompt length from which UMIM is faster, the lower quartile of its "
        "speed-up included, at that and every longer one.",
        left=(0, 1),
    )


def _rules(data: ReportData) -> Table:
    def cells(counts: RuleCounts, step: str, found: dict[int, int]) -> tuple[str, ...]:
        by_order = [f"{found[n]:,}" if n in found else DASH for n in ORDERS]
        return (counts.label, step, *by_order, f"{sum(found.values()):,}")

    rows = tuple(
        cells(counts, step, found)
        for counts in data.rule_counts
        for step, found in (
            ("reach the threshold", counts.raw),
            ("after the overlap filter", counts.overlap),
            ("rules", counts.rules),
        )
        if found
    )
    return Table(
        "Rules by order",
        ("rule set", "step", "2 tokens", "3 tokens", "4 tokens", "all"),
        rows,
        "Distinct n-grams.",
        left=(0, 1),
    )
