"""Tables of comparison rows as people read them: columns, legends, the comparison itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from tasks.report.comparison import ComparisonRow, Measured, RowRules, shown_name
from tasks.report.render import DASH, Column, Table, make_table, number_column, shown
from umim_core.adaptation.settings import ADAPTED, BASE, WT
from umim_core.config.recipe import DEFAULT_TASK

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


SETTINGS: Final = (
    "τ: how often a span occurs in the corpus to be merged; positions: whether the module sees "
    "where in its span a token stands. WT: trained on the corpus, with its spans; WT + Rules: with "
    "the task's spans, not trained further; WT + FT: trained on the task; Task-Adapted: then on "
    "its answers (DPO)."
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
        Column(
            "backbone", lambda r: shown_name(r.cell.backbone) + " *" * (r.source == "shipped"), True
        ),
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
