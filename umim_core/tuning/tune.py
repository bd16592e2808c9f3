"""A checkpoint for the requests that somebody logs: rules, training, before and after.

::

    requests -> rows (ids, parts) -> spans of four fifths -> training -> the shortest spans go
                                  -> the last fifth: replies behind raw and merged prompts

Of every conversation the last request is read, which holds the others. A merged position costs
about as much however many tokens it has. So spans go from the shortest on, until the replies of
conversations that validated the training are kept. The directory::

    out/checkpoint/     the merge checkpoint with the spans that stay
    out/rules/          the spans that were trained
    out/comparison.json held-out requests, raw and merged
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import TypeAdapter

from umim_core.backbone.backbone import Backbone, load_backbone
from umim_core.backbone.tokenizer_files import backbone_identity, load_tokenizer
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.config.form import Merge
from umim_core.errors import CorpusError, require
from umim_core.evaluation.standard_errors import mean_difference_error
from umim_core.inference.options import GenerateOptions
from umim_core.merging.likelihood import score_rows
from umim_core.merging.merged_model import MergedModel
from umim_core.merging.rule_rows import RuleRows
from umim_core.mining.mine import candidate_spans
from umim_core.mining.span_choice import choose_spans
from umim_core.model.umim import UMIM
from umim_core.progress import duration, followed, logger
from umim_core.rules.matcher import PromptIds, token_reduction
from umim_core.rules.ruleset import RuleSet
from umim_core.store.artifacts import (
    directory_digest,
    json_digest,
    read_json,
    sha256_bytes,
    write_json,
)
from umim_core.store.publication import STATE, build_once, publish_directory
from umim_core.text.roles import Role
from umim_core.text.token_ids import spread_rows
from umim_core.traffic.prompt_rows import PromptRow
from umim_core.traffic.report import HELD_OUT
from umim_core.training.optimizer import AdamWStrategy
from umim_core.training.token_rows import TokenRows
from umim_core.training.train_job import TrainJob, run_job
from umim_core.training.train_loop import planned_steps

_VALID: Final = 10  # one training conversation in so many chooses the best step
SHORTEST: Final = (3, 4, 5, 6, 8, 10, 12)  # tokens of a span that stays; the first are trained
_COMPARED: Final = 100  # held-out conversations that are compared, at most
_GREEDY: Final = 8  # held-out requests that are answered, raw and merged
_CHOOSING: Final = 40  # validation conversations with a reply that choose the shortest, at most
MOST_NATS: Final = 1.05  # of the base model's nats a reply token, that merging may cost
LEAST_AGREEMENT: Final = 0.98  # on the tokens of the replies, that it must keep
_MERGES: Final[tuple[Merge, Merge]] = ("none", "prompt")
REPLY: Final = 48  # tokens of such an answer at most
_ANSWER: Final = GenerateOptions(n=1, raw_tail=0, max_new_tokens=REPLY, do_sample=False)


@dataclass(frozen=True)
class TuneOptions:
    job: TrainJob  # a longer prompt is trained on up to its ``max_tokens``
    roles: tuple[Role, ...]  # whose contents merge
    spans: int  # most of them, of at most ``longest`` tokens
    longest: int


class ReplyScores(NamedTuple):
    """Logged replies behind their prompts, raw or merged."""

    nats: list[float]  # mean of the tokens [Q]
    greedy: list[NDArray[np.bool_]]  # which tokens the model would say [Q][n]

    def against(self, base: ReplyScores) -> ReplyChange:
        """Return what became of the base model's scores."""
        sizes = np.array([len(tokens) for tokens in base.greedy])
        weights = sizes / sizes.mean()
        same = [np.mean(a == b) for a, b in zip(self.greedy, base.greedy, strict=True)]
        theirs, own = weights * base.nats, weights * self.nats
        error = mean_difference_error(own.tolist(), theirs.tolist())
        agreement = float(np.average(same, weights=sizes))
        return ReplyChange(float(theirs.mean()), float(own.mean()), error, agreement)


class ReplyChange(NamedTuple):
    """What merging prompts does to replies, over all of their tokens."""

    base_nats: float  # a token
    merged_nats: float
    nats_error: float | None  # standard error of the difference, paired by reply
    agreement: float  # share of the tokens that both models, or neither, would say

    @property
    def keeps(self) -> bool:
        within = self.merged_nats <= MOST_NATS * self.base_nats
        return within and self.agreement >= LEAST_AGREEMENT


@dataclass(frozen=True)
class Trial:
    """What the spans of at least ``shortest`` tokens save of the prompts, and do to replies."""

    shortest: int
    spans: int
    saved: float
    replies: ReplyChange


@dataclass(frozen=True)
class Comparison:
    """Held-out requests, raw and merged."""

    shortest: int | None  # tokens of a span at least; None where no reply could choose it
    trials: list[Trial]  # the most spans first; the last one was taken
    requests: int  # those with a reply
    tokens: int  # of all held-out prompts
    saved: float  # share of them
    replies: ReplyChange | None
    answers: int  # greedy ones that were compared
    equal: int
    base_seconds: float  # mean time to the first token
    merged_seconds: float


def tune(rows: Sequence[PromptRow], options: TuneOptions, out: Path) -> Comparison:
    """Tune a checkpoint and write its directory; a killed call goes on, a finished one is found."""
    requests = len(rows)
    rows = list({row.conversation: row for row in rows}.values())  # the last request of each
    held = rows[1::HELD_OUT]
    held = [held[n] for n in spread_rows(len(held), _COMPARED)]
    trained = [row for n, row in enumerate(rows) if n % HELD_OUT != 1]
    enough = len(trained) >= _VALID and bool(held)
    rule = f"tuning needs at least {_VALID + 3} conversations"
    found = f"{len(rows)} in {requests} requests; those that begin alike are one"
    require(enough, CorpusError, rule, found, "Log more requests.")
    job = options.job
    decisive = {
        **asdict(job),
        "spans": [options.roles, options.spans, options.longest],
        "config": job.config.model_dump(mode="json"),
        "form": job.form.form(),
        "backbone": backbone_identity(job.backbone, job.revision),
        "start": None if job.start is None else directory_digest(Path(job.start)),
        "rows": [[sha256_bytes(i.tobytes()) for i in (row.prompt, row.reply)] for row in rows],
        "parts": [row.parts for row in rows],
    }
    build_once(
        out,
        json_digest(decisive),
        lambda folder: _tune(trained, held, options, folder),
        kind="tuned",
        schema=1,
        resumable=True,
        wait_seconds=0.0,
    )
    return TypeAdapter(Comparison).validate_python(read_json(out / "comparison.json"))


def _tune(
    trained: Sequence[PromptRow], held: Sequence[PromptRow], options: TuneOptions, folder: Path
) -> None:
    """Do what is not done yet in a folder, whose ``state`` is no part of the result."""
    work = folder / STATE / "tuning"
    job = options.job
    backbone = load_backbone(job.backbone, dtype="float32", device=job.device)
    _ANSWER.of_model(backbone).check(MergedModel.without_merging(backbone), 1)
    if job.start is not None:
        Checkpoint.load(job.start).check_backbone(backbone)
    _tell_time(trained, held, job, backbone, work / "checkpoint", folder / "checkpoint")
    rows = {name: work / "rows" / name for name in ("train", "valid")}
    if not (folder / "rules").exists():
        logger.info("choosing spans of %d conversations", len(trained))
        chosen_spans(trained, options).save(folder / "rules")
    for name, place in rows.items():
        if not place.exists():
            part = [row for n, row in enumerate(trained) if (n % _VALID == 0) == (name == "valid")]
            place.parent.mkdir(parents=True, exist_ok=True)
            publish_directory(place, token_rows(part, job.max_tokens).save)
    start = work / "start"
    if job.start is not None and not start.exists():
        begun, rules = Checkpoint.load(job.start), RuleSet.load(folder / "rules")
        module = begun.module  # gets a row for each rule, zero where it has none
        module.rows = RuleRows.of_frequent(rules, len(rules), module.hidden_size, module.rows)
        begun.with_contents(module, rules).save(start)
    if not (work / "checkpoint").exists():
        del backbone  # training loads its own, in its own precision
        full = replace(
            job,
            rules=str(folder / "rules"),
            train=str(rows["train"]),
            valid=str(rows["valid"]),
            start=None if job.start is None else str(start),
            out=str(work),
        )
        with followed(full.state):
            run_job(full, AdamWStrategy)
        backbone = load_backbone(job.backbone, dtype="float32", device=job.device)
    trials_file = work / "trials.json"
    if not (folder / "checkpoint").exists():
        replied = [row for row in trained[::_VALID] if len(row.reply)]
        replied = [replied[n] for n in spread_rows(len(replied), _CHOOSING)]
        checkpoint = Checkpoint.load(work / "checkpoint").recommending("prompt", 0, options.roles)
        trials = length_trials(checkpoint, backbone, replied)
        write_json(trials_file, [asdict(trial) for trial in trials])
        if trials:
            checkpoint = of_at_least(checkpoint, trials[-1].shortest)
        checkpoint.save(folder / "checkpoint")
    trials = TypeAdapter(list[Trial]).validate_python(read_json(trials_file))
    logger.info("comparing %d held-out requests", len(held))
    umim = UMIM.from_pretrained(folder / "checkpoint", backbone=backbone)
    write_json(folder / "comparison.json", asdict(compare(umim, held, trials)))


@torch.no_grad()
def _tell_time(
    trained: Sequence[PromptRow],
    held: Sequence[PromptRow],
    job: TrainJob,
    backbone: Backbone,
    trained_place: Path,
    chosen_place: Path,
) -> None:
    """Say how long everything will take; what lies in its place already takes nothing.

    It follows from a forward of the base model. As merged rows are short, one that training reads
    takes about as much, and half as much again where it goes back.
    """
    sizes = [min(len(row.prompt) + len(row.reply), job.max_tokens) for row in trained]
    longest = trained[int(np.argmax(sizes))].prompt[: job.max_tokens]

    def seconds(ids: NDArray[np.int64]) -> float:
        tokens = torch.from_numpy(ids[None]).to(backbone.device)
        for _ in range(2):  # the first one warms up
            began = time.monotonic()
            backbone.model(tokens).logits[0, -1, 0].item()
        return time.monotonic() - began

    token, alone = seconds(longest) / len(longest), seconds(longest[:1])
    plan = job.config
    steps = planned_steps(plan, len(trained) - -(-len(trained) // _VALID))
    validations = steps // plan.validate_every + 1  # one before the first step
    read = 1.5 * steps * plan.batch_size
    read += validations * min(plan.validation_rows, -(-len(trained) // _VALID))
    answered = sum(len(row.prompt) for row in held[:_GREEDY])
    compared = sum(len(row.prompt) + len(row.reply) for row in held) + answered
    trials = (1 + len(SHORTEST)) * min(_CHOOSING, -(-len(trained) // _VALID))
    times = {
        "training": token * read * float(np.mean(sizes)),
        "choice": token * trials * float(np.mean([len(x.prompt) + len(x.reply) for x in trained])),
        "comparison": 2 * (token * compared + alone * REPLY * len(held[:_GREEDY])),
    }
    for name, place in {"training": trained_place, "choice": chosen_place}.items():
        if place.exists():
            times[name] = 0.0
    parts = ", ".join(f"{name} {duration(x)}" for name, x in times.items())
    logger.info("at most about %s in all: %s", duration(sum(times.values())), parts)


def chosen_spans(rows: Sequence[PromptRow], options: TuneOptions) -> RuleSet:
    """Choose the spans that together save most of the parts of prompts; digits stay raw."""
    texts = [row.prompt[first:end] for row in rows for first, end in row.parts]
    rule = "requests must hold something that may merge"
    found = ", ".join(options.roles)
    require(bool(texts), CorpusError, rule, f"nothing of {found or 'no role'}", "Name other roles.")
    spans, ids, offsets = candidate_spans(
        texts, load_tokenizer(options.job.backbone), options.longest
    )
    spans = spans.take(spans.sizes >= SHORTEST[0])
    rule = "requests must hold spans that they repeat: without digits, three times"
    found = f"none in {len(ids):,} tokens"
    remedy = "Log more requests, or name other roles."
    require(len(spans) > 0, CorpusError, rule, found, remedy)
    return choose_spans(spans, ids, offsets, options.spans)


def token_rows(rows: Sequence[PromptRow], most: int) -> TokenRows:
    """Return prompts with their replies as training rows, cut to so many tokens."""
    whole = [np.concatenate([row.prompt, row.reply])[:most].tolist() for row in rows]
    parts = [tuple((a, min(b, most)) for a, b in row.parts if a < most) for row in rows]
    return TokenRows.of_parts(whole, parts, [len(row.prompt) for row in rows])


def of_at_least(checkpoint: Checkpoint, tokens: int) -> Checkpoint:
    rules = checkpoint.rules
    return checkpoint.with_contents(checkpoint.module, rules.take(rules.sizes >= tokens))


def length_trials(
    checkpoint: Checkpoint, backbone: Backbone, rows: Sequence[PromptRow]
) -> list[Trial]:
    """Measure replies behind prompts merged by ever longer spans alone, until they are kept."""
    if not rows:
        return []
    logger.info("choosing the shortest spans by %d conversations", len(rows))
    trials, base = list[Trial](), None
    for shortest in SHORTEST:
        fewer = of_at_least(checkpoint, shortest)
        if not len(fewer.rules) or (trials and len(fewer.rules) == trials[-1].spans):
            continue
        model = UMIM(backbone, fewer).merged_model
        base = base or reply_scores(model.base(), rows)
        change = reply_scores(model, rows).against(base)
        trials.append(Trial(shortest, len(fewer.rules), _saved(model, rows), change))
        if change.keeps:
            break
    return trials


@torch.no_grad()
def compare(umim: UMIM, rows: Sequence[PromptRow], trials: list[Trial]) -> Comparison:
    """Measure prompts with their logged replies, and some greedy answers, raw and merged."""
    models = umim.merged_model.base(), umim.merged_model
    replied = [row for row in rows if len(row.reply)]
    base, merged = (reply_scores(model, replied) for model in models)
    equal, seconds = 0, [0.0, 0.0]
    asked = rows[:_GREEDY]
    for row in asked:
        texts = []
        for n, merge in enumerate(_MERGES):
            options = replace(_ANSWER, merge=merge).of_model(umim.backbone)
            made = umim.engine.generate([PromptIds(row.prompt, row.parts)], options)
            texts.append(made.rows[0].ids)
            seconds[n] += made.timings.first_token / len(asked)
        equal += texts[0] == texts[1]
    return Comparison(
        shortest=trials[-1].shortest if trials else None,
        trials=trials,
        requests=len(replied),
        tokens=sum(len(row.prompt) for row in rows),
        saved=_saved(umim.merged_model, rows),
        replies=merged.against(base) if replied else None,
        answers=len(asked),
        equal=equal,
        base_seconds=seconds[0],
        merged_seconds=seconds[1],
    )


def _saved(model: MergedModel, rows: Sequence[PromptRow]) -> float:
    """Return the share of prompts' tokens that a model saves."""
    units = sum(len(model.segment_prompt(row.prompt, row.parts)[0]) for row in rows)
    return token_reduction(sum(len(row.prompt) for row in rows), units)


@torch.no_grad()
def reply_scores(model: MergedModel, rows: Sequence[PromptRow]) -> ReplyScores:
    """Score the replies of some rows behind their prompts, raw or merged as the model is."""
    nats, greedy = list[float](), list[NDArray[np.bool_]]()
    for row in rows:
        (scores,) = score_rows(
            [np.concatenate([row.prompt, row.reply])], model, [len(row.prompt)], [row.parts]
        )
        nats.append(-float(scores.log_probs.mean()))
        greedy.append(scores.greedy.cpu().numpy())
    return ReplyScores(nats, greedy)
