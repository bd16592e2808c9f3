"""Stage ``adaptation``: all points of a task's adaptation curves as data, page and figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Final

from tasks.paper.adaptation_page import adaptation_page, adaptation_svg
from tasks.paper.adaptation_rows import RULES_ALONE
from tasks.run.stage import Artifact, Metrics, StageSpec, run_stage
from tasks.stages.adaptation import ScoredModel, paired, read_scores
from tasks.stages.corpus import form_key, form_of
from umim_core.adaptation.settings import WT, adaptation_steps
from umim_core.checkpoint.checkpoint_files import read_config
from umim_core.config.adaptation_recipe import AdaptationRecipe
from umim_core.store.artifacts import write_json
from umim_core.store.disk import write_bytes
from umim_core.task_sets.choice_questions import read_questions
from umim_core.task_sets.spec import SPLITS
from umim_core.training.train_run import read_summary

RESULT: Final = "adaptation"
Report = dict[str, object]
_TRAINED: Final = ("steps", "best_step", "skipped")


@dataclass(frozen=True)
class ScoredPoint:
    """A model of a curve with its scores, and the task's rules that it merges by."""

    model: ScoredModel
    scores: Artifact
    rules: Artifact | None = None


@dataclass(frozen=True)
class Curve:
    """Everything measured of one checkpoint: its base model, and the points."""

    checkpoint: str
    start: Artifact
    base: Artifact
    points: Sequence[ScoredPoint]


def adaptation_stage(
    root: Path, recipe: AdaptationRecipe, task: Artifact, curves: Sequence[Curve]
) -> Artifact:
    """Write ``adaptation.json``, its page ``adaptation.md`` and its figure ``adaptation.svg``."""
    dumped = recipe.model_dump(mode="json")
    inputs = {"task": task.digest} | {
        f"{number}:{place}": point.digest
        for number, curve in enumerate(curves)
        for place, point in enumerate([curve.base, *(point.scores for point in curve.points)])
    }

    def build(out: Path) -> Metrics:
        body: Report = {
            "kind": RESULT,
            "task": recipe.task_name,
            "chance": _chance(task),
            "questions": {
                split: len((task.path / f"{split}.jsonl").read_text("utf-8").splitlines())
                for split in SPLITS
            },
            **{name: dumped[name] for name in _SHOWN},
            "question_digests": {split: task.file_digest(f"{split}.jsonl") for split in SPLITS},
            "part": form_of(task).part,
            **_trainings(recipe),
            "backbones": [_backbone(curve) for curve in curves],
        }
        write_json(out / f"{RESULT}.json", body)
        write_bytes(out / f"{RESULT}.md", adaptation_page(body).encode())
        write_bytes(out / f"{RESULT}.svg", adaptation_svg(body).encode())
        return {"points": float(sum(len(curve.points) for curve in curves))}

    return run_stage(
        root, StageSpec(RESULT, 5, {"recipe": dumped, **form_key(task)}, inputs), build
    )


_SHOWN: Final = ["name", "description", "figure", "taus", "seeds", "overlap", "max_tokens", "dtype"]


def _trainings(recipe: AdaptationRecipe) -> Report:
    """Return how each training was run; nothing of one that no setting and no control needs."""
    run = {step.training for step in adaptation_steps(recipe.settings)}
    trainings = {"sft": recipe.sft, "dpo": recipe.dpo}
    return {
        **{name: by.model_dump(mode="json") for name, by in trainings.items() if name in run},
        "control_dpo": {
            name: recipe.control_config(name).model_dump(mode="json") for name in recipe.controls
        },
    }


def _chance(task: Artifact) -> float:
    """Return the accuracy of guessing on the test questions."""
    return fmean(1 / len(question.choices) for question in read_questions(task.path / "test.jsonl"))


def _against(point: ScoredPoint, points: Sequence[ScoredPoint]) -> Report:
    """Return what a trained setting gains over WT, over the rules alone, and over the controls.

    All are paired by question; the rules are of its threshold, the controls of its seed.
    """
    own = point.model
    if own.seed is None or own.control is not None:
        return {}
    others = [
        other
        for other in points
        if (other.model.setting, other.model.tau) in ((WT, None), (RULES_ALONE, own.tau))
        or (other.model.control is not None and other.model.seed == own.seed)
    ]
    hits = read_scores(point.scores).hits()
    return {
        "against": {
            other.model.setting: paired("difference", hits, read_scores(other.scores).hits())
            for other in others
        }
    }


def _backbone(curve: Curve) -> Report:
    config = read_config(curve.start.path / "checkpoint")
    points = [_point(point) | _against(point, curve.points) for point in curve.points]
    return {
        "checkpoint": curve.checkpoint,
        "backbone": config.backbone,
        "backbone_fingerprint": config.backbone_fingerprint,
        "base": dict(curve.base.metrics),
        "points": points,
    }


def _rule_rows(trained: Artifact) -> int:
    return read_config(trained.path / "checkpoint").rule_rows


def _point(point: ScoredPoint) -> Report:
    model, trained = point.model, point.model.control or point.model.artifact
    summary = {} if model.seed is None else read_summary(trained.path)
    return {
        "setting": model.setting,
        "kind": "setting" if model.control is None else "control",
        "tau": model.tau,
        "seed": model.seed,
        "rules": None if point.rules is None else round(sum(point.rules.metrics.values())),
        "rule_rows": None if model.control is not None else _rule_rows(model.artifact),
        **point.scores.metrics,
        **{name: summary.get(name) for name in _TRAINED},
    }
