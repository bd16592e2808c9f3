"""The stages of a run that belong to one trained checkpoint, found by digests."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tasks.report.render import Report
from tasks.run.stage import STAGE_SCHEMA, Artifact
from tasks.stages.distill import dtype_key
from umim_core.checkpoint.checkpoint_files import read_config
from umim_core.config.form import ModuleForm
from umim_core.config.recipe import Recipe
from umim_core.errors import ConfigError
from umim_core.store.artifacts import canonical_json, directory_digest, read_manifest
from umim_core.task_sets.spec import TASKS

_MERGES: Final = {"prompt": "context", "all": "all"}  # as stage task-score records them


@dataclass(frozen=True)
class Trail:
    """Stages of a run that belong to one checkpoint.

    Attributes:
        distilled: The training.
        evaluated: Alignment and perplexity of the checkpoint.
        tokenized: Token ids that it was measured on.
        corpus: What they are of.
        scores: Scores of the recipe's first task by ``base`` and ``umim``; nothing for a run
            without a task.
    """

    distilled: Artifact
    evaluated: Artifact
    tokenized: Artifact
    corpus: Artifact
    scores: dict[str, Artifact]


def trail(checkpoint: Path, recipe: Recipe) -> Trail:
    """Find the stages of a checkpoint below the artifact root that it lies in.

    Raises:
        ConfigError: If it was not trained or measured there as the recipe says.
    """
    root, digest = checkpoint.parents[2], directory_digest(checkpoint)
    distilled = _artifact(checkpoint.parent, "distill")
    check_training(distilled, recipe)
    device, dtype = recipe.placement
    placed = {"device": device, **dtype_key(dtype)}
    asked = {
        **recipe.evaluate.model_dump(exclude={"task_questions"}),
        "segment_length": recipe.segment_length,
        **placed,
    }
    evaluated = _one(
        (
            artifact
            for artifact in _finished(root, "evaluate")
            if artifact.manifest()["inputs"]["checkpoint"] == digest
            and artifact.manifest()["config"] == asked
        ),
        f"the checkpoint must have been evaluated as the recipe {recipe.name} says",
        checkpoint,
    )
    tokenized = _with_digest(root, ("tokenize",), evaluated.manifest()["inputs"]["tokens"])
    corpus = _with_digest(root, ("mixture",), tokenized.manifest()["inputs"]["corpus"])
    base = read_config(checkpoint).backbone_fingerprint
    scores = scores_of(root, recipe, {"umim": digest, "base": base}, placed)
    return Trail(distilled, evaluated, tokenized, corpus, scores)


def adapted_point(checkpoint: Path, report: Report) -> tuple[Report, Report]:
    """Return the backbone and the point of an adaptation's results that are of a checkpoint.

    Args:
        checkpoint: Directory of a trained setting, below the artifact root that it was scored in.
        report: Content of ``adaptation.json``.

    Raises:
        ConfigError: If none of its points was measured on this checkpoint.
    """
    trained = _artifact(checkpoint.parent, checkpoint.parent.parent.name)
    for scores in _finished(checkpoint.parents[2], "choice-scores"):
        manifest = scores.manifest()
        if manifest["inputs"]["model"] != trained.digest:
            continue
        own = {name: manifest["config"][name] for name in ("setting", "tau", "seed")}
        own |= scores.metrics
        for place in report["backbones"]:
            for point in place["points"]:
                if own.items() <= point.items():
                    return place, point
    raise ConfigError(
        f"the results must hold a point that was measured on {checkpoint}",
        f"adaptation {report['name']}",
        "Name the results of the run that trained it, and a checkpoint that it scored.",
    )


def check_training(distilled: Artifact, recipe: Recipe) -> None:
    """Refuse a recipe without a cell that is trained as the checkpoint was.

    Later fields are left out of a stage's key where they have their default, so both sides are
    compared with those of the other.

    Raises:
        ConfigError: If every cell differs; it names what the nearest one does.
    """
    config = distilled.manifest()["config"]
    own = {name: config[name] for name in ("seed", "segment_length")}
    trained: dict[str, Any] = config["train"] | own | ModuleForm.model_validate(config).form()
    shared = {name: getattr(recipe, name) for name in own}
    differences = []
    for cell in recipe.cells:
        optimisation = recipe.distill.model_dump(mode="json")
        asked: dict[str, Any] = optimisation | shared | cell.form()
        names = [n for n in (trained | asked) if trained.get(n) != asked.get(n)]
        differences.append({name: trained.get(name) for name in names})
    if other := min(differences, key=len):
        raise ConfigError(
            f"the checkpoint must have been trained as the recipe {recipe.name} says",
            other,
            "Name the recipe that was run, as it was then.",
        )


def scores_of(
    root: Path, recipe: Recipe, models: dict[str, str], placed: dict[str, object]
) -> dict[str, Artifact]:
    """Return the scores of the recipe's first task, of both models on the same questions."""
    if recipe.task is None:
        return {}
    task, scores = TASKS.find(recipe.tasks[0]), dict[str, Artifact]()
    questions: str | None = None
    for side, merge in (("umim", _MERGES[task.merge]), ("base", "none")):
        asked: dict[str, Any] = {
            "merge": merge,
            "questions": recipe.evaluate.task_questions,
            **placed,
        }
        asked |= json.loads(canonical_json(task.key()))  # no ``method``: that is a baseline's
        inputs = {"model": models[side]} | ({} if questions is None else {"task": questions})
        scores[side] = _one(
            (
                score
                for score in _finished(root, "task-score")
                if score.manifest()["config"] == asked
                and inputs.items() <= score.manifest()["inputs"].items()
            ),
            f"{side} must have been scored on {task.name} as the recipe {recipe.name} says",
            root,
        )
        questions = scores[side].manifest()["inputs"]["task"]
    return scores


def _finished(root: Path, stage: str) -> Iterator[Artifact]:
    for manifest in sorted((root / stage).glob("*/manifest.json")):
        if manifest.parent.suffix == "":
            yield _artifact(manifest.parent, stage)


def _artifact(path: Path, stage: str) -> Artifact:
    record: Any = read_manifest(path, kind="stage", schema=STAGE_SCHEMA, verify=False)
    return Artifact(stage, record["key"], path, record["digest"], executed=False)


def _with_digest(root: Path, stages: Sequence[str], digest: str) -> Artifact:
    every = (artifact for stage in stages for artifact in _finished(root, stage))
    rule = f"the run's {' or '.join(stages)} must be under the same root"
    return _one((artifact for artifact in every if artifact.digest == digest), rule, root)


def _one(artifacts: Iterator[Artifact], rule: str, where: Path) -> Artifact:
    for artifact in artifacts:
        return artifact
    raise ConfigError(rule, str(where), "Run the recipe to its end, then ship its checkpoint.")
