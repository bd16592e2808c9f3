"""Stages ``count`` (Ray Data) and ``filter``: frequent n-grams, then rules per threshold."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tasks.corpus import tokens
from tasks.counting import count_distributed
from tasks.lease import ClusterLease
from tasks.rows import load_array
from tasks.stage import Artifact, Metrics, StageSpec, run_stage
from umim_core.backbone import load_tokenizer
from umim_core.config import Cell
from umim_core.fingerprint import special_ids, tokenizer_fingerprint
from umim_core.rules.collisions import collision_rate
from umim_core.rules.counting import (
    ORDERS,
    NgramCounts,
    check_tau,
    cut_segments,
)
from umim_core.rules.filters import step_counts
from umim_core.rules.ruleset import RuleSet


def count_stage(
    root: Path,
    lease: ClusterLease,
    tokenized: Artifact,
    cell: Cell,
    tau: int,
    segment_length: int,
) -> Artifact:
    """Count the n-grams of the training split at the smallest threshold needed."""
    tokenizer = load_tokenizer(cell.backbone, revision=cell.revision)
    excluded = np.array(sorted(special_ids(tokenizer)), dtype=np.int64)
    spec = StageSpec(
        "count",
        1,
        {"tau": check_tau(tau), "segment_length": segment_length, "excluded": excluded.tolist()},
        {"tokens": tokenized.file_digest("train.npy")},
    )

    def build(out: Path) -> Metrics:
        lease.ensure()
        ids, offsets = cut_segments(tokens(tokenized, "train"), segment_length)
        counts = count_distributed(ids, offsets, tau, excluded)
        for order in ORDERS:
            np.save(out / f"keys_{order}.npy", counts.keys[order], allow_pickle=False)
            np.save(out / f"support_{order}.npy", counts.support[order], allow_pickle=False)
        return {
            "tokens": float(len(ids)),
            **{f"ngrams_{order}": float(len(counts.keys[order])) for order in ORDERS},
        }

    return run_stage(root, spec, build)


def filter_stage(
    root: Path,
    counted: Artifact,
    tokenized: Artifact,
    cell: Cell,
    segment_length: int,
) -> Artifact:
    """Filter counts into the rule set of one threshold and policy; the artifact holds ``rules``."""
    fingerprint = tokenizer_fingerprint(load_tokenizer(cell.backbone, revision=cell.revision))
    spec = StageSpec(
        "filter",
        1,
        {
            "tau": cell.tau,
            "overlap": cell.overlap,
            "containment": cell.containment,
            "segment_length": segment_length,
            "tokenizer": fingerprint,
        },
        {"counts": counted.digest, "tokens": tokenized.file_digest("train.npy")},
    )

    def build(out: Path) -> Metrics:
        counts = NgramCounts(
            {n: load_array(counted.path / f"keys_{n}.npy") for n in ORDERS},
            {n: load_array(counted.path / f"support_{n}.npy") for n in ORDERS},
            counted.manifest()["config"]["tau"],
        )
        ruleset = RuleSet.from_counts(
            counts,
            tau=cell.tau,
            overlap=cell.overlap,
            containment=cell.containment,
            segment_length=segment_length,
            tokenizer_fingerprint=fingerprint,
            corpus_digest=tokenized.file_digest("train.npy"),
        )
        (out / "rules").mkdir()
        ruleset.write(out / "rules")
        raw, passed = step_counts(counts, cell.tau, cell.overlap)
        steps = {"raw": raw, "overlap": passed, "rules": ruleset.counts_by_order}
        numbers = {f"{name}_{n}": float(steps[name][n]) for name in steps for n in ORDERS}
        return {**numbers, "collision_rate": collision_rate(ruleset)}

    return run_stage(root, spec, build)
