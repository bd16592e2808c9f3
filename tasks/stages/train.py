"""Stages that train a cell's merge module on Ray Train, and those of its adaptation to a task.

    distill      on the corpus, for one rule set
    task-rules   bigrams of the training questions, by threshold
    with-rules   a trained module with the task's rules, not trained further
    sft          distillation on task sequences (context + right answer), merged where the task does
    dpo          preference between the answers, context merged
    control      as many parameters trained on the same answers, without merging

Which of them lead to which setting stands in ``umim_core.adaptation.settings``.
Source: paper, "Task Adaptation with SFT and RL"; the task is treated as the paper treats ARC.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from tasks.run.stage import Artifact, Metrics, Part, Site, Stage, stage
from tasks.stages.named import NamedBackbone, NamedTokenizer, Questions
from tasks.training.train_worker import launch
from umim_core.adaptation.choices import mine_task_rules, task_sequences
from umim_core.adaptation.settings import Training
from umim_core.backbone.tokenizer_files import special_ids
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.config.form import ModuleForm
from umim_core.config.model_base import Split
from umim_core.config.recipe import DistillConfig, PreferenceConfig
from umim_core.config.rule_options import RuleFilters, RuleOptions
from umim_core.rules.ruleset import RuleSet
from umim_core.task_sets.spec import read_questions
from umim_core.text.token_ids import encode
from umim_core.training.token_rows import TokenRows
from umim_core.training.train_job import TrainJob

_DECIDES_BITS: Final = ("workers", "strategy", "device")
_SPLITS: Final[Sequence[Split]] = ("train", "valid")


@dataclass(frozen=True)
class ModuleTraining:
    """What is trained, and how; ``max_tokens`` are those of a row or of a question."""

    backbone: NamedBackbone
    form: ModuleForm
    optimisation: DistillConfig | PreferenceConfig
    max_tokens: int
    seed: int

    def job(self, out: Path, site: Site) -> TrainJob:
        """Return the job that does not name its rules, rows or questions yet."""
        return TrainJob(
            backbone=self.backbone.name,
            revision=self.backbone.revision,
            rules=None,
            form=self.form,
            max_tokens=self.max_tokens,
            seed=self.seed,
            config=self.optimisation,
            strategy=site.strategy,
            use_gpu=site.device == "cuda",
            out=str(out),
        )


@stage(version=5, resumable=True, of_run=_DECIDES_BITS)
def distill_stage(
    out: Path, site: Site, *, training: ModuleTraining, rules: Artifact, train: Part, valid: Part
) -> Metrics:
    """Distil the frozen backbone into a merge module for one rule set.

    The artifact holds ``checkpoint/``, ``curve.jsonl`` and ``summary.json``. A killed build resumes
    from its last state and ends with the same bytes (CPU, float32 weights).
    """
    job = replace(training.job(out, site), rules=str(rules.path / "rules"))
    return launch(replace(job, train=str(train.path), valid=str(valid.path)), site.lease)


@stage(version=5)
def task_rules_stage(
    out: Path,
    _: Site,
    *,
    questions: Questions,
    tokenizer: NamedTokenizer,
    rules: RuleFilters,
    max_tokens: int,
) -> Metrics:
    """Mine bigrams of the questions where the task merges; the artifact holds ``rules``."""
    mined = mine_task_rules(
        read_questions(questions.file("train")),
        partial(encode, tokenizer.loaded),
        RuleOptions(**rules.model_dump(), segment_length=None),
        questions.form,
        max_length=max_tokens,
        excluded=special_ids(tokenizer.loaded),
        tokenizer_fingerprint=tokenizer.fingerprint,
    )
    mined.write(out / "rules")
    return {f"rules_{n}": float(count) for n, count in mined.counts_by_order.items()}


@stage(version=2)
def with_rules_stage(out: Path, _: Site, *, start: Artifact, rules: Artifact) -> Metrics:
    """Give a trained module other rules (``WT + Rules``); the artifact holds ``checkpoint``."""
    base = Checkpoint.load(start.path / "checkpoint")
    loaded = RuleSet.load(
        rules.path / "rules", tokenizer_fingerprint=base.config.tokenizer_fingerprint
    )
    base.with_contents(base.module, loaded).write(out / "checkpoint")
    return {}


@stage(version=6, resumable=True, of_run=_DECIDES_BITS)
def sft_stage(
    out: Path, site: Site, *, training: ModuleTraining, questions: Questions, start: Artifact
) -> Metrics:
    """Distil on task sequences: from a checkpoint, or from random weights for task rules alone."""
    job = _started(training.job(out, site), start)
    rows = {split: job.state / "rows" / split for split in _SPLITS}
    for split, place in rows.items():
        sequences = task_sequences(
            read_questions(questions.file(split)),
            partial(encode, training.backbone.tokenizer.loaded),
            questions.form,
            training.max_tokens,
        )
        ids, merged = [ids.tolist() for ids, _ in sequences], [most for _, most in sequences]
        place.mkdir(parents=True, exist_ok=True)
        TokenRows.of_rows(ids, merged).save(place)
    return launch(replace(job, train=str(rows["train"]), valid=str(rows["valid"])), site.lease)


@stage(version=5, resumable=True, of_run=_DECIDES_BITS)
def dpo_stage(
    out: Path, site: Site, *, training: ModuleTraining, questions: Questions, start: Artifact
) -> Metrics:
    """Train preferences between answers, from ``start``, which is the reference."""
    job = _asked(training.job(out, site), questions)
    return launch(_started(job, start), site.lease)


@stage(version=2, resumable=True, of_run=_DECIDES_BITS, free={"training.form": "of merge modules"})
def control_stage(
    out: Path, site: Site, *, control: str, training: ModuleTraining, questions: Questions
) -> Metrics:
    """Train a control by preferences between answers; the artifact holds ``control``."""
    job = _asked(training.job(out, site), questions)
    return launch(replace(job, control=control), site.lease)


TRAININGS: Final[dict[Training, Stage[...]]] = {"sft": sft_stage, "dpo": dpo_stage}
"""Stages by the training that a setting asks for."""


def _started(job: TrainJob, start: Artifact) -> TrainJob:
    """Return a job that begins with a checkpoint, or with task rules alone."""
    if start.stage == "task-rules":
        return replace(job, rules=str(start.path / "rules"))
    checkpoint = start.path / "checkpoint"
    return replace(job, start=str(checkpoint), rules=str(checkpoint / "rules"))


def _asked(job: TrainJob, questions: Questions) -> TrainJob:
    """Return a job as one of preference between the answers of a task's questions."""
    train, valid = (str(questions.file(split)) for split in _SPLITS)
    form = questions.form
    return replace(job, train=train, valid=valid, prompt=form.prompt, delimiter=form.delimiter)
