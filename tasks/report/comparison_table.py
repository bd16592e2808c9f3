"""Tables of comparison rows as people read them: columns, legends, the comparison itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from tasks.report.comparison import ComparisonRow, Measured, RowRules, shown_name
from tasks.report.render import DASH, Column, Table, fitted, make_table, number_column, shown
from umim_core.adaptation.settings import ADAPTED, BASE, WT
from umim_core.config.recipe import DEFAULT_TASK, Cell

STATES: Final = (
    "which depend on the rules; states: at every state that decoding passes through, to compare "
    "rules by."
)


def metric_column(heading: str, name: str, digits: int, scale: float = 1.0) -> Column:
    """Return the column of a metric, with its standard error where it is known."""
    return Column(heading, lambda row: shown(row.measurement(name), digits, scale))


def with_error(score: Measured) -> dict[str, float | None]:
    """Return a score as pages show a mean with its standard error."""
    return {"mean": score.value, "stderr": score.stderr}


_SUMMARY: Final = (
    "τ: how often a merged span occurs in the corpus. form: the paper's, or what ours adds. WT: "
    "trained on the corpus; WT + Rules: the task's spans, not trained further; WT + FT: trained on "
    "the task; Task-Adapted: then on its answers. TR: tokens saved. Top-1: agreement with the base "
    "model. PPL ×: perplexity over the base model's. acc.: on the task, before and after. prefill "
    "×: base time over UMIM's. *: shipped checkpoint, trained longer."
)
_SUMMARY_ROWS: Final = 12
_BACKBONE: Final = Column(
    "backbone", lambda r: shown_name(r.cell.backbone) + " *" * (r.source == "shipped"), left=True
)
TAU: Final = Column("τ", lambda row: DASH if row.tau is None else str(row.tau))
_VARIANTS: Final = (
    Column("method", lambda row: row.method, left=True),
    Column("rules by", lambda row: _of_rules(row, lambda rules: rules.made_by), left=True),
    Column("overlap", lambda row: _of_rules(row, lambda rules: rules.overlap), left=True),
    Column("containment", lambda row: _of_rules(row, lambda rules: rules.containment), left=True),
    number_column("most rules", lambda row: row.cell.rule_budget),
    number_column("spans", lambda row: row.cell.spans),
    number_column("tokens asked", lambda row: row.cell.confidence_tokens),
    Column("revision", lambda row: row.cell.revision or DASH, left=True),
    Column("positions", lambda row: row.cell.module_positions, left=True),
    Column("depth", lambda row: str(row.cell.depth)),
    Column("kind", lambda row: row.cell.kind, left=True),
    Column("residual", lambda row: row.cell.residual, left=True),
    number_column("rule rows", lambda row: row.cell.rule_rows),
    number_column("merge depth", lambda row: row.cell.merge_depth),
    number_column("adapter rank", lambda row: row.cell.adapter_rank),
    Column("unit positions", lambda row: row.cell.unit_positions, left=True),
)


def _of_rules(row: ComparisonRow, show: Callable[[RowRules], str]) -> str:
    return DASH if row.rules is None else show(row.rules)


def variant_columns(rows: Sequence[ComparisonRow]) -> tuple[Column, ...]:
    """Return the columns of what differs between the rows, besides backbone and threshold."""
    return tuple(column for column in _VARIANTS if len({column.show(row) for row in rows}) > 1)


def comparison(rows: Sequence[ComparisonRow], config: Mapping[str, Any] | None = None) -> Table:
    """Return the comparison as people read it, a dash where nothing was measured."""
    tasks = dict.fromkeys(task for row in rows for task in row.tasks)
    columns = (
        _BACKBONE,
        TAU,
        *variant_columns(rows),
        Column("setting", lambda row: row.setting, left=True),
        metric_column("TR %", "token_reduction", 1, 100),
        metric_column("Top-1", "top1", 3),
        metric_column("Top-1 states", "top1_states", 3),
        metric_column("PPL base", "ppl_base", 2),
        metric_column("PPL UMIM", "ppl_umim", 2),
        *(column for task in tasks for column in _score_columns(task)),
        metric_column("prefill ×", "prefill_speedup", 2),
    )
    table = make_table(columns, rows)
    amounts = _amounts(rows, config or {})
    return replace(table, note=" ".join(filter(None, [_notes(rows, table), amounts])))


def summary(rows: Sequence[ComparisonRow], config: Mapping[str, Any] | None = None) -> Table:
    """Return the comparison in few rows and columns, which fit a terminal."""

    def ratio(row: ComparisonRow) -> float | None:
        base, ours = row.metric("ppl_base"), row.metric("ppl_umim")
        return ours / base if base and ours else None

    def accuracy(row: ComparisonRow) -> str:
        scores = [row.score(of, row.tasks[0]) if row.tasks else None for of in (BASE, row.setting)]
        return DASH if None in scores else " → ".join(shown(score, 1, 100) for score in scores)

    columns = (
        _BACKBONE,
        Column("rules", lambda row: _of_rules(row, _in_short), left=True),
        Column("form", lambda row: _form_in_short(row.cell), left=True),
        Column("setting", lambda row: row.setting, left=True),
        Column("TR %", lambda row: shown(row.metric("token_reduction"), 1, 100)),
        Column("Top-1", lambda row: shown(row.metric("top1"), 3)),
        Column("PPL ×", lambda row: shown(ratio(row), 2)),
        Column("acc. %", accuracy),
        Column("prefill ×", lambda row: shown(row.metric("prefill_speedup"), 2)),
    )
    more = len(rows) - _SUMMARY_ROWS
    notes = (
        f"{more} more rows: see the report." if more > 0 else "",
        _SUMMARY,
        _amounts(rows, config or {}),
    )
    table = make_table(columns, rows[:_SUMMARY_ROWS], " ".join(filter(None, notes)))
    return fitted(table)


def _in_short(rules: RowRules) -> str:
    return rules.made_by if rules.tau is None else f"τ {rules.tau}"


def _form_in_short(cell: Cell) -> str:
    """Return the most that a form adds to the paper's, in a word or two."""
    added = {"inside": cell.merge_depth, "adapters": cell.adapter_rank, "rule rows": cell.rule_rows}
    words = [word for word, size in added.items() if size]
    return next(iter(words), "ours" if cell.deviations() else "paper's")


def _amounts(rows: Sequence[ComparisonRow], config: Mapping[str, Any]) -> str:
    """Return on how much held-out data the rows were measured, the headline by itself."""
    if "evaluate" not in config or not rows:
        return ""
    said = f"Measured on {_amount(config, config['evaluate'])}"
    headline, leads = config.get("headline"), rows[0].source == "shipped"
    if headline is not None and leads:
        said += f"; {shown_name(rows[0].cell.backbone)}: {_amount(config, headline['evaluate'])}"
        if headline.get("benchmark"):
            said += f", timed at {max(headline['benchmark']['prompt_lengths']):,} tokens"
    return f"{said}."


def _amount(config: Mapping[str, Any], evaluate: Mapping[str, Any]) -> str:
    length = config["segment_length"]
    return (
        f"{evaluate['alignment_rows']} (Top-1) and {evaluate['perplexity_rows']} (PPL) rows of "
        f"{length} tokens, {evaluate['task_questions']} questions"
    )


def _score_columns(task: str) -> list[Column]:
    """Return a task's headline: of the base model, of WT, and adapted (or the row's own)."""
    settings: dict[str, Callable[[ComparisonRow], str]] = {
        BASE: lambda _: BASE,
        WT: lambda row: WT if row.setting == WT else "",
        "adapted": lambda row: ADAPTED if row.setting == WT else row.setting,
    }
    name = "acc." if task == DEFAULT_TASK else f"{task} acc."

    def column(heading: str, setting: Callable[[ComparisonRow], str]) -> Column:
        def cell(row: ComparisonRow) -> str:
            score = next(iter(row.scores.get((task, setting(row)), {}).values()), None)
            return shown(None if score is None else with_error(score), 1, 100)

        return Column(heading, cell)

    return [column(f"{name} {heading}", setting) for heading, setting in settings.items()]


def _notes(rows: Sequence[ComparisonRow], table: Table) -> str:
    """Return the line below the table that explains its columns."""
    headings, cells = table.headings, [cell for row in table.rows for cell in row]
    unit_ends = f"unit ends, {STATES}" if "Top-1 states" in headings else "unit ends."
    sentences = (
        ("TR %", "TR: tokens removed by merging, realised."),
        ("Top-1", f"Top-1: agreement with the base model at {unit_ends}"),
        ("PPL", "PPL: per raw token, in-domain."),
        (
            "PPL 2nd half",
            "PPL 2nd half: of raw second halves of windows whose first halves were shortened.",
        ),
        ("KV %", "KV: columns of the cache dropped after a whole prefill; TR also saves prefill."),
        ("acc.", "acc.: task accuracy in %."),
        ("prefill", "prefill ×: base time / UMIM time."),
    )
    said = [text for of, text in sentences if any(of in name for name in headings)]
    shipped = any(row.source == "shipped" for row in rows)
    said += ["±: one standard error."] if any("±" in cell for cell in cells) else []
    return " ".join([*said, *(["*: shipped checkpoint."] if shipped else [])])
