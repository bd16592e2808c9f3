"""Stages of a task's adaptation curves.

    choices        the task's questions in three splits
    start          a checkpoint that the settings begin with, as an artifact
    choice-scores  scores of every answer of the test questions, and the difference to the base
    adaptation     all points of the curves as data, page and figure

What lies between them (rules of the task, SFT, DPO, controls) are the stages of ``stages/train``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, Final, cast

from tasks.report.adaptation import RULES_ALONE, adaptation_page, adaptation_svg
from tasks.run.stage import Artifact, Digest, Metrics, Site, stage
from tasks.stages.named import NamedCheckpoint, Questions
from umim_core.adaptation.choices import split_questions
from umim_core.adaptation.control import load_control
from umim_core.adaptation.settings import BASE, WT, adaptation_steps
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.checkpoint.checkpoint_files import named_config, read_config
from umim_core.config.adaptation_recipe import AdaptationRecipe, HarnessQuestions, QuestionFiles
from umim_core.config.model_base import SPLITS, Split
from umim_core.config.recipe import Cell
from umim_core.evaluation.questions import QuestionScores, score_choices
from umim_core.evaluation.sizes import Sizes
from umim_core.evaluation.standard_errors import mean_difference_error
from umim_core.model.umim import UMIM
from umim_core.store.artifacts import json_digest, read_json, sha256_file, write_json
from umim_core.store.disk import write_bytes, write_rows
from umim_core.task_sets.spec import Question, QuestionForm, read_questions
from umim_core.training.train_job import read_summary

SCORES: Final = "scores.json"
RESULT: Final = "adaptation"
Report = dict[str, object]
_TRAINED: Final = ("steps", "best_step", "skipped")
_SHOWN: Final = ["name", "description", "figure", "taus", "seeds", "overlap", "max_tokens", "dtype"]


@dataclass(frozen=True)
class ChoiceTask:
    """The questions that an adaptation recipe names, of files or of lm-eval, in three splits."""

    recipe: AdaptationRecipe

    @cached_property
    def asked(self) -> tuple[QuestionForm, Mapping[Split, Sequence[Question]]]:
        """How they are asked, and the questions of every split."""
        source = self.recipe.questions
        if isinstance(source, HarnessQuestions):
            from umim_core.evaluation.tasks.lm_eval_tasks import harness_questions

            hub = Path(source.hub) if source.hub else None
            form, questions = harness_questions(source.task, hub)
            form = replace(form, part=self.recipe.part)
        else:
            files = cast(QuestionFiles, source)  # those of docstrings are made by stage task
            form = QuestionForm(files.prompt, files.delimiter, self.recipe.part)
            paths: dict[Split, str | None] = {s: getattr(files, s) for s in SPLITS}
            questions = {s: read_questions(path) for s, path in paths.items() if path is not None}
        sizes = {split: getattr(self.recipe.sizes, split) for split in SPLITS}
        return form, split_questions(questions, sizes)

    def identity(self) -> dict[str, object]:
        form, splits = self.asked
        rows = {split: [asdict(question) for question in part] for split, part in splits.items()}
        digest = Digest(json_digest(rows))
        return {"task": self.recipe.task_name, "form": form, "questions": digest}


@stage(version=2)
def choices_stage(out: Path, _: Site, *, task: ChoiceTask) -> Metrics:
    """Write ``train.jsonl``, ``valid.jsonl`` and ``test.jsonl`` of the recipe's questions."""
    splits = task.asked[1]
    for split, part in splits.items():
        write_rows(out / f"{split}.jsonl", map(asdict, part))
    return {f"questions_{split}": float(len(part)) for split, part in splits.items()}


@stage(version=2)
def start_stage(out: Path, _: Site, *, checkpoint: NamedCheckpoint) -> Metrics:
    """Take over a checkpoint that exists; the artifact holds ``checkpoint``."""
    Checkpoint.load(checkpoint.directory).write(out / "checkpoint")
    return {}


def cell_of(checkpoint: str) -> Cell:
    """Return backbone and form of a checkpoint's module as a recipe's cell has them."""
    config = named_config(checkpoint)
    place = {"backbone": config.backbone, "revision": config.backbone_revision}
    return Cell.model_validate(place | config.form())


@dataclass(frozen=True)
class ScoredModel:
    """A way to use a backbone, whose accuracy is measured."""

    setting: str
    artifact: Artifact
    control: Artifact | None = None
    tau: int | None = None
    seed: int | None = None

    def identity(self) -> dict[str, object]:
        """Return what is scored: of the base model its weights and tokenizer, no checkpoint."""
        named = {"setting": self.setting, "tau": self.tau, "seed": self.seed}
        if self.setting != BASE:
            return {**named, "model": self.control or self.artifact}
        config = read_config(self.artifact.path / "checkpoint")
        backbone, tokenizer = config.backbone_fingerprint, config.tokenizer_fingerprint
        return {**named, "model": Digest(backbone), "tokenizer": Digest(tokenizer)}


@stage(version=5, of_run=("device", "dtype"))
def choice_scores_stage(
    out: Path,
    site: Site,
    *,
    questions: Questions,
    model: ScoredModel,
    base: Artifact | None,
    max_tokens: int,
    batch_size: int,
) -> Metrics:
    """Score the test questions; the artifact holds ``scores.json``."""
    asked, form = read_questions(questions.file("test")), questions.form
    device, dtype = site.device, site.dtype

    def score() -> QuestionScores:
        directory = model.artifact.path / "checkpoint"
        merged_model = UMIM.from_pretrained(directory, dtype=dtype, device=device).merged_model
        if model.control is not None:
            merged_model = load_control(model.control.path / "control", merged_model.backbone)
        elif model.setting == BASE:
            merged_model = merged_model.base()
        return score_choices(asked, form, merged_model, batch_size, max_tokens=max_tokens)

    scores = site.lease.call(score)
    write_json(out / SCORES, asdict(scores))
    return compared(scores, None if base is None else read_scores(base))


def read_scores(artifact: Artifact) -> QuestionScores:
    body: Any = read_json(artifact.path / SCORES)
    return QuestionScores(**{**body, "total": Sizes(**body["total"])})


def compared(own: QuestionScores, base: QuestionScores | None) -> Metrics:
    """Return a model's figures, and their differences to the base model paired by question."""
    hits, margins = own.values["acc_tok"], own.values["margin"]
    zeros = [0.0] * len(hits)
    metrics: Metrics = {
        "questions": float(len(hits)),
        "token_reduction": own.total.context_token_reduction or 0.0,
        "input_reduction": own.total.token_reduction,
        **paired("accuracy", hits, zeros),
        **paired("margin", margins, zeros),
    }
    if base is None:
        return metrics
    pairs = list(zip(hits, base.values["acc_tok"], strict=True))
    return metrics | {
        **paired("difference", hits, base.values["acc_tok"]),
        **paired("margin_difference", margins, base.values["margin"]),
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


def adaptation_header(recipe: AdaptationRecipe) -> Report:
    """Return what a result says of its recipe: neither where files lie nor how fast it is run.

    That is how each training was run, but of one that no setting and no control needs.
    """
    dumped = recipe.model_dump(mode="json")
    run = {step.training for step in adaptation_steps(recipe.settings)}
    controls = {name: recipe.control_config(name) for name in recipe.controls}
    return {
        "task": recipe.task_name,
        **{name: dumped[name] for name in _SHOWN},
        **{name: dumped[name] for name in ("sft", "dpo") if name in run},
        "control_dpo": {name: by.model_dump(mode="json") for name, by in controls.items()},
    }


@stage(version=7)
def adaptation_stage(
    out: Path, _: Site, *, header: Report, questions: Questions, curves: Sequence[Curve]
) -> Metrics:
    """Write ``adaptation.json``, its page ``adaptation.md`` and its figure ``adaptation.svg``."""
    files = {s: questions.file(s) for s in SPLITS}
    body: Report = header | {
        "kind": RESULT,
        "chance": fmean(1 / len(asked.choices) for asked in read_questions(files["test"])),
        "questions": {s: len(path.read_text("utf-8").splitlines()) for s, path in files.items()},
        "question_digests": {s: sha256_file(path) for s, path in files.items()},
        "part": questions.form.part,
        "backbones": [_backbone(curve) for curve in curves],
    }
    write_json(out / f"{RESULT}.json", body)
    write_bytes(out / f"{RESULT}.md", adaptation_page(body).encode())
    write_bytes(out / f"{RESULT}.svg", adaptation_svg(body).encode())
    return {"points": float(sum(len(curve.points) for curve in curves))}


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
    hits, *of_others = (read_scores(one.scores).values["acc_tok"] for one in (point, *others))
    return {
        "against": {
            other.model.setting: paired("difference", hits, theirs)
            for other, theirs in zip(others, of_others, strict=True)
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
