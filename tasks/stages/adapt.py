"""Stages ``task-rules``, ``with-rules``, ``sft`` and ``dpo``: adaptation to the embedded task.

    task rules   bigrams of the training questions, threshold only
    WT + Rules   the base module with the task's rules, not trained
    WT + FT      distilled further on task sequences (context + right answer), context merged
    Task-Adapted preference training from there, context merged

Source: paper, "Task Adaptation with SFT and RL"; the task is treated as the paper treats ARC.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Literal

from transformers import PreTrainedTokenizerBase

from tasks.cluster.lease import ClusterLease
from tasks.run.stage import Artifact, Metrics, StageSpec, run_stage
from tasks.stages.distill import parallelism, train_on_rows
from tasks.training.train_worker import launch
from umim_core.adaptation.choices import (
    DOCSTRING_PROMPT,
    TaskSequence,
    read_questions,
    task_sequences,
)
from umim_core.adaptation.task_rules import mine_task_rules
from umim_core.backbone.backbone import load_tokenizer, special_ids
from umim_core.backbone.backbone import tokenizer_fingerprint as fingerprint_of
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.config.recipe import AdaptConfig, Cell, Recipe, RulesConfig
from umim_core.distill.token_rows import TokenRows
from umim_core.distill.train_job import TrainJob
from umim_core.rules.ruleset import RuleSet
from umim_core.text.encoding import encode


def task_rules_stage(
    root: Path, task: Artifact, cell: Cell, rules: RulesConfig, max_tokens: int
) -> Artifact:
    """Mine bigrams of the training questions' contexts; the artifact holds ``rules``."""
    tokenizer = load_tokenizer(cell.backbone, revision=cell.revision)
    spec = StageSpec(
        "task-rules",
        2,
        {
            **rules.model_dump(),
            "max_tokens": max_tokens,
            "tokenizer": fingerprint_of(tokenizer),
            "excluded": sorted(special_ids(tokenizer)),
        },
        {"task": task.digest},
    )

    def build(out: Path) -> Metrics:
        mined = mine_task_rules(
            read_questions(task.path / "train.jsonl"),
            partial(encode, tokenizer),
            (rules.tau,),
            part="context",
            prompt=DOCSTRING_PROMPT,
            max_length=max_tokens,
            excluded=special_ids(tokenizer),
            overlap=rules.overlap,
            containment=rules.containment,
            tokenizer_fingerprint=fingerprint_of(tokenizer),
        )[rules.tau]
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
        Checkpoint(base.config, base.module, rules).write(out / "checkpoint")
        return {}

    return run_stage(root, spec, build)


def sft_stage(
    root: Path,
    lease: ClusterLease,
    recipe: Recipe,
    adapt: AdaptConfig,
    cell: Cell,
    task: Artifact,
    start: Artifact,
) -> Artifact:
    """Distil further on task sequences, from ``start`` with its rules (``WT + FT``)."""
    spec = _spec("sft", recipe, cell, adapt.sft.model_dump(), adapt.max_tokens, task, start)

    def build(out: Path) -> Metrics:
        tokenizer = load_tokenizer(cell.backbone, revision=cell.revision)
        rows = {
            split: _rows(task.path / f"{split}.jsonl", tokenizer, adapt.max_tokens)
            for split in ("train", "valid")
        }
        job = _job("distill", recipe, adapt, cell, start, out, adapt.sft.model_dump())
        return train_on_rows(job, rows, lease)

    return run_stage(root, spec, build)


def dpo_stage(
    root: Path,
    lease: ClusterLease,
    recipe: Recipe,
    adapt: AdaptConfig,
    cell: Cell,
    task: Artifact,
    start: Artifact,
) -> Artifact:
    """Train preferences between answers, from ``start`` (``Task-Adapted`` after SFT)."""
    spec = _spec("dpo", recipe, cell, adapt.dpo.model_dump(), adapt.max_tokens, task, start)

    def build(out: Path) -> Metrics:
        job = _job(
            "preference",
            recipe,
            adapt,
            cell,
            start,
            out,
            adapt.dpo.model_dump(),
            train=str(task.path / "train.jsonl"),
            valid=str(task.path / "valid.jsonl"),
        )
        return launch(job, lease)

    return run_stage(root, spec, build)


def _spec(
    name: str,
    recipe: Recipe,
    cell: Cell,
    train: dict[str, object],
    max_tokens: int,
    task: Artifact,
    start: Artifact,
) -> StageSpec:
    return StageSpec(
        name,
        4,
        {
            "backbone": cell.backbone,
            "revision": cell.revision,
            "train": train,
            "max_tokens": max_tokens,
            "seed": recipe.seed,
            **parallelism(recipe.cluster),
        },
        {"task": task.digest, "start": start.digest},
        resumable=True,
    )


def _job(
    objective: Literal["distill", "preference"],
    recipe: Recipe,
    adapt: AdaptConfig,
    cell: Cell,
    start: Artifact,
    out: Path,
    config: dict[str, object],
    train: str = "train",
    valid: str = "valid",
) -> TrainJob:
    return TrainJob(
        objective=objective,
        backbone=cell.backbone,
        revision=cell.revision,
        rules=str(start.path / "checkpoint" / "rules"),
        train=train,
        valid=valid,
        start=str(start.path / "checkpoint"),
        form=cell.form(),
        max_tokens=adapt.max_tokens,
        seed=recipe.seed,
        config=config,
        strategy=recipe.cluster.strategy,
        use_gpu=recipe.cluster.use_gpu,
        out=str(out),
    )


def _rows(path: Path, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> TokenRows:
    sequences: list[TaskSequence] = task_sequences(
        read_questions(path),
        partial(encode, tokenizer),
        prompt=DOCSTRING_PROMPT,
        max_length=max_tokens,
        merge="context",
    )
    return TokenRows.of_rows(
        [sequence.ids.tolist() for sequence in sequences],
        [sequence.mergeable for sequence in sequences],
    )
