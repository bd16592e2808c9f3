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
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

import numpy as np
import yaml

from umim_core.backbone.tokenizer_files import (
    backbone_identity,
    load_tokenizer,
    special_ids,
    tokenizer_fingerprint,
)
from umim_core.checkpoint.checkpoint_index import own_name
from umim_core.config.form import PAPER_FORM
from umim_core.config.model_base import SPLITS
from umim_core.errors import CorpusError, require
from umim_core.progress import followed
from umim_core.rules.ruleset import RuleSet
from umim_core.store.arrays import save_array
from umim_core.store.artifacts import directory_digest, json_digest
from umim_core.store.publication import build_once, last_step, publish_directory
from umim_core.text.sources import Source
from umim_core.text.token_ids import Ids
from umim_core.text.tokens import check_known, tokenized_corpus
from umim_core.training.optimizer import AdamWStrategy
from umim_core.training.train_job import TrainJob, read_curve, read_summary, run_job

logger = logging.getLogger("umim.progress")
_HELD_OUT: Final = 20  # one row in so many goes to each of valid and test
_MOST_HELD_OUT: Final = 64  # rows


def train_checkpoint(job: TrainJob, source: Source, out: Path) -> dict[str, float]:
    """Train a merge module and write its directory; a finished one is found, not trained again.

    The job's rows are ``max_tokens`` of the source's text, or of ids of the backbone's tokenizer.

    Returns:
        Steps taken, best step and score, skipped steps, and the divergence from the base model on
        held-out rows before the first step and at the best one (``kl_first``, ``kl_best``; nats).
    """
    rules = RuleSet.load(Path(str(job.rules)))
    decisive = {  # everything that decides the result
        **asdict(job),
        "config": job.config.model_dump(mode="json"),
        "form": job.form.form(),
        "backbone": backbone_identity(job.backbone, job.revision),
        "rules": rules.digest,
        "start": None if job.start is None else directory_digest(Path(job.start)),
        "text": source.digests(),
        "source": source.model_dump(mode="json"),
    }
    built = build_once(
        out,
        json_digest(decisive),
        lambda folder: _train(replace(job, out=str(folder)), source, rules, out.resolve()),
        kind="trained",
        schema=1,
        resumable=True,
        wait_seconds=0.0,
    )
    if not built.executed:
        logger.info("%s is finished; nothing is trained again", out)
    curve = [row for row in read_curve(out) if "valid_kl" in row]
    summary = read_summary(out)
    best = next(row for row in curve if row["step"] == summary["best_step"])
    return summary | {"kl_first": curve[0]["valid_kl"], "kl_best": best["valid_kl"]}


def _train(job: TrainJob, source: Source, rules: RuleSet, out: Path) -> None:
    """Tokenize and train in the job's folder, which becomes ``out``."""
    tokenizer = load_tokenizer(job.backbone, revision=job.revision)
    tokens = Path(job.out) / "tokens"
    rules.check_for_module(tokenizer_fingerprint(tokenizer), len(tokenizer), special_ids(tokenizer))
    if not tokens.exists():
        with tokenized_corpus(source, tokenizer, tokens.parent) as read:
            check_known(read.ids, tokenizer)
            publish_directory(tokens, lambda folder: _split(read.ids, job.max_tokens, folder))
    if (step := last_step(job.state)) is not None:
        logger.info("resuming at step %d", step)
    job = replace(job, train=str(tokens / "train.npy"), valid=str(tokens / "valid.npy"))
    with followed(job.state):
        run_job(job, AdamWStrategy)
    if job.start is None:
        text = yaml.safe_dump(_recipe(job, out), sort_keys=False, allow_unicode=True)
        (tokens.parent / "recipe.yaml").write_text(text, encoding="utf-8")


def _split(ids: Ids, length: int, folder: Path) -> None:
    """Write the ids of the splits: whole rows; the last ones are held out."""
    rows = len(ids) // length
    held_out = min(_MOST_HELD_OUT, max(1, rows // _HELD_OUT))
    trained = rows - 2 * held_out
    rule = f"training needs at least three rows of {length} tokens, two of them held out"
    require(trained >= 1, CorpusError, rule, rows, "Give more text or a smaller --segment-length.")
    borders = (0, trained, trained + held_out, rows)
    for split, start, stop in zip(SPLITS, borders, borders[1:], strict=False):
        part = ids[start * length : stop * length]
        save_array(folder / f"{split}.npy", part.astype(np.uint32))


def _recipe(job: TrainJob, out: Path) -> dict[str, object]:
    """Return a recipe that trains the same module in the pipeline, and one as the paper does."""
    common = {"backbone": job.backbone, "rules": str(out / "checkpoint" / "rules")}
    form, paper = job.form.form(), PAPER_FORM.form()
    splits: dict[str, object] = {
        split: {"kind": "ids", "path": str(out / "tokens" / f"{split}.npy")} for split in SPLITS
    }
    return {
        "name": own_name(out.name)[:64],
        "description": f"The training of {out.name}, evaluated and compared by the pipeline.",
        "seed": job.seed,
        "corpus": {"kind": "files", **splits},
        "segment_length": job.max_tokens,
        "cells": [common | cell for cell in ([form] if form == paper else [form, paper])],
        "distill": job.config.model_dump(mode="json"),
        "task": None,
        "cluster": {"workers": 0, "use_gpu": job.use_gpu},
    }
