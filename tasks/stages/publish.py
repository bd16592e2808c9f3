"""Stage ``report``: gather what a pipeline measured and write its pages."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import numpy as np

from tasks.report.compare import CellResult, ShippedResult, cell_row, comparison_rows
from tasks.report.report_data import (
    AttentionExample,
    BreakEvenRow,
    CheckpointPlace,
    LossCurve,
    Point,
    ReportData,
    RuleCounts,
    SimilarityRow,
    SpanExample,
    SpeedRow,
)
from tasks.report.report_page import write_report
from tasks.report.row_labels import shown_name
from tasks.run.stage import Artifact, Metrics, StageSpec, run_stage
from tasks.stages.benchmark import throughput_rows
from tasks.stages.corpus import tokens
from umim_core import UMIM
from umim_core.adaptation.settings import WT, find_setting
from umim_core.benchmarking.break_even import BreakEven, break_even
from umim_core.benchmarking.measured_speed import ThroughputRow
from umim_core.config.recipe import Recipe
from umim_core.distill.train_run import read_curve
from umim_core.evaluation.attention_maps import attention_maps
from umim_core.evaluation.surrogate_similarity import surrogate_similarity
from umim_core.model.showing import unit_texts
from umim_core.task_sets.spec import DEFAULT_TASK

_EXAMPLE_TOKENS = 160
_ATTENTION_TOKENS = 32
_SIMILARITY_TOKENS = 4096
_PAIRS = 0.5  # two tokens are always one unit
_CHANCE = 0.25  # the embedded task has four choices


def report_stage(
    root: Path,
    recipe: Recipe,
    cells: list[CellResult],
    shipped: list[ShippedResult],
    links: dict[str, str],
) -> Artifact:
    """Write ``report.html``, ``report.md`` and ``report.json``."""
    inputs = {
        f"{number}:{name}": artifact.digest
        for number, result in enumerate(cells)
        for name, artifact in (
            ("rules", result.filtered),
            *(() if result.benchmark is None else (("benchmark", result.benchmark),)),
            *result.settings.items(),
        )
    }
    measured = {
        f"{number}:{name}": artifact.key
        for number, result in enumerate((*cells, *shipped))
        for name, artifact in _measurements(result)
    }
    spec = StageSpec(
        "report", 3, {"recipe": recipe.model_dump(mode="json"), "measured": measured}, inputs
    )

    def build(out: Path) -> Metrics:
        write_report(out, report_data(recipe, cells, shipped, links))
        return {"rows": float(len(comparison_rows(cells, shipped, recipe.seed)))}

    return run_stage(root, spec, build)


def _measurements(result: CellResult | ShippedResult) -> list[tuple[str, Artifact]]:
    if isinstance(result, CellResult):
        found = [(f"evaluate {name}", artifact) for name, artifact in result.evaluations.items()]
    else:
        found = [("evaluate", result.evaluation)]
    for (task, setting), artifact in result.scores.items():
        found.append(
            (f"score {setting}" if task == DEFAULT_TASK else f"score {task} {setting}", artifact)
        )
    return found + ([("benchmark", result.benchmark)] if result.benchmark else [])


def report_data(
    recipe: Recipe, cells: list[CellResult], shipped: list[ShippedResult], links: dict[str, str]
) -> ReportData:
    """Gather everything the report shows."""
    rows = comparison_rows(cells, shipped, recipe.seed)
    speeds = [_measured_speeds(result) for result in (*cells, *shipped)]
    examples = _Examples(cells, shipped)
    return ReportData(
        recipe=recipe.name,
        config=recipe.model_dump(mode="json"),
        host=host(),
        rows=tuple(rows),
        checkpoints=_places(cells, shipped),
        curves=tuple(curve for result in cells for curve in _curves(result)),
        throughput=tuple(row for rows, _ in speeds for row in rows),
        break_even=tuple(start for _, starts in speeds for start in starts),
        rule_counts=tuple(_rule_counts(result) for result in cells),
        examples=(examples.example(),),
        attention=examples.attention(),
        similarity=examples.similarity(),
        chance=_CHANCE if any(result.scores for result in cells) else None,
        links=links,
    )


def _places(cells: list[CellResult], shipped: list[ShippedResult]) -> tuple[CheckpointPlace, ...]:
    trained = [
        CheckpointPlace(
            label=f"{cell_row(result.cell).label}, {setting}",
            path=str(artifact.path / "checkpoint"),
        )
        for result in cells
        for setting, artifact in result.settings.items()
    ]
    found = [CheckpointPlace(label=f"{shown_name(s.name)}, shipped", path=s.name) for s in shipped]
    return tuple(trained + found)


class _Examples:
    """Examples on held-out text, from the first shipped checkpoint or else the first trained."""

    def __init__(self, cells: list[CellResult], shipped: list[ShippedResult]) -> None:
        source = shipped[0].name if shipped else str(cells[0].settings[WT].path / "checkpoint")
        self._label = f"{shown_name(source)} on held-out text" if shipped else "held-out text"
        self._umim = UMIM.from_pretrained(source)
        self._ids = np.array(tokens(cells[0].tokenized, "test")[:_SIMILARITY_TOKENS], np.int64)

    def example(self) -> SpanExample:
        """Cut the text."""
        umim = self._umim
        compression = umim.compress(umim.backbone.decode(self._ids[:_EXAMPLE_TOKENS].tolist()))
        return SpanExample(
            label=self._label,
            spans=tuple(zip(compression.units, compression.unit_lengths, strict=True)),
        )

    def attention(self) -> AttentionExample:
        """Look at the last layer."""
        umim, ids = self._umim, self._ids[:_ATTENTION_TOKENS]
        maps = attention_maps(ids, umim.compressed)
        return AttentionExample(
            label=f"{self._label}, layer {maps.layer + 1}, mean over heads",
            units=unit_texts(ids.tolist(), maps.lengths, umim.backbone.decode),
            tokens=maps.lengths,
            before=tuple(tuple(row) for row in maps.before.tolist()),
            after=tuple(tuple(row) for row in maps.after.tolist()),
        )

    def similarity(self) -> tuple[SimilarityRow, ...]:
        """Compare the surrogates of the text with their tokens; nothing where none was merged."""
        umim = self._umim
        cut = zip(*umim.matcher.segment(self._ids), strict=True)
        spans = {tuple(self._ids[s : s + n].tolist()) for s, n in cut if n > 1}
        if not spans:
            return ()
        found = surrogate_similarity(sorted(spans), umim.compressed)
        return tuple(SimilarityRow(**vars(row)) for row in found)


def host() -> dict[str, str]:
    """Return facts of this machine, in the order to be shown."""
    return {
        "platform": platform.platform(),
        "processor cores": str(os.cpu_count()),
        "python": platform.python_version(),
    }


def _curves(result: CellResult) -> list[LossCurve]:
    found = []
    for setting, artifact in result.settings.items():
        training = find_setting(setting).training
        if training == "none":
            continue
        curve = read_curve(artifact.path)
        preference = training == "dpo"
        names = ("train_loss", "valid_loss") if preference else ("train_kl", "valid_kl")
        train, validation = (
            tuple[Point, ...]((int(row["step"]), row[name]) for row in curve if name in row)
            for name in names
        )
        found.append(
            LossCurve(
                label=f"{cell_row(result.cell).label}, {setting}",
                train=train,
                validation=validation,
                quantity="preference" if preference else "KL",
            )
        )
    return found


def _measured_speeds(
    result: CellResult | ShippedResult,
) -> tuple[list[SpeedRow], list[BreakEvenRow]]:
    """Return the speeds of a checkpoint, and from which length on it pays."""
    if result.benchmark is None:
        return [], []
    cell = isinstance(result, CellResult)
    name = cell_row(result.cell).label if cell else f"{shown_name(result.name)} (shipped)"
    rows = throughput_rows(result.benchmark)
    speeds = [
        SpeedRow(
            label=f"{name}, {_rules_label(row)}",
            phase=row.phase,
            prompt_tokens=row.prompt_tokens,
            batch_size=row.batch_size,
            base_tokens_per_s=row.base_tokens_per_s,
            umim_tokens_per_s=row.umim_tokens_per_s,
            token_reduction=row.token_reduction,
            bound=row.bound,
            base_kv_bytes=row.base_kv_bytes,
            umim_kv_bytes=row.umim_kv_bytes,
        )
        for row in rows
    ]
    starts = [
        BreakEvenRow(
            label=f"{name}, {_rules_label(found)}",
            phase=found.phase,
            batch_size=found.batch_size,
            prompt_tokens=found.prompt_tokens,
            pays_from=found.pays_from,
        )
        for found in break_even(rows)
    ]
    return speeds, starts


def _rules_label(of: ThroughputRow | BreakEven) -> str:
    """Return the rules for people; pairs are those of 50 % unless they say otherwise."""
    if of.asked_reduction is None:
        return "natural rules"
    return "pairs" if of.asked_reduction == _PAIRS else f"pairs at {100 * of.asked_reduction:.3g} %"


def _rule_counts(result: CellResult) -> RuleCounts:
    metrics = result.filtered.metrics
    return RuleCounts(
        label=cell_row(result.cell).label,
        **{
            name: {n: int(metrics[f"{name}_{n}"]) for n in (2, 3, 4)}
            for name in ("raw", "overlap", "rules")
        },
    )
