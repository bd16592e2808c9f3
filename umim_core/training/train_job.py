"""One training from its settings to its files: the pipeline's and ``umim train``'s.

A job is plain data, so that it travels to any worker; every rank runs it, and rank 0 writes what it
made::

    job.out/checkpoint/     the merge checkpoint, or control/ where a control is trained
    job.out/curve.jsonl     losses by step
    job.out/summary.json    steps, best step and score
    job.out/state/          resume state (:mod:`train_state`) and notes, which are not published
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from torch import nn

from umim_core.adaptation.choices import encode_questions
from umim_core.adaptation.control import Control, fresh_control, write_control
from umim_core.backbone.backbone import Backbone, load_backbone
from umim_core.backbone.devices import computes_bfloat16
from umim_core.backbone.model_identity import weight_lines
from umim_core.backbone.shape import check_row_length
from umim_core.checkpoint.checkpoint import Checkpoint, fresh_module
from umim_core.config.form import PAPER_FORM, ModuleForm
from umim_core.config.recipe import Device, DistillConfig, PreferenceConfig, TrainConfig
from umim_core.errors import BackboneError, ConfigError, require
from umim_core.merging.merged_model import MergedModel
from umim_core.merging.module import with_rows_of
from umim_core.progress import leave_note
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet
from umim_core.store.artifacts import read_json, write_json
from umim_core.store.publication import STATE
from umim_core.task_sets.spec import QuestionForm, read_questions
from umim_core.text.token_ids import spread_rows
from umim_core.training.objectives import DistillObjective, PreferenceObjective
from umim_core.training.optimizer import Strategy
from umim_core.training.token_rows import TokenRows
from umim_core.training.train_loop import planned_items, train
from umim_core.training.train_ranks import rank_and_world, ranks_where
from umim_core.training.train_state import Progress, drop_states, load_parameters

logger = logging.getLogger("umim.train")
CURVE: Final = "curve.jsonl"
_SUMMARY: Final = "summary.json"
MakeStrategy = Callable[[nn.Module, TrainConfig], Strategy]


@dataclass(frozen=True)
class TrainJob:
    """One training run, as plain data.

    Attributes:
        rules: Directory of the rule set; None for a control.
        config: What is minimised and how: distillation over token rows, preference over questions.
        max_tokens: Tokens of a row, or most of a question with an answer.
        train: Where ``TokenRows.load`` finds training rows, or the file of the questions; ``valid``
            likewise.
        form: Of a fresh module and of its use.
        start: Checkpoint directory to start from, or None for fresh weights and for a control.
        out: Directory that receives what is trained and, while it runs, the state.
        prompt: Of the task; preference needs it.
        delimiter: Text between the prompt and an answer (preference only).
        control: Name of the control that is trained in place of a merge module (preference only).
    """

    backbone: str
    rules: str | None
    config: DistillConfig | PreferenceConfig
    max_tokens: int
    train: str = ""
    valid: str = ""
    revision: str | None = None
    form: ModuleForm = PAPER_FORM
    start: str | None = None
    seed: int = 0
    strategy: Literal["ddp", "deepspeed"] = "ddp"
    use_gpu: bool = False
    out: str = ""
    prompt: str | None = None
    delimiter: str = " "
    control: str | None = None

    @property
    def state(self) -> Path:
        """Where resume state and notes of a run that is under way lie."""
        return Path(self.out) / STATE

    @property
    def device(self) -> Device:
        return "cuda" if self.use_gpu else "cpu"


def start_model(job: TrainJob, backbone: Backbone, matcher: Matcher) -> MergedModel:
    if job.start is None:
        module = fresh_module(backbone, matcher.rules, job.form, job.seed)
        return MergedModel(backbone, module, matcher)
    start = Checkpoint.load(job.start)
    start.check_backbone(backbone)
    check_longest_of_start(start.rules.longest, matcher.rules.longest)
    module = with_rows_of(start.module, matcher.rules).requires_grad_(True).to(backbone.device)
    return MergedModel(backbone, module, matcher)


def check_longest_of_start(start: int, rules: int) -> None:
    """Refuse rules whose longest spans are not those that a module to start from was made for."""
    rule = f"the longest spans of a further training must have the {start} tokens of its start"
    remedy = f"Give --longest {start}: to umim tune, or to the mining of the rules."
    require(rules == start, ConfigError, rule, rules, remedy)


def start_of(job: TrainJob, backbone: Backbone) -> MergedModel | Control:
    if job.control is not None:
        return fresh_control(job.control, backbone, job.seed)
    if job.rules is None:
        raise ConfigError("a merge module must have rules", None, "Mine some, or name a control.")
    rules = RuleSet.load(job.rules, tokenizer_fingerprint=backbone.tokenizer_fingerprint)
    rules.check_vocabulary(backbone.vocab_size, backbone.special_ids)
    return start_model(job, backbone, Matcher(rules))


def make_objective(
    job: TrainJob, start: MergedModel | Control
) -> DistillObjective | PreferenceObjective:
    """Return what a job minimises, with its data; a batch is shared by the ranks of the group."""
    model = start.merged_model if isinstance(start, Control) else start
    config = job.config
    per_rank = config.batch_size // rank_and_world()[1]
    if isinstance(config, DistillConfig):
        is_fast = computes_bfloat16(job.device)
        if not is_fast:
            logger.info("products are in float32: this processor has no instructions for bfloat16")
        train_rows, valid_rows = (
            TokenRows.load(Path(rows), job.max_tokens, model.backbone.vocab_size)
            for rows in (job.train, job.valid)
        )
        bf16 = config.bf16 and is_fast
        return DistillObjective(
            model, train_rows, valid_rows, config, bf16=bf16, batch_size=per_rank
        )
    form = QuestionForm(job.prompt or "", job.delimiter)
    questions, held_out = (
        encode_questions(read_questions(path), model.backbone.encode, form, job.max_tokens)
        for path in (job.train, job.valid)
    )
    return PreferenceObjective(
        start.module if isinstance(start, Control) else start.require_module(),
        model,
        questions,
        held_out,
        beta=config.beta,
        batch_size=per_rank,
        items={
            "train": planned_items(config, job.seed, len(questions)),
            "valid": spread_rows(len(held_out), config.validation_rows),
        },
        micro_batch=config.micro_batch,
    )


def run_job(job: TrainJob, make_strategy: MakeStrategy) -> None:
    """Train on one rank; rank 0 writes the result, curve and summary into the job's directory."""
    is_first, config = rank_and_world()[0] == 0, job.config

    def say(text: str) -> None:
        if is_first:  # what happens before the first step may take minutes
            leave_note(job.state, 0, 0, text)

    say("loading the backbone")
    dtype = config.backbone_dtype(job.device)
    backbone = load_backbone(job.backbone, revision=job.revision, dtype=dtype, device=job.device)
    remedy = "Lower the segment length, or max_tokens of an adaptation."
    check_row_length(job.max_tokens, backbone.max_positions, job.backbone, remedy)
    start = start_of(job, backbone)
    objective = make_objective(job, start)
    say("measuring before the first step")
    result = train(
        objective,
        make_strategy(objective, config),
        config,
        seed=job.seed,
        state_dir=job.state,
        on_step=step_reporter(job.state),
    )
    _require_untouched(backbone, job.state)
    if not is_first:
        return
    load_parameters(objective.module, result.weights)
    progress = result.progress
    summary: dict[str, str | int | float | None] = {
        "steps": progress.step,
        "best_step": progress.best_step,
        "best_score": progress.best_score,
        "skipped": progress.skipped,
    }
    name = "control" if isinstance(start, Control) else "checkpoint"
    target = Path(job.out) / name
    shutil.rmtree(target, ignore_errors=True)  # half-written by a killed attempt
    target.mkdir()
    origin = summary | {"seed": job.seed}
    if isinstance(start, Control):
        write_control(start, origin, target)
    else:
        Checkpoint.of(start, origin).write(target)
    lines = "".join(json.dumps(row, sort_keys=True) + "\n" for row in progress.curve)
    (target.parent / CURVE).write_text(lines, encoding="utf-8")
    write_json(target.parent / _SUMMARY, summary | {"backbone_fingerprint": backbone.fingerprint})


def _require_untouched(backbone: Backbone, state: Path) -> None:
    """Refuse, on every rank, a backbone whose weights are not those that were loaded.

    The states go: steps were taken with other weights, nobody knows which. Weights are hashed as
    for a fingerprint, so changes below the rounding of bfloat16 do not count; it takes half a
    second for 135 M weights in float32.

    An attempt is checked once, at its end. What a killed attempt saved is resumed unchecked: the
    next one loads the weights again, and answers for its own steps alone. A check before every save
    would cost a model of 8 G weights, in proportion, half a minute each time.
    """
    touched = ranks_where(weight_lines(backbone.model) != backbone.identity.weights)
    if touched:
        if rank_and_world()[0] == 0:
            drop_states(state)
        raise BackboneError(
            f"the frozen weights of {backbone.name} must be as they were loaded",
            f"others on ranks {touched} after training",
            "Memory or code is at fault; no state is kept, the same command starts afresh.",
        )


def step_reporter(state: Path) -> Callable[[Progress, int], None]:
    """Return what rank 0 calls after each step: a note for the driver's bar, a log line in ten."""
    points: dict[str, tuple[int, float]] = {}

    def report(progress: Progress, total: int) -> None:
        row: dict[str, float] = {}  # a step leaves one row, and one more where it validates
        for part in progress.curve[-2:]:
            row |= part if part["step"] == progress.step else {}
        points.update({x: (progress.step, value) for x, value in row.items() if x != "step"})
        loss = row.get("train_loss")
        text = "training" if loss is None else f"training, loss {loss:.3f}"
        leave_note(state, progress.step, total, text, points)
        if progress.step % 10 == 0:
            logger.info("step %d of %d: %s", progress.step, total, row)

    return report


def read_curve(out: Path) -> list[dict[str, float]]:
    lines = (out / CURVE).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def read_summary(out: Path) -> dict[str, float]:
    summary = read_json(out / _SUMMARY)
    assert isinstance(summary, dict)  # noqa: S101  as ``run_job`` wrote it
    return {name: float(value) for name, value in summary.items() if isinstance(value, int | float)}
