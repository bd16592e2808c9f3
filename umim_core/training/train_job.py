"""Training run as plain data, and the objective that a worker builds from it.

A job is a plain mapping of paths and settings, so that it travels to any worker.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch.distributed as dist

from umim_core.adaptation.choices import encode_questions
from umim_core.adaptation.control import Control, fresh_control
from umim_core.backbone.backbone import Backbone
from umim_core.backbone.devices import computes_bfloat16
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.checkpoint.untrained import fresh_module
from umim_core.config.form import ModuleForm
from umim_core.config.recipe import Device, DistillConfig, PreferenceConfig
from umim_core.errors import ConfigError
from umim_core.merging.merged_model import MergedModel
from umim_core.merging.module import with_rows_of
from umim_core.rules.matcher import Matcher
from umim_core.rules.protect import check_vocabulary
from umim_core.rules.ruleset import RuleSet
from umim_core.store.publication import STATE
from umim_core.task_sets.spec import QuestionForm, read_questions
from umim_core.training.objectives import DistillObjective, PreferenceObjective, spread_rows
from umim_core.training.token_rows import TokenRows
from umim_core.training.train_loop import asked_items
from umim_core.training.train_state import REFERENCE

logger = logging.getLogger("umim.train")


@dataclass(frozen=True)
class TrainJob:
    """One training run, as plain data.

    Attributes:
        objective: ``distill`` over token rows or ``preference`` over questions.
        rules: Directory of the rule set; None for a control.
        train: Directory of training rows, or the question file; ``valid`` likewise.
        start: Checkpoint directory to start from, or None for fresh weights and for a control.
        form: Policies of a fresh module and of its use by name, the paper's where none is named.
        max_tokens: Most tokens of a question with an answer (preference only).
        config: Dumped DistillConfig or PreferenceConfig.
        out: Directory that receives checkpoint, curve and (while running) state.
        prompt: Of the task; the objective ``preference`` needs it.
        delimiter: Text between the prompt and an answer (preference only).
        control: Name of the control that is trained in place of a merge module (preference only).
    """

    objective: Literal["distill", "preference"]
    backbone: str
    revision: str | None
    rules: str | None
    train: str
    valid: str
    start: str | None
    form: Mapping[str, object]
    max_tokens: int
    seed: int
    config: Mapping[str, object]
    strategy: Literal["ddp", "deepspeed"]
    use_gpu: bool
    out: str
    prompt: str | None = None
    delimiter: str = " "
    control: str | None = None


def job_config(job: TrainJob) -> DistillConfig | PreferenceConfig:
    """Return how a job optimises."""
    if job.objective == "preference":
        return PreferenceConfig.model_validate(job.config)
    return DistillConfig.model_validate(job.config)


def start_model(job: TrainJob, backbone: Backbone, matcher: Matcher) -> MergedModel:
    """Return the model with the module that a job trains; errors are those of :func:`start_of`."""
    if job.start is None:
        form = ModuleForm.model_validate(job.form)
        module = fresh_module(backbone, matcher.rules, form, job.seed)
        return MergedModel(
            backbone, module, matcher, form.unit_positions, merge_depth=form.merge_depth
        )
    start = Checkpoint.load(job.start)
    start.check_backbone(backbone)
    module = with_rows_of(start.module, matcher.rules).requires_grad_(True).to(backbone.device)
    own = start.config
    return MergedModel(backbone, module, matcher, own.unit_positions, merge_depth=own.merge_depth)


def start_of(job: TrainJob, backbone: Backbone) -> MergedModel | Control:
    """Return what a job trains, as it is before the first step."""
    if job.control is not None:
        if job.objective != "preference":
            raise ConfigError(
                "a control must be trained by preference",
                f"{job.control} by {job.objective}",
                "Without merges the distillation loss is at its least from the start.",
            )
        return fresh_control(job.control, backbone, job.seed)
    if job.rules is None:
        raise ConfigError("a merge module must have rules", None, "Mine some, or name a control.")
    rules = RuleSet.load(job.rules, tokenizer_fingerprint=backbone.tokenizer_fingerprint)
    check_vocabulary(rules, backbone.vocab_size, backbone.special_ids)
    return start_model(job, backbone, Matcher(rules))


def make_objective(
    job: TrainJob, start: MergedModel | Control
) -> DistillObjective | PreferenceObjective:
    """Return what a job minimises, with its data; a batch is shared by the ranks of the group."""
    merged_model = start.merged_model if isinstance(start, Control) else start
    config = job_config(job)
    world = dist.get_world_size() if dist.is_initialized() else 1
    per_rank = config.batch_size // world
    if isinstance(config, PreferenceConfig):
        if job.prompt is None:
            raise ConfigError("preference training must have a prompt", None, "Name the task's.")
        form = QuestionForm(job.prompt, job.delimiter)
        train_split, valid_split = (
            encode_questions(
                read_questions(path), merged_model.backbone.encode, form, job.max_tokens
            )
            for path in (job.train, job.valid)
        )
        return PreferenceObjective(
            start.module if isinstance(start, Control) else start.require_module(),
            merged_model,
            train_split,
            valid_split,
            beta=config.beta,
            batch_size=per_rank,
            reference=Path(job.out) / STATE / REFERENCE,
            asked={
                "train": asked_items(config, job.seed, len(train_split)),
                "valid": spread_rows(len(valid_split), config.validation_rows),
            },
            micro_batch=config.micro_batch,
        )
    return DistillObjective(
        merged_model,
        *(TokenRows.load(Path(rows)) for rows in (job.train, job.valid)),
        bf16=config.bf16 and in_bfloat16("cuda" if job.use_gpu else "cpu"),
        micro_batch=config.micro_batch,
        prompt_rows=config.prompt_rows,
        copy_rows=config.copy_rows,
        batch_size=per_rank,
    )


def in_bfloat16(device: Device) -> bool:
    """Return whether a device computes products in bfloat16; say so where it does not."""
    is_fast = computes_bfloat16(device)
    if not is_fast:
        logger.info("products are in float32: this processor has no instructions for bfloat16")
    return is_fast
