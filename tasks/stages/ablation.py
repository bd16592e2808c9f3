"""Stage ``ablation``: comparison of a recipe's cells as data, page and figures.

Page and figures are made of the data alone: ``python -m docs.make`` makes them again from a
committed file.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from tasks.report.ablation_page import (
    FIGURES,
    AblationCell,
    AblationData,
    Budget,
    ablation_page,
    ablation_table,
    figure_png,
    figure_svg,
    read_ablation,
)
from tasks.report.compare import CellResult, comparison_rows, rule_counts
from tasks.report.comparison import ComparisonRow
from tasks.report.tables import table_text
from tasks.run.stage import Artifact, Metrics, StageSpec, run_stage
from tasks.stages.publish import host
from umim_core.adaptation.settings import WT
from umim_core.config.recipe import Recipe
from umim_core.store.artifacts import MANIFEST, write_json
from umim_core.store.disk import write_bytes


def ablation_stage(root: Path, recipe: Recipe, results: list[CellResult]) -> Artifact:
    """Write ``<recipe>.json``, its page ``<recipe>.md`` and the figures (SVG and PNG)."""
    measured = {
        f"{number}:evaluate": result.evaluations[WT].key for number, result in enumerate(results)
    }
    inputs = {
        f"{number}:{name}": artifact.digest
        for number, result in enumerate(results)
        for name, artifact in (("rules", result.filtered), *result.settings.items())
    }
    spec = StageSpec(
        "ablation", 2, {"recipe": recipe.model_dump(mode="json"), "measured": measured}, inputs
    )

    def build(out: Path) -> Metrics:
        data = ablation_data(recipe, results)
        write_json(out / f"{data.name}.json", json.loads(data.model_dump_json()))
        write_bytes(out / f"{data.name}.md", ablation_page(data).encode())
        for name in FIGURES:
            write_bytes(out / f"{data.name}-{name}.svg", figure_svg(data, name).encode())
            write_bytes(out / f"{data.name}-{name}.png", figure_png(data, name))
        return {"cells": float(len(data.cells))}

    return run_stage(root, spec, build)


def ablation_data(recipe: Recipe, results: list[CellResult]) -> AblationData:
    """Gather everything an ablation found."""
    alone = [replace(result, baselines={}) for result in results]
    rows = [row for row in comparison_rows(alone, [], recipe.seed) if row.setting == WT]
    trained = [result.settings[WT] for result in results]
    return AblationData(
        name=recipe.name,
        description=recipe.description,
        seed=recipe.seed,
        budget=Budget(
            steps=recipe.distill.max_steps,
            rows=recipe.distill.batch_size,
            tokens=recipe.segment_length,
        ),
        evaluation=recipe.evaluate.model_dump(include={"alignment_rows", "perplexity_rows"}),
        recipe=recipe.model_dump(mode="json"),
        machine=host(),
        versions=_versions(trained),
        cells=tuple(
            _cell(result, row, artifact)
            for result, row, artifact in zip(results, rows, trained, strict=True)
        ),
    )


def _versions(trained: list[Artifact]) -> dict[str, str]:
    """Return the libraries of all trainings, every version that one of them used."""
    by_library: dict[str, dict[str, None]] = {}  # in the order of the cells
    for artifact in trained:
        for name, version in artifact.manifest()["facts"]["versions"].items():
            by_library.setdefault(name, {})[str(version)] = None
    return {name: " and ".join(versions) for name, versions in by_library.items()}


def _cell(result: CellResult, row: ComparisonRow, trained: Artifact) -> AblationCell:
    facts, evaluated = trained.manifest()["facts"], result.evaluations[WT].metrics
    return AblationCell(
        row=row,
        rules=rule_counts(result.filtered.path / "rules"),
        collision_rate=result.filtered.metrics.get("collision_rate"),
        training=trained.metrics | {"seconds": float(facts["seconds"])},
        trained_on=str(facts["platform"]),
        further={name: value for name, value in evaluated.items() if name not in row.metrics},
    )


def ablation_summary(artifact: Artifact) -> str:
    """Return the table for a terminal, and where the files are."""
    files = sorted(str(path) for path in artifact.path.iterdir() if path.name != MANIFEST)
    return "\n".join([table_text(ablation_table(read_ablation(artifact))), *files])
