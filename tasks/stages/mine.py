"""Stages ``count`` (Ray Data) and ``filter``: frequent n-grams, then rules per threshold."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tasks.cluster.lease import ClusterLease
from tasks.data.counting import ClusterCounter, default_block_tokens
from tasks.data.counting_tables import Corpus, cluster_cpus
from tasks.data.mining_files import (
    clear_leftovers,
    corpus_digest,
    has_part,
    load_orders,
    save_orders,
    save_part,
    write_corpus_digest,
    write_rules,
)
from tasks.run.stage import Artifact, Metrics, StageSpec, run_stage
from tasks.stages.corpus import tokens
from umim_core.backbone.fingerprint import special_ids, tokenizer_fingerprint
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.config.recipe import Cell, MiningConfig
from umim_core.errors import ConfigError
from umim_core.mining.corpus_mining import make_rules, spans_of
from umim_core.mining.finding import find_ngrams
from umim_core.mining.mining_memory import check_memory
from umim_core.mining.mining_options import MiningOptions
from umim_core.mining.preparation import (
    check_documents,
    excluded_ids,
    ids_digest,
    whole_segments,
)
from umim_core.progress import followed, leave_note
from umim_core.rules.filters import step_counts
from umim_core.rules.grams import ORDERS, NgramCounts, check_tau
from umim_core.rules.protect import check_vocabulary
from umim_core.rules.ruleset import RuleSet
from umim_core.store.arrays import save_array
from umim_core.store.publication import STATE
from umim_core.text.token_ids import UniformOffsets
from umim_core.training.token_rows import load_array

logger = logging.getLogger("umim.count")


def count_stage(
    root: Path,
    lease: ClusterLease,
    tokenized: Artifact,
    cell: Cell,
    tau: int,
    segment_length: int,
    config: MiningConfig,
) -> Artifact:
    """Count the n-grams of the training split at the smallest threshold needed.

    An order that is counted is kept under ``state`` until the stage is finished, so a run that
    dies resumes with the next one.
    """
    tokenizer = load_tokenizer(cell.backbone, revision=cell.revision)
    excluded = excluded_ids(tokenizer, config.protect)
    options = replace(_options(cell, config, segment_length), tau=check_tau(tau))
    spec = StageSpec(
        "count",
        3,
        {
            "tau": tau,
            "segment_length": segment_length,
            "excluded": list(excluded),
            "count_documents": options.count_documents,
        },
        {"tokens": tokenized.folder_digest("train")},
        resumable=True,
    )

    def build(out: Path) -> Metrics:
        clear_leftovers(out)
        lease.ensure()
        shards = tokens(tokenized, "train")
        offsets = whole_segments(shards, tokenizer, segment_length)
        check_documents(shards, config.min_documents)
        corpus = Corpus(tokenized.path / "train", offsets, excluded)
        total = int(offsets[-1])
        if config.max_memory_gib is not None:
            at_a_time = config.block_tokens or default_block_tokens(total, cluster_cpus())
            check_memory(shards, offsets, options, excluded, threads=1, at_a_time=at_a_time)
        state = out / STATE
        began = time.monotonic()
        with followed(state):
            counter = ClusterCounter(
                corpus,
                config.block_tokens,
                known=lambda order: _load_order(state, order),
                finished=lambda order, keys, support: _save_order(state, order, keys, support),
                progress=lambda done, total, text: leave_note(state, done, total, text),
            )
            ends = shards.document_ends() if options.count_documents else None
            counts = find_ngrams(options, counter, ends)
        seconds = time.monotonic() - began
        documents = {} if counts.documents is None else {"documents": counts.documents}
        save_orders(out, keys=counts.keys, support=counts.support, **documents)
        write_corpus_digest(out, ids_digest(shards, offsets))
        return {
            "tokens": float(offsets[-1]),
            "bytes_per_second": 4.0 * offsets[-1] / max(seconds, 1e-9),
            **{f"ngrams_{order}": float(len(counts.keys[order])) for order in ORDERS},
        }

    return run_stage(root, spec, build)


def filter_stage(
    root: Path,
    counted: Artifact,
    tokenized: Artifact,
    cell: Cell,
    segment_length: int,
    config: MiningConfig,
) -> Artifact:
    """Filter counts into the rule set of one threshold and policy; the artifact holds ``rules``."""
    fingerprint = tokenizer_fingerprint(load_tokenizer(cell.backbone, revision=cell.revision))
    options = _options(cell, config, segment_length)
    spec = StageSpec(
        "filter",
        3,
        {
            "tau": cell.tau,
            "overlap": cell.overlap,
            "containment": cell.containment,
            "rule_budget": cell.rule_budget,
            "min_documents": config.min_documents,
            "segment_length": segment_length,
            "tokenizer": fingerprint,
            **({} if cell.spans is None else {"spans": cell.spans}),
        },
        {"counts": counted.digest, "tokens": tokenized.folder_digest("train")},
    )

    def build(out: Path) -> Metrics:
        # Counts serve any least number of documents, so those found may know of fewer.
        check_documents(tokens(tokenized, "train"), config.min_documents)
        frequent, ruleset = make_rules(
            _read_counts(counted.path, int(counted.manifest()["config"]["tau"])),
            options,
            options.origin(fingerprint, corpus_digest(counted.path)),
        )
        if cell.spans is not None:
            shards = tokens(tokenized, "train")
            offsets = UniformOffsets(segment_length, len(shards) // segment_length)
            ruleset = spans_of(ruleset, shards, offsets, cell.spans)
        raw, passed = step_counts(frequent, frequent.tau, cell.overlap)
        return write_rules(out, ruleset, raw=raw, overlap=passed)

    return run_stage(root, spec, build)


def _options(cell: Cell, config: MiningConfig, segment_length: int) -> MiningOptions:
    """Return the options of a cell's mining."""
    return MiningOptions(
        tau=cell.tau,
        segment_length=segment_length,
        overlap=cell.overlap,
        containment=cell.containment,
        rule_budget=cell.rule_budget,
        spans=cell.spans,
        min_documents=config.min_documents,
        protect=config.protect,  # recorded; the counts, and so the key, have the ids it excludes
        max_memory_gib=config.max_memory_gib,
    )


def _load_order(state: Path, order: int) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    folder = state / f"order-{order}"
    if not has_part(folder, "order", {"order": order}, logger):
        return None
    return load_array(folder / "keys.npy"), load_array(folder / "support.npy")


def _save_order(
    state: Path, order: int, keys: NDArray[np.int64], support: NDArray[np.int64]
) -> None:
    def write(folder: Path) -> None:
        save_array(folder / "keys.npy", keys)
        save_array(folder / "support.npy", support)

    save_part(state / f"order-{order}", "order", {"order": order}, write)


def _read_counts(folder: Path, tau: int) -> NgramCounts:
    keys, support = (load_orders(folder, name) for name in ("keys", "support"))
    counted = (folder / f"documents_{ORDERS[0]}.npy").exists()
    return NgramCounts(keys, support, tau, load_orders(folder, "documents") if counted else None)


def given_rules_stage(root: Path, cell: Cell) -> Artifact:
    """Take over a rule directory; the artifact holds ``rules``."""
    if cell.rules is None:
        raise ConfigError("a cell must name its rule directory", None, "Set rules.")
    tokenizer = load_tokenizer(cell.backbone, revision=cell.revision)
    fingerprint = tokenizer_fingerprint(tokenizer)
    rules = RuleSet.load(cell.rules, tokenizer_fingerprint=fingerprint)
    check_vocabulary(rules, len(tokenizer), special_ids(tokenizer))
    spec = StageSpec("given-rules", 1, {"tokenizer": fingerprint}, {"rules": rules.digest})

    def build(out: Path) -> Metrics:
        return write_rules(out, rules)

    return run_stage(root, spec, build)
