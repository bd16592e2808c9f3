"""The packed preference step against one row per answer: a table, then one JSON line.

    python -m benchmarks.preference_step --out docs/results/preference_step.json
    python -m benchmarks.preference_step --checkpoints umim-docs-gpt2 --questions 4 --rounds 3

Ours packs a question into one row, [context | y+ | y- ...]; the other side gives every answer a row
with the context in front, plain causal attention and no mask. Contexts and answers are held-out
text, cut to length. Reference scores are those of the base model, computed before. Gates: P6 of
docs/performance.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import Tensor

from benchmarks.distill_step import Result, compare, gradient_of
from benchmarks.runner import Benchmark, Gates, Report
from benchmarks.subjects import CHECKPOINT, Ids, Subject, subject
from umim_core.adaptation.choices import EncodedQuestion
from umim_core.backbone.devices import default_device
from umim_core.backbone.shape import BackboneShape
from umim_core.errors import CorpusError, require
from umim_core.merging.merged_model import MergedModel
from umim_core.training.objectives import ending_scores, preference_loss

OURS, UNPACKED = "packed", "a row per answer"
CHECKPOINTS: Final = ("umim-docs-llama", "umim-docs-gpt2", CHECKPOINT)
TIMES, ERROR = 1.8, 1e-5
Questions = list[EncodedQuestion]


def questions_of(ids: Ids, shape: argparse.Namespace) -> Questions:
    size = shape.context + shape.answers * shape.ending
    rule = f"{shape.questions} questions of {size} tokens must fit the text"
    require(len(ids) >= shape.questions * size, CorpusError, rule, f"{len(ids)} tokens")
    rows = ids[: shape.questions * size].reshape(shape.questions, size)
    return [
        EncodedQuestion(
            row[: shape.context],
            tuple(np.split(row[shape.context :], shape.answers)),
            number % shape.answers,
        )
        for number, row in enumerate(rows)
    ]


def unpacked_scores(questions: Questions, merged_model: MergedModel) -> list[Tensor]:
    """Score every answer, a row per answer; per question [C]."""
    alone = [EncodedQuestion(q.context, (end,), 0) for q in questions for end in q.endings]
    scores = torch.cat(ending_scores(alone, merged_model))
    return list(torch.split(scores, [len(q.endings) for q in questions]))


SIDES: Final = {OURS: ending_scores, UNPACKED: unpacked_scores}


def step(
    side: str, questions: Questions, reference: Sequence[Tensor], merged_model: MergedModel
) -> Result:
    """Return the loss of a batch and its gradient by the weights of the module."""
    scores = SIDES[side](questions, merged_model)
    golds = [question.gold for question in questions]
    loss = preference_loss(scores, reference, golds, beta=0.1)
    return loss.item(), gradient_of(loss, merged_model.require_module())


def measure(subject: Subject, shape: argparse.Namespace) -> Report:
    merged_model, questions = subject.merged_model, questions_of(subject.ids, shape)
    merged_model.require_module().requires_grad_(True)
    with torch.no_grad():
        reference = ending_scores(questions, merged_model.base())
    sides = {name: partial(step, name, questions, reference, merged_model) for name in SIDES}
    ours, theirs = compare(sides, shape.rounds, to=OURS).values()
    contexts, tail = [q.context for q in questions], merged_model.raw_tail
    units = int(merged_model.pack(contexts, raw_tail=tail).unit_counts.sum())
    tails = shape.questions * shape.answers * (shape.ending - 1)
    columns = {OURS: units + tails, UNPACKED: units * shape.answers + tails}
    sizes = BackboneShape.of_model(subject.backbone.model)
    head = sizes.head_weights * shape.questions * shape.answers * shape.ending
    work = {name: sizes.block_weights * count + head for name, count in columns.items()}
    return {
        "token_reduction": 1 - units / (shape.questions * shape.context),
        "columns": columns[UNPACKED] / columns[OURS],
        "products": work[UNPACKED] / work[OURS],
        "seconds": {OURS: ours["seconds"], UNPACKED: theirs["seconds"]},
        "times": theirs["time_ratio"],
        "loss": ours["loss"],
        "loss_error": theirs["loss_error"],
        "gradient_error": theirs["gradient_error"],
    }


def gates(report: Report) -> Gates:
    gates = Gates()
    for name, measured in report["checkpoints"].items():
        gates.at_least(f"{name}_times", measured["times"]["median"], TIMES)
        gates.at_most(f"{name}_of_bound", measured["times"]["median"] / measured["columns"], 1.0)
        gates.at_most(f"{name}_loss_error", measured["loss_error"] / ERROR, 1.0)
        gates.at_most(f"{name}_gradient_error", measured["gradient_error"] / ERROR, 1.0)
    return gates


def run(options: argparse.Namespace, report: Report) -> None:
    shape = ("device", "questions", "answers", "context", "ending")
    report |= {name: getattr(options, name) for name in shape}
    tokens = options.questions * (options.context + options.answers * options.ending)
    report["checkpoints"] = {
        name: measure(subject(name, tokens, dtype="float32", device=options.device), options)
        for name in options.checkpoints
    }


BENCHMARK: Final = Benchmark(
    options={
        "checkpoints": CHECKPOINTS,
        "questions": 2,
        "answers": 4,
        "context": 96,
        "ending": 24,
        "rounds": 10,
        "device": default_device(),
    },
    measure=run,
    gates=gates,
    equal=("error",),
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
