"""Units of a table that a worker measures: a shard of questions, or a text.

Workers import this module, so it stays free of torch until a job loads its model. A worker keeps
the last checkpoint and backbone that it has opened.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from umim_core.config.recipe import BackboneDtype, Device
from umim_core.config.table_recipe import TableSetting, TableText
from umim_core.errors import BackboneError, CheckpointError
from umim_core.evaluation.tasks.question_shards import QuestionSet, QuestionSource, ShardScores
from umim_core.store.artifacts import directory_digest

if TYPE_CHECKING:
    from umim_core.backbone.backbone import Backbone
    from umim_core.checkpoint.checkpoint import Checkpoint


@dataclass(frozen=True)
class ModelPlace:
    """A checkpoint with its backbone, and where and how it runs."""

    checkpoint: str
    digest: str
    device: Device
    dtype: BackboneDtype
    batch_size: int


@dataclass(frozen=True)
class ShardJob:
    """Questions ``first`` to ``last`` - 1 of a task under a setting."""

    place: ModelPlace
    setting: TableSetting
    source: QuestionSource
    questions: QuestionSet
    first: int
    last: int
    own_model: str | None = None


@dataclass(frozen=True)
class TextJob:
    """A text on a checkpoint and its base model."""

    place: ModelPlace
    text: TableText


def find_questions(source: QuestionSource) -> QuestionSet:
    """Return what a task's questions are; see ``question_set``."""
    _ask_no_network(source)
    from umim_core.evaluation.tasks.question_shards import question_set

    return question_set(source)


def score_shard(job: ShardJob) -> ShardScores:
    """Score one shard; see ``score_questions``.

    Raises:
        BackboneError: If this machine has a baseline's own model at another commit.
    """
    _ask_no_network(job.source)
    from umim_core.evaluation.harness import UmimLM
    from umim_core.evaluation.method_scoring import named_method
    from umim_core.evaluation.tasks.question_shards import score_questions

    checkpoint, backbone = _opened(job.place)
    model = UmimLM(
        checkpoint,
        job.setting.merge,
        backbone,
        batch_size=job.place.batch_size,
        method=job.setting.method,
        target_tr=job.setting.target_tr,
        raw_tail=job.setting.raw_tail,
        protect=job.setting.protect,
    )
    if model.method != (wanted := named_method(job.setting.method, job.own_model)):
        raise BackboneError(
            f"every machine must have the same model of the baseline {wanted}",
            model.method,
            "Load that commit there, or clear the hub's cache and let it load again.",
        )
    return score_questions(model, job.source, job.questions, job.first, job.last)


def measure_text(job: TextJob) -> dict[str, float]:
    """Return alignment, and perplexity of base and checkpoint, on rows at even distances.

    With baselines also the perplexity of raw second halves, behind first halves that base,
    checkpoint and every baseline read: ``ppl_half_NAME``, and the reduction ``tr_half_NAME``.
    """
    import numpy as np

    from umim_core.baselines.methods import BASELINES
    from umim_core.evaluation.alignment import evaluate_alignment
    from umim_core.evaluation.method_scoring import AnyScorer, method_scorer
    from umim_core.evaluation.perplexity import perplexity, second_half_perplexity
    from umim_core.evaluation.scoring import Scorer
    from umim_core.model.umim import UMIM
    from umim_core.text.token_ids import cut_segments
    from umim_core.text.tokens import iter_token_pieces

    checkpoint, backbone = _opened(job.place)
    compressed = UMIM(backbone, checkpoint).compressed
    pieces = [ids for ids, _ in iter_token_pieces(job.text.source, backbone.tokenizer)]
    length = job.text.segment_length
    cut = cut_segments(np.concatenate(pieces), length)[0].reshape(-1, length)
    count = min(job.text.rows, len(cut))
    rows = [cut[index * len(cut) // count] for index in range(count)]
    batch = job.place.batch_size
    base = perplexity(rows, compressed.base(), batch)
    ours = perplexity(rows, compressed, batch)
    increase, error = ours.increase_over(base)
    halves: dict[str, float] = {}
    if job.text.methods:
        scorers: dict[str, AnyScorer] = {
            "base": Scorer(compressed.base(), "prompt", length),
            "umim": Scorer(compressed, "prompt", length),
        }
        for name in job.text.methods:
            method = BASELINES.find(name)(backbone, compressed.require_matcher())
            scorers[name] = method_scorer(method, compressed, length)
        for name, scorer in scorers.items():
            halves[f"ppl_half_{name}"] = second_half_perplexity(rows, scorer, batch).ppl
            halves[f"tr_half_{name}"] = scorer.held.token_reduction
    return halves | {
        **evaluate_alignment(rows, compressed, batch).metrics(),
        "rows": float(count),
        "ppl_base": base.ppl,
        "ppl_umim": ours.ppl,
        "ppl_token_reduction": ours.token_reduction,
        "nats_increase": increase,
        **({} if error is None else {"nats_increase_se": error}),
    }


@lru_cache(maxsize=1)
def _opened(place: ModelPlace) -> tuple[Checkpoint, Backbone]:
    from umim_core.checkpoint.checkpoint import Checkpoint
    from umim_core.evaluation.model_args import open_model_args

    digest = directory_digest(Path(place.checkpoint))
    if digest != place.digest:
        raise CheckpointError(
            f"every machine must have the same checkpoint {place.checkpoint}",
            f"{digest[:12]} instead of {place.digest[:12]}",
            "Copy the one of the machine that runs the flow, or put it into a shared folder.",
        )
    checkpoint = Checkpoint.load(Path(place.checkpoint))
    opened = open_model_args(checkpoint, "prompt", None, None, place.dtype, place.device)
    return checkpoint, opened.backbone


def _ask_no_network(source: QuestionSource) -> None:
    """Ask no network where a folder stands for the hub; libraries read this as they are loaded."""
    if source.hub is not None:
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
