"""A checkpoint from a model, rules and text, in one process: ``umim train``.

The directory is built next to its final name and renamed when it is whole::

    out/checkpoint/     the merge checkpoint
    out/tokens/         the ids of the splits: train, valid, test (.npy)
    out/recipe.yaml     the same training as a recipe of the pipeline, if it starts afresh
    out/curve.jsonl     losses by step
    out/summary.json    steps, best step and score

A run that is killed leaves ``out.partial`` with its last state; the same call goes on from there.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import yaml
from numpy.typing import NDArray

from umim_core.backbone.fingerprint import backbone_identity, special_ids, tokenizer_fingerprint
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.checkpoint.checkpoint_index import own_name
from umim_core.config.form import ModuleForm
from umim_core.config.recipe import DistillConfig
from umim_core.errors import CorpusError
from umim_core.mining.preparation import tokenized_corpus, whole_segments
from umim_core.progress import followed
from umim_core.rules.protect import check_for_module
from umim_core.rules.ruleset import RuleSet
from umim_core.store.arrays import open_array, save_array
from umim_core.store.artifacts import (
    canonical_json,
    directory_digest,
    sha256_bytes,
)
from umim_core.store.publication import STATE, build_once, publish_directory
from umim_core.text.shards import TokenShards
from umim_core.text.sources import Source, source_digests
from umim_core.text.token_ids import check_range
from umim_core.training.optimizer import AdamWStrategy
from umim_core.training.token_rows import TokenRows
from umim_core.training.train_job import TrainJob
from umim_core.training.train_run import place_rows, read_curve, read_summary, run_job
from umim_core.training.train_state import newest_state, step_of

logger = logging.getLogger("umim.progress")
SCHEMA: Final = 1
KIND: Final = "trained"
SPLITS: Final = ("train", "valid", "test")
_HELD_OUT: Final = 20  # one row in so many goes to each of valid and test
_MOST_HELD_OUT: Final = 64  # rows


@dataclass(frozen=True)
class OwnTraining:
    """Model, data and options of one training in one process.

    The backbone is an embedded name, a directory or a hub repository; the text may be ids of its
    tokenizer. With ``start`` the module of that checkpoint is trained further, in its form; spans
    that have a rule row there and are rules here keep it.
    """

    model: str
    rules: Path
    source: Source
    config: DistillConfig
    form: ModuleForm
    segment_length: int = 512
    seed: int = 0
    use_gpu: bool = False
    start: Path | None = None


def train_checkpoint(training: OwnTraining, out: Path) -> dict[str, float]:
    """Train a merge module and write its directory; a finished one is found, not trained again.

    Returns:
        Steps taken, best step and score, skipped steps, and the divergence from the base model on
        held-out rows before the first step and at the best one (``kl_first``, ``kl_best``; nats).
    """
    rules = RuleSet.load(training.rules)

    def build(folder: Path) -> None:
        _train(training, rules, folder, out.resolve())

    built = build_once(
        out,
        _key(training, rules),
        build,
        kind=KIND,
        schema=SCHEMA,
        resumable=True,
        wait_seconds=0.0,
    )
    if not built.executed:
        logger.info("%s is finished; nothing is trained again", out)
    return _summary(out)


def _train(training: OwnTraining, rules: RuleSet, folder: Path, out: Path) -> None:
    """Tokenize and train in a folder that becomes ``out``, from where a killed call stood."""
    tokenizer = load_tokenizer(training.model)
    special, fingerprint = special_ids(tokenizer), tokenizer_fingerprint(tokenizer)
    check_for_module(rules, fingerprint, len(tokenizer), special)
    if not (folder / "tokens").exists():
        with tokenized_corpus(training.source, tokenizer, folder) as shards:
            whole_segments(shards, tokenizer, training.segment_length)
            publish_directory(folder / "tokens", lambda place: _split(shards, training, place))
    rows = {split: _rows(folder, split, training.segment_length) for split in SPLITS[:2]}
    state = folder / STATE
    if (newest := newest_state(state, 1)) is not None:
        logger.info("resuming at step %d", step_of(newest))
    job = place_rows(_job(training, folder), rows)
    with followed(state):
        run_job(job, AdamWStrategy)
    if training.start is None:
        _write_recipe(folder, out, training)


def _key(training: OwnTraining, rules: RuleSet) -> str:
    """Return the SHA-256 of everything that decides the result."""
    parts = {
        "backbone": backbone_identity(training.model, None),
        "rules": rules.digest,
        "text": source_digests(training.source),
        "source": training.source.model_dump(mode="json"),
        "config": training.config.model_dump(mode="json"),
        "form": training.form.form(),
        "segment_length": training.segment_length,
        "seed": training.seed,
        "use_gpu": training.use_gpu,
    }
    if training.start is not None:
        parts["start"] = directory_digest(training.start)
    return sha256_bytes(canonical_json(parts).encode())


def _split(shards: TokenShards, training: OwnTraining, folder: Path) -> None:
    """Write the ids of the splits: whole rows; the last ones are held out."""
    length = training.segment_length
    total = len(shards) // length
    held = min(_MOST_HELD_OUT, max(1, total // _HELD_OUT))
    train = total - 2 * held
    if train < 1:
        raise CorpusError(
            f"training needs at least three rows of {length} tokens, two of them held out",
            total,
            "Give more text or a smaller --segment-length.",
        )
    borders = dict(
        zip(SPLITS, ((0, train), (train, train + held), (train + held, total)), strict=True)
    )
    for split, (start, stop) in borders.items():
        ids = shards[start * length : stop * length]
        save_array(folder / f"{split}.npy", ids.astype(np.uint32))


def _rows(partial: Path, split: str, length: int) -> TokenRows:
    ids: NDArray[np.uint32] = open_array(partial / "tokens" / f"{split}.npy")
    check_range(ids)
    return TokenRows.of_segments(ids.astype(np.int32), length)


def _job(training: OwnTraining, out: Path) -> TrainJob:
    return TrainJob(
        objective="distill",
        backbone=training.model,
        revision=None,
        rules=str(training.rules),
        train="train",
        valid="valid",
        start=None if training.start is None else str(training.start),
        form=training.form.form(),
        max_tokens=training.segment_length,
        seed=training.seed,
        config=training.config.model_dump(),
        strategy="ddp",
        use_gpu=training.use_gpu,
        out=str(out),
    )


def _write_recipe(partial: Path, out: Path, training: OwnTraining) -> None:
    """Write a recipe that trains the same module in the pipeline, and one as the paper does."""
    common = {"backbone": training.model, "rules": str(out / "checkpoint" / "rules")}
    settings = training.config.model_dump(mode="json")
    own, paper = training.form.form(), ModuleForm.model_validate({}).form()
    cells = [own] if own == paper else [own, paper]
    recipe = {
        "name": own_name(out.name)[:64],
        "description": f"The training of {out.name}, evaluated and compared by the pipeline.",
        "seed": training.seed,
        "corpus": {
            "kind": "files",
            **{
                split: {"kind": "ids", "path": str(out / "tokens" / f"{split}.npy")}
                for split in SPLITS
            },
        },
        "segment_length": training.segment_length,
        "cells": [common | cell for cell in cells],
        "distill": settings,
        "task": None,
        "cluster": {"workers": 0, "use_gpu": training.use_gpu},
    }
    text = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)
    (partial / "recipe.yaml").write_text(text, encoding="utf-8")


def _summary(out: Path) -> dict[str, float]:
    numbers = read_summary(out)
    curve = [row for row in read_curve(out) if "valid_kl" in row]
    best = next(row for row in curve if row["step"] == numbers["best_step"])
    return numbers | {"kl_first": curve[0]["valid_kl"], "kl_best": best["valid_kl"]}
