"""Units of a table that a worker measures: a shard of questions, or a text.

Workers import this module, so it stays free of torch until a job loads its model. A worker keeps
the last checkpoint and backbone that it has opened.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from umim_core.config.recipe import BackboneDtype, Device
from umim_core.config.table_recipe import TableSetting, TableText
from umim_core.errors import BackboneError, CheckpointError, EvaluationError, require
from umim_core.evaluation.questions import (
    QuestionScores,
    QuestionSet,
    QuestionSource,
    mean_of,
)
from umim_core.evaluation.sizes import Sizes
from umim_core.store.artifacts import directory_digest, read_json

if TYPE_CHECKING:
    from umim_core.backbone.backbone import Backbone
    from umim_core.checkpoint.checkpoint import Checkpoint


QUESTIONS: Final = "questions.json"
SHARDS: Final = "shards"
Report = dict[str, Any]


def read_question_set(directory: Path) -> QuestionSet:
    body: Any = read_json(directory / QUESTIONS)
    return QuestionSet(**body | {"metrics": tuple(body["metrics"])})


def read_shards(directory: Path) -> QuestionScores:
    """Return the shards of an artifact put together, in the order of the questions."""
    shards: list[Any] = [*map(read_json, sorted((directory / SHARDS).glob("*.json")))]
    values = {
        metric: [value for shard in shards for value in shard["values"][metric]]
        for metric in (shards[0]["values"] if shards else ())
    }
    return QuestionScores(
        values,
        [prompt for shard in shards for prompt in shard["prompts"]],
        sum((Sizes(**shard["total"]) for shard in shards), Sizes()),
        [texts for shard in shards for texts in shard["answers"]],
        [Sizes(**sizes) for shard in shards for sizes in shard["sizes"]],
        any(shard["baseline"] for shard in shards),
    )


def table_row(task: str, setting: str, own: QuestionScores, base: QuestionScores) -> Report:
    """Return the figures of a task under a setting, with differences to the first setting.

    Returns:
        Mean and standard error (``stderr``) of every metric, and of its difference where the first
        setting has it: token reductions of generated answers are of merging alone. ``shortfall`` is
        the part of contexts that a baseline should have dropped and could not.
    """
    rule = f"all settings must answer the same questions of {task}, after the same prompts"
    remedy = "Use a task whose prompts do not change from one reading to the next."
    same = own.prompts == base.prompts
    require(same, EvaluationError, rule, f"other prompts under {setting}", remedy)
    total = own.total
    return {
        "task": task,
        "setting": setting,
        "questions": len(own.prompts),
        "token_reduction": total.token_reduction if total.tokens else None,
        "context_token_reduction": total.context_token_reduction,
        "cache_reduction": None if total.columns is None else total.cache_reduction,
        "shortfall": total.shortfall_share if own.baseline and total.context_tokens else None,
        **{name: mean_of(values) for name, values in own.values.items()},
        **{
            f"{name}_difference": mean_of(np.subtract(values, base.values[name]).tolist())
            for name, values in own.values.items()
            if name in base.values
        },
    }


@dataclass(frozen=True)
class ModelPlace:
    checkpoint: str
    digest: str
    device: Device
    dtype: BackboneDtype
    batch_size: int
    backbone: str | None = None


def find_questions(source: QuestionSource) -> QuestionSet:
    _ask_no_network(source)
    from umim_core.evaluation.questions import question_set

    return question_set(source)


def score_shard(
    place: ModelPlace,
    setting: TableSetting,
    source: QuestionSource,
    questions: QuestionSet,
    first: int,
    last: int,
    own_model: str | None = None,
) -> QuestionScores:
    _ask_no_network(source)
    from umim_core.evaluation.harness import UmimLM
    from umim_core.evaluation.questions import score_questions
    from umim_core.evaluation.scoring import named_method

    checkpoint, backbone = _opened(place)
    model = UmimLM(
        checkpoint,
        setting.merge,
        backbone,
        batch_size=place.batch_size,
        method=setting.method,
        target_tr=setting.target_tr,
        raw_tail=setting.raw_tail,
        protect=setting.protect,
    ).sharing_contexts()
    chosen = named_method(setting.method, own_model)
    rule = f"every machine must have the same model of the baseline {chosen}"
    remedy = "Load that commit there, or clear the hub's cache and let it load again."
    require(model.method == chosen, BackboneError, rule, model.method, remedy)
    return score_questions(model, source, questions, first, last)


def measure_text(place: ModelPlace, text: TableText) -> dict[str, float]:
    """Return alignment, and perplexity of base and checkpoint, on rows at even distances.

    With baselines also the perplexity of raw second halves, behind first halves that base,
    checkpoint and every baseline read: ``ppl_half_NAME``, and the reduction ``tr_half_NAME``.
    """
    from umim_core.baselines.registry import find_baseline
    from umim_core.evaluation.alignment import evaluate_alignment
    from umim_core.evaluation.perplexity import perplexity_figures, second_half_perplexity
    from umim_core.evaluation.scoring import RequestScorer, Scorer, method_scorer
    from umim_core.model.umim import UMIM
    from umim_core.text.token_ids import segment_rows, spread_rows
    from umim_core.text.tokens import iter_token_pieces

    checkpoint, backbone = _opened(place)
    merged_model = UMIM(backbone, checkpoint).merged_model
    ids = np.concatenate([ids for ids, _ in iter_token_pieces(text.source, backbone.tokenizer)])
    length, batch = text.segment_length, place.batch_size
    cut = segment_rows(ids, length)
    rows = list(cut[spread_rows(len(cut), text.rows)])
    halves: dict[str, float] = {}
    if text.methods:
        scorers: dict[str, RequestScorer] = {
            "base": Scorer(merged_model.base(), length),
            "umim": Scorer(merged_model, length),
        }
        for name in text.methods:
            method = find_baseline(name).make(backbone, merged_model.require_matcher())
            scorers[name] = method_scorer(method, merged_model, length)
        for name, scorer in scorers.items():
            halves[f"ppl_half_{name}"] = second_half_perplexity(rows, scorer, batch).ppl
            halves[f"tr_half_{name}"] = scorer.total.cache_reduction or 0.0
    return halves | {
        **evaluate_alignment(rows, merged_model, batch).metrics(),
        "rows": float(len(rows)),
        **perplexity_figures(rows, merged_model, batch),
    }


@lru_cache(maxsize=1)
def _opened(place: ModelPlace) -> tuple[Checkpoint, Backbone]:
    from umim_core.checkpoint.checkpoint import Checkpoint

    digest = directory_digest(Path(place.checkpoint))
    rule = f"every machine must have the same checkpoint {place.checkpoint}"
    found = f"{digest[:12]} instead of {place.digest[:12]}"
    remedy = "Copy the one of the machine that runs the flow, or put it into a shared folder."
    require(digest == place.digest, CheckpointError, rule, found, remedy)
    checkpoint = Checkpoint.load(Path(place.checkpoint))
    backbone = _backbone(*backbone_of(checkpoint, place.backbone), place.dtype, place.device)
    checkpoint.check_backbone(backbone)
    return checkpoint, backbone


def backbone_of(checkpoint: Checkpoint, named: str | None) -> tuple[str, str | None]:
    """Return name and revision of the backbone: the one that a recipe names, else its own."""
    config = checkpoint.config
    return (named, None) if named is not None else (config.backbone, config.backbone_revision)


@lru_cache(maxsize=1)
def _backbone(name: str, revision: str | None, dtype: BackboneDtype, device: Device) -> Backbone:
    """Load a backbone; settings with rules of their own have checkpoints of their own on it."""
    from umim_core.backbone.backbone import load_backbone

    return load_backbone(name, revision=revision, dtype=dtype, device=device)


def _ask_no_network(source: QuestionSource) -> None:
    """Ask no network where a folder stands for the hub; libraries read this as they are loaded."""
    if source.hub is not None:
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
