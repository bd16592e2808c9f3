"""Stages of a task's adaptation curves.

    choices        the task's questions in three splits
    start          a checkpoint that the settings begin with, as an artifact
    control        as many parameters trained on the same answers, without merging
    choice-scores  scores of every answer of the test questions, and the difference to the base
    adaptation     all points of the curves as data, page and figure

What lies between them (rules of the task, SFT, DPO) are the stages of ``stages/train``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Final

from tasks.cluster.lease import ClusterLease
from tasks.cluster.worker_tasks import call_on_worker
from tasks.paper.adaptation_page import RULES_ALONE, adaptation_page, adaptation_svg
from tasks.run.stage import Artifact, Metrics, StageSpec, run_stage
from tasks.stages.corpus import form_key, form_of
from tasks.stages.train import cell_job, dtype_key, preference_job, question_digests, training_key
from tasks.training.train_worker import launch
from umim_core.adaptation.choices import encode_questions, split_questions
from umim_core.adaptation.control import load_control
from umim_core.adaptation.settings import WT, adaptation_steps
from umim_core.backbone.fingerprint import backbone_identity, tokenizer_fingerprint
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.checkpoint.checkpoint_files import read_config, resolve_checkpoint
from umim_core.config.adaptation_recipe import (
    AdaptationRecipe,
    DocstringQuestions,
    HarnessQuestions,
)
from umim_core.config.recipe import Cell
from umim_core.errors import ConfigError
from umim_core.evaluation.paired_differences import mean_difference_error
from umim_core.evaluation.questions import ChoiceScores, score_choices
from umim_core.evaluation.sizes import Sizes
from umim_core.model.umim import UMIM
from umim_core.store.artifacts import (
    canonical_json,
    directory_digest,
    read_json,
    sha256_bytes,
    write_json,
)
from umim_core.store.disk import write_bytes, write_rows
from umim_core.task_sets.spec import SPLITS, Question, QuestionForm, TaskSplit, read_questions
from umim_core.training.train_job import read_summary

SCORES: Final = "scores.json"
RESULT: Final = "adaptation"
Report = dict[str, object]
_TRAINED: Final = ("steps", "best_step", "skipped")
_SHOWN: Final = ["name", "description", "figure", "taus", "seeds", "overlap", "max_tokens", "dtype"]


def choices_stage(root: Path, recipe: AdaptationRecipe) -> Artifact:
    """Write ``train.jsonl``, ``valid.jsonl`` and ``test.jsonl`` of the recipe's questions."""
    form, questions = _form_and_questions(recipe)
    splits = split_questions(questions, recipe.sizes.model_dump())
    rows = {split: [asdict(question) for question in part] for split, part in splits.items()}
    spec = StageSpec(
        "choices",
        1,
        {"task": recipe.task_name, "form": vars(form)},
        {"questions": sha256_bytes(canonical_json(rows).encode())},
    )

    def build(out: Path) -> Metrics:
        for split, part in rows.items():
            write_rows(out / f"{split}.jsonl", part)
        return {f"questions_{split}": float(len(part)) for split, part in rows.items()}

    return run_stage(root, spec, build)


def _form_and_questions(
    recipe: AdaptationRecipe,
) -> tuple[QuestionForm, Mapping[TaskSplit, Sequence[Question]]]:
    """Return form and questions of the recipe's source."""
    source = recipe.questions
    if isinstance(source, HarnessQuestions):
        from umim_core.evaluation.tasks.lm_eval_tasks import harness_questions

        form, questions = harness_questions(source.task, Path(source.hub) if source.hub else None)
        return QuestionForm(form.prompt, form.delimiter, recipe.part), questions
    if isinstance(source, DocstringQuestions):
        raise ConfigError(
            "questions of docstrings are made from their corpus", source.kind, "Use stage task."
        )
    paths: dict[TaskSplit, str | None] = {
        "train": source.train,
        "valid": source.valid,
        "test": source.test,
    }
    questions = {split: read_questions(path) for split, path in paths.items() if path is not None}
    form = QuestionForm(source.prompt, source.delimiter, recipe.part)
    return form, questions


def start_stage(root: Path, checkpoint: str) -> Artifact:
    """Take over a checkpoint that exists; the artifact holds ``checkpoint``."""
    directory = resolve_checkpoint(checkpoint).resolve()
    spec = StageSpec("start", 1, {}, {"checkpoint": directory_digest(directory)})

    def build(out: Path) -> Metrics:
        (out / "checkpoint").mkdir()
        Checkpoint.load(directory).write(out / "checkpoint")
        return {}

    return run_stage(root, spec, build)


def cell_of(checkpoint: str) -> Cell:
    """Return backbone and form of a checkpoint's module as a recipe's cell has them."""
    config = read_config(resolve_checkpoint(checkpoint))
    form = config.form()
    return Cell(backbone=config.backbone, revision=config.backbone_revision, **form)


def control_stage(
    root: Path,
    lease: ClusterLease,
    recipe: AdaptationRecipe,
    cell: Cell,
    task: Artifact,
    control: str,
) -> Artifact:
    """Train a control by preferences between answers; the artifact holds ``control``."""
    optimisation = recipe.control_config(control)
    config = training_key(recipe, cell, optimisation) | {
        "control": control,
        "max_tokens": recipe.max_tokens,
        **form_key(task),
    }
    inputs = {
        "backbone": backbone_identity(cell.backbone, cell.revision),
        "tokenizer": tokenizer_fingerprint(load_tokenizer(cell.backbone, revision=cell.revision)),
        **question_digests(task, "train", "valid"),
    }

    def build(out: Path) -> Metrics:
        job = cell_job(recipe, cell, optimisation, out, None, recipe.max_tokens)
        return launch(replace(preference_job(job, task), control=control), lease)

    return run_stage(root, StageSpec("control", 1, config, inputs, resumable=True), build)


@dataclass(frozen=True)
class ScoredModel:
    """A way to use a backbone, whose accuracy is measured."""

    setting: str
    artifact: Artifact
    control: Artifact | None = None
    tau: int | None = None
    seed: int | None = None


def choice_scores_stage(
    root: Path,
    lease: ClusterLease,
    recipe: AdaptationRecipe,
    task: Artifact,
    model: ScoredModel,
    base: Artifact | None,
) -> Artifact:
    """Score the test questions; the artifact holds ``scores.json``."""
    checkpoint = model.artifact.path / "checkpoint"
    if base is None:
        config = read_config(checkpoint)
        scored = {"model": config.backbone_fingerprint, "tokenizer": config.tokenizer_fingerprint}
    else:
        scored = {"model": (model.control or model.artifact).digest, "base": base.digest}
    spec = StageSpec(
        "choice-scores",
        2,
        {
            "setting": model.setting,
            "tau": model.tau,
            "seed": model.seed,
            "max_tokens": recipe.max_tokens,
            "batch_size": recipe.batch_size,
            "device": recipe.cluster.device,
            **dtype_key(recipe.dtype),
            **form_key(task),
        },
        {"task": task.digest, **scored},
    )

    def build(out: Path) -> Metrics:
        scored = partial(score_task_choices, model, task, recipe, merged=base is not None)
        scores = call_on_worker(lease, scored)
        write_json(out / SCORES, asdict(scores))
        return compared(scores, None if base is None else read_scores(base))

    return run_stage(root, spec, build)


def score_task_choices(
    model: ScoredModel, task: Artifact, recipe: AdaptationRecipe, *, merged: bool
) -> ChoiceScores:
    """Load a model and score the test questions of a task."""
    merged_model = UMIM.from_pretrained(
        model.artifact.path / "checkpoint", dtype=recipe.dtype, device=recipe.cluster.device
    ).merged_model
    if model.control is not None:
        merged_model = load_control(model.control.path / "control", merged_model.backbone)
    elif not merged:
        merged_model = merged_model.base()
    questions = encode_questions(
        read_questions(task.path / "test.jsonl"),
        merged_model.backbone.encode,
        form_of(task),
        recipe.max_tokens,
    )
    return score_choices(questions, merged_model, recipe.batch_size)


def read_scores(artifact: Artifact) -> ChoiceScores:
    """Return the scores that the stage ``choice-scores`` wrote."""
    body = read_json(artifact.path / SCORES)
    return ChoiceScores(**{**body, "total": Sizes(**body["total"])})


def compared(own: ChoiceScores, base: ChoiceScores | None) -> Metrics:
    """Return a model's figures, and their differences to the base model paired by question."""
    figures = {"accuracy": own.hits(), "margin": own.margins()}
    metrics: Metrics = {
        "questions": float(len(own.golds)),
        "token_reduction": own.total.context_token_reduction or 0.0,
        "input_reduction": own.total.token_reduction,
    }
    zeros = [0.0] * len(own.golds)
    for name, values in figures.items():
        metrics |= paired(name, values, zeros)
    if base is None:
        return metrics
    before = {"accuracy": base.hits(), "margin": base.margins()}
    metrics |= paired("difference", figures["accuracy"], before["accuracy"])
    metrics |= paired("margin_difference", figures["margin"], before["margin"])
    pairs = list(zip(figures["accuracy"], before["accuracy"], strict=True))
    return metrics | {
        "gained": float(sum(now > then for now, then in pairs)),
        "lost": float(sum(now < then for now, then in pairs)),
    }


def paired(name: str, own: Sequence[float], base: Sequence[float]) -> Metrics:
    """Return the mean of own - base, and its standard error where there are two questions."""
    error = mean_difference_error(own, base)
    mean = sum(a - b for a, b in zip(own, base, strict=True)) / len(own)
    return {name: mean} | ({} if error is None else {f"{name}_se": error})


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


def _point(point: ScoredPoint) -> Report:
    model, trained = point.model, point.model.control or point.model.artifact
    summary = {} if model.seed is None else read_summary(trained.path)
    config = read_config(model.artifact.path / "checkpoint")
    return {
        "setting": model.setting,
        "kind": "setting" if model.control is None else "control",
        "tau": model.tau,
        "seed": model.seed,
        "rules": None if point.rules is None else round(sum(point.rules.metrics.values())),
        "rule_rows": None if model.control is not None else config.rule_rows,
        **point.scores.metrics,
        **{name: summary.get(name) for name in _TRAINED},
    }
