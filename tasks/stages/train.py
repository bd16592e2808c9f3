"""Stages that train a cell's merge module on Ray Train, and those of its adaptation to a task.

    distill      on the corpus, for one rule set
    task-rules   bigrams of the training questions, by threshold
    with-rules   a trained module with the task's rules, not trained further
    sft          distillation on task sequences (context + right answer), merged where the task does
    dpo          preference between the answers, context merged

Which of them lead to which setting stands in ``umim_core.adaptation.settings``.
Source: paper, "Task Adaptation with SFT and RL"; the task is treated as the paper treats ARC.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from tasks.cluster.lease import ClusterLease
from tasks.run.stage import Artifact, Metrics, StageSpec, run_stage
from tasks.stages.corpus import form_key, form_of
from tasks.training.train_worker import launch
from umim_core.adaptation.choices import mine_task_rules, task_sequences
from umim_core.adaptation.settings import Training
from umim_core.backbone.fingerprint import backbone_identity, special_ids, tokenizer_fingerprint
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.config.recipe import (
    AdaptConfig,
    BackboneDtype,
    Cell,
    DistillConfig,
    PreferenceConfig,
    Recipe,
    RunRecipe,
)
from umim_core.config.rule_options import RuleFilters, RuleOptions
from umim_core.rules.ruleset import RuleSet
from umim_core.store.publication import publish_directory
from umim_core.task_sets.spec import read_questions
from umim_core.text.token_ids import encode
from umim_core.training.token_rows import TokenRows
from umim_core.training.train_job import TrainJob

Optimisation = DistillConfig | PreferenceConfig


def distill_stage(
    root: Path,
    lease: ClusterLease,
    recipe: Recipe,
    cell: Cell,
    tokenized: Artifact,
    filtered: Artifact,
) -> Artifact:
    """Distil the frozen backbone into a merge module for one rule set.

    The artifact holds ``checkpoint/``, ``curve.jsonl`` and ``summary.json``. A killed build resumes
    from its last state and ends with the same bytes (CPU, float32 weights).
    """
    optimisation = recipe.distill
    spec = StageSpec(
        "distill",
        4,
        {
            **training_key(recipe, cell, optimisation),
            **cell.form(),
            "segment_length": recipe.segment_length,
        },
        {
            "rules": filtered.digest,
            "backbone": backbone_identity(cell.backbone, cell.revision),
            **{split: tokenized.folder_digest(split) for split in ("train", "valid")},
        },
        resumable=True,
    )

    def build(out: Path) -> Metrics:
        rules, length = filtered.path / "rules", recipe.segment_length
        job = cell_job(recipe, cell, optimisation, out, rules, length)
        rows = {split: str(tokenized.path / split) for split in ("train", "valid")}
        return launch(replace(job, **rows), lease)

    return run_stage(root, spec, build)


def training_key(recipe: RunRecipe, cell: Cell, optimisation: Optimisation) -> dict[str, object]:
    """Return the configuration that all trainings of a cell's module have in their keys."""
    cluster = recipe.cluster
    return {
        "backbone": cell.backbone,
        "revision": cell.revision,
        "train": optimisation.model_dump(),
        "seed": recipe.seed,
        # The cluster's settings that decide the bits of a result.
        "workers": max(1, cluster.workers),
        "strategy": cluster.strategy,
        "use_gpu": cluster.use_gpu,
    }


def cell_job(
    recipe: RunRecipe,
    cell: Cell,
    optimisation: Optimisation,
    out: Path,
    rules: Path | None,
    max_tokens: int,
    start: Path | None = None,
) -> TrainJob:
    """Return a training of a cell's module that does not name its rows or questions yet."""
    return TrainJob(
        backbone=cell.backbone,
        revision=cell.revision,
        rules=None if rules is None else str(rules),
        start=None if start is None else str(start),
        form=cell.alone(),
        max_tokens=max_tokens,
        seed=recipe.seed,
        config=optimisation,
        strategy=recipe.cluster.strategy,
        use_gpu=recipe.cluster.use_gpu,
        out=str(out),
    )


def dtype_key(dtype: BackboneDtype) -> dict[str, object]:
    """Return the backbone's data type for a stage's key: nothing if it is float32."""
    return {} if dtype == "float32" else {"dtype": dtype}


def question_digests(task: Artifact, *splits: str) -> dict[str, str]:
    """Return the digests of the questions that a stage reads, as inputs of its key.

    Of the embedded task, whose keys are older than others, it is that of all splits.
    """
    if not form_key(task):
        return {"task": task.digest}
    return {split: task.file_digest(f"{split}.jsonl") for split in splits}


def task_rules_stage(
    root: Path, task: Artifact, cell: Cell, rules: RuleFilters, max_tokens: int
) -> Artifact:
    """Mine bigrams of the questions where the task merges; the artifact holds ``rules``."""
    tokenizer = load_tokenizer(cell.backbone, revision=cell.revision)
    fingerprint, excluded = tokenizer_fingerprint(tokenizer), special_ids(tokenizer)
    spec = StageSpec(
        "task-rules",
        4,
        {
            **rules.model_dump(),
            "max_tokens": max_tokens,
            "tokenizer": fingerprint,
            "excluded": sorted(excluded),
            **form_key(task),
        },
        question_digests(task, "train"),
    )

    def build(out: Path) -> Metrics:
        mined = mine_task_rules(
            read_questions(task.path / "train.jsonl"),
            partial(encode, tokenizer),
            RuleOptions(**rules.model_dump(), segment_length=None),
            form_of(task),
            max_length=max_tokens,
            excluded=excluded,
            tokenizer_fingerprint=fingerprint,
        )
        (out / "rules").mkdir()
        mined.write(out / "rules")
        return {f"rules_{n}": float(count) for n, count in mined.counts_by_order.items()}

    return run_stage(root, spec, build)


def with_rules_stage(root: Path, distilled: Artifact, task_rules: Artifact) -> Artifact:
    """Give a trained module other rules (``WT + Rules``); the artifact holds ``checkpoint``."""
    spec = StageSpec(
        "with-rules", 1, {}, {"checkpoint": distilled.digest, "rules": task_rules.digest}
    )

    def build(out: Path) -> Metrics:
        base = Checkpoint.load(distilled.path / "checkpoint")
        rules = RuleSet.load(
            task_rules.path / "rules", tokenizer_fingerprint=base.config.tokenizer_fingerprint
        )
        (out / "checkpoint").mkdir()
        base.with_contents(base.module, rules).write(out / "checkpoint")
        return {}

    return run_stage(root, spec, build)


def sft_stage(
    root: Path,
    lease: ClusterLease,
    recipe: RunRecipe,
    adapt: AdaptConfig,
    cell: Cell,
    task: Artifact,
    start: Artifact,
) -> Artifact:
    """Distil on task sequences: from a checkpoint, or from random weights for task rules alone."""

    def train(job: TrainJob) -> Metrics:
        tokenizer = load_tokenizer(cell.backbone, revision=cell.revision)

        def rows(split: str) -> TokenRows:
            sequences = task_sequences(
                read_questions(task.path / f"{split}.jsonl"),
                partial(encode, tokenizer),
                form_of(task),
                adapt.max_tokens,
            )
            return TokenRows.of_rows(
                [ids.tolist() for ids, _ in sequences], [mergeable for _, mergeable in sequences]
            )

        places = {split: job.state / "rows" / split for split in ("train", "valid")}
        for split, place in places.items():  # a killed attempt leaves whole rows or none
            if not place.exists():
                publish_directory(place, rows(split).save)
        return launch(replace(job, train=str(places["train"]), valid=str(places["valid"])), lease)

    return _trained(root, "sft", 5, adapt.sft, (recipe, adapt, cell, task, start), train)


def preference_job(job: TrainJob, task: Artifact) -> TrainJob:
    """Return a job as one of preference between the answers of a task's questions."""
    form = form_of(task)
    questions = {split: str(task.path / f"{split}.jsonl") for split in ("train", "valid")}
    return replace(job, **questions, prompt=form.prompt, delimiter=form.delimiter)


def dpo_stage(
    root: Path,
    lease: ClusterLease,
    recipe: RunRecipe,
    adapt: AdaptConfig,
    cell: Cell,
    task: Artifact,
    start: Artifact,
) -> Artifact:
    """Train preferences between answers, from ``start``, which is the reference."""

    def train(job: TrainJob) -> Metrics:
        return launch(preference_job(job, task), lease)

    return _trained(root, "dpo", 4, adapt.dpo, (recipe, adapt, cell, task, start), train)


TRAININGS: Final[dict[Training, Callable[..., Artifact]]] = {"sft": sft_stage, "dpo": dpo_stage}
"""Stages by the training that a setting asks for."""


def _trained(
    root: Path,
    name: str,
    version: int,
    optimisation: Optimisation,
    of: tuple[RunRecipe, AdaptConfig, Cell, Artifact, Artifact],
    train: Callable[[TrainJob], Metrics],
) -> Artifact:
    """Run a stage that trains a cell's module on a task, from a checkpoint or task rules alone."""
    recipe, adapt, cell, task, start = of
    config = training_key(recipe, cell, optimisation) | {"max_tokens": adapt.max_tokens}
    config |= form_key(task)
    if start.stage == "task-rules":  # the key holds what a checkpoint's digest would cover
        checkpoint, rules = None, start.path / "rules"
        config |= cell.form()
        backbone = backbone_identity(cell.backbone, cell.revision)
        inputs = {"rules": start.digest, "backbone": backbone}
    else:
        checkpoint = start.path / "checkpoint"
        rules, inputs = checkpoint / "rules", {"start": start.digest}
    inputs |= question_digests(task, "train", "valid")

    def build(out: Path) -> Metrics:
        length = adapt.max_tokens
        return train(cell_job(recipe, cell, optimisation, out, rules, length, checkpoint))

    return run_stage(root, StageSpec(name, version, config, inputs, resumable=True), build)
