"""Stages that make rules: of frequent n-grams, of spans the backbone is sure of, of a directory.

    count, filter                  n-grams of the training split (Ray Data), rules per threshold
    confidence, confidence-rules   spans that the frozen backbone is sure of, rules per threshold
    given-rules                    a rule directory

What is counted once serves several thresholds. A count that dies resumes with its next order, or
with its next piece of the text.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tasks.cluster.lease import ClusterLease
from tasks.cluster.worker_tasks import call_on_worker
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
from tasks.stages.train import dtype_key
from umim_core.backbone.backbone import load_backbone
from umim_core.backbone.fingerprint import backbone_identity, special_ids, tokenizer_fingerprint
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.config.recipe import BackboneDtype, Cell, Device
from umim_core.config.rule_options import RuleOptions
from umim_core.errors import ConfigError
from umim_core.merging.likelihood import check_positions
from umim_core.mining.confidence import (
    SpanCounts,
    add_span_counts,
    confidence_counts,
)
from umim_core.mining.mine import count, excluded_ids, rules_of
from umim_core.progress import followed, leave_note
from umim_core.rules.grams import LONGEST, NgramCounts
from umim_core.rules.origin import RuleOrigin
from umim_core.rules.ruleset import RuleSet
from umim_core.store.arrays import open_array, save_array
from umim_core.store.publication import STATE
from umim_core.text.token_ids import UniformOffsets, ids_digest
from umim_core.text.tokens import check_known

logger = logging.getLogger("umim.count")
_confidence_logger = logging.getLogger("umim.confidence")
_BATCH: Final = 8  # segments per forward
_PIECE_TOKENS: Final = 1 << 18


def count_stage(
    root: Path,
    lease: ClusterLease,
    tokenized: Artifact,
    backbone: str,
    revision: str | None,
    options: RuleOptions,
) -> Artifact:
    """Count the n-grams of the training split that reach tau, the smallest that is needed.

    An order that is counted is kept under ``state`` until the stage is finished, so a run that
    dies resumes with the next one.
    """
    tokenizer = load_tokenizer(backbone, revision=revision)
    excluded = excluded_ids(tokenizer, options.protect)
    spec = StageSpec(
        "count",
        3,
        {
            "tau": options.tau,
            "segment_length": options.length,
            "excluded": list(excluded),
            "count_documents": options.count_documents,
            **_longest_key(options),
        },
        {"tokens": tokenized.folder_digest("train")},
        resumable=True,
    )

    def build(out: Path) -> Metrics:
        clear_leftovers(out)
        lease.ensure()
        shards = tokens(tokenized, "train")
        check_known(shards.max_id, tokenizer)
        offsets = UniformOffsets.within(len(shards), options.length)
        corpus = Corpus(tokenized.path / "train", offsets, excluded)
        at_a_time = options.block_tokens
        if at_a_time is None and options.max_memory_gib is not None:
            at_a_time = default_block_tokens(int(offsets[-1]), cluster_cpus())
        state = out / STATE
        began = time.monotonic()
        with followed(state):
            counter = ClusterCounter(
                corpus,
                options.block_tokens,
                known=lambda order: _load_order(state, order),
                finished=lambda order, keys, support: _save_order(state, order, keys, support),
                progress=lambda done, total, text: leave_note(state, done, total, text),
                longest=options.longest,
            )
            counts = count(options, counter, shards, offsets, excluded, at_a_time=at_a_time)
        seconds = time.monotonic() - began
        documents = {} if counts.documents is None else {"documents": counts.documents}
        save_orders(out, keys=counts.keys, support=counts.support, **documents)
        write_corpus_digest(out, ids_digest(shards, offsets))
        return {
            "tokens": float(offsets[-1]),
            "bytes_per_second": 4.0 * offsets[-1] / max(seconds, 1e-9),
            **{f"ngrams_{order}": float(len(counts.keys[order])) for order in counts.orders},
        }

    return run_stage(root, spec, build)


def filter_stage(
    root: Path,
    counted: Artifact,
    tokenized: Artifact,
    backbone: str,
    revision: str | None,
    options: RuleOptions,
) -> Artifact:
    """Filter counts into the rule set of one threshold and policy; the artifact holds ``rules``."""
    fingerprint = tokenizer_fingerprint(load_tokenizer(backbone, revision=revision))
    spec = StageSpec(
        "filter",
        3,
        {
            "tau": options.tau,
            "overlap": options.overlap,
            "containment": options.containment,
            "rule_budget": options.rule_budget,
            "min_documents": options.min_documents,
            "segment_length": options.length,
            "tokenizer": fingerprint,
            **({} if options.spans is None else {"spans": options.spans}),
            **_longest_key(options),
        },
        {"counts": counted.digest, "tokens": tokenized.folder_digest("train")},
    )

    def build(out: Path) -> Metrics:
        shards = tokens(tokenized, "train")
        mined = rules_of(
            _read_counts(counted.path, int(counted.manifest()["config"]["tau"])),
            RuleOrigin(
                options=options,
                tokenizer_fingerprint=fingerprint,
                corpus_digest=corpus_digest(counted.path),
            ),
            shards,
            UniformOffsets.within(len(shards), options.length),
        )
        return write_rules(out, mined.rules, raw=mined.raw, overlap=mined.overlap)

    return run_stage(root, spec, build)


def _longest_key(options: RuleOptions) -> dict[str, object]:
    """Return the longest rules for a stage's key: nothing if they are the paper's."""
    return {} if options.longest == LONGEST else {"longest": options.longest}


def _load_order(state: Path, order: int) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    folder = state / f"order-{order}"
    if not has_part(folder, "order", {"order": order}, logger):
        return None
    return np.array(open_array(folder / "keys.npy")), np.array(open_array(folder / "support.npy"))


def _save_order(
    state: Path, order: int, keys: NDArray[np.int64], support: NDArray[np.int64]
) -> None:
    def write(folder: Path) -> None:
        save_array(folder / "keys.npy", keys)
        save_array(folder / "support.npy", support)

    save_part(state / f"order-{order}", "order", {"order": order}, write)


def _read_counts(folder: Path, tau: int) -> NgramCounts:
    keys, support = (load_orders(folder, name) for name in ("keys", "support"))
    return NgramCounts(keys, support, tau, load_orders(folder, "documents") or None)


def given_rules_stage(root: Path, cell: Cell) -> Artifact:
    """Take over a rule directory; the artifact holds ``rules``."""
    if cell.rules is None:
        raise ConfigError("a cell must name its rule directory", None, "Set rules.")
    tokenizer = load_tokenizer(cell.backbone, revision=cell.revision)
    fingerprint = tokenizer_fingerprint(tokenizer)
    rules = RuleSet.load(cell.rules, tokenizer_fingerprint=fingerprint)
    rules.check_vocabulary(len(tokenizer), special_ids(tokenizer))
    spec = StageSpec("given-rules", 1, {"tokenizer": fingerprint}, {"rules": rules.digest})

    def build(out: Path) -> Metrics:
        return write_rules(out, rules)

    return run_stage(root, spec, build)


def confidence_stage(
    root: Path,
    lease: ClusterLease,
    tokenized: Artifact,
    backbone: str,
    revision: str | None,
    options: RuleOptions,
    device: Device = "cpu",
    dtype: BackboneDtype = "float32",
) -> Artifact:
    """Count the maximal runs of 2 to 4 tokens that the backbone is confident about."""
    tokenizer = load_tokenizer(backbone, revision=revision)
    excluded = excluded_ids(tokenizer, options.protect)
    spec = StageSpec(
        "confidence",
        1,
        {
            "min_probability": options.min_probability,
            "tokens": options.confidence_tokens,
            "segment_length": options.length,
            "excluded": list(excluded),
            "device": device,
            **dtype_key(dtype),
        },
        {
            "tokens": tokenized.folder_digest("train"),
            "backbone": backbone_identity(backbone, revision),
        },
        resumable=True,
    )

    def build(out: Path) -> Metrics:
        asked = (tokenized, backbone, revision, options, excluded, device, dtype)
        with followed(out / STATE):
            return call_on_worker(lease, partial(count_spans, out, *asked), writes=True)

    return run_stage(root, spec, build)


def count_spans(
    out: Path,
    tokenized: Artifact,
    backbone: str,
    revision: str | None,
    options: RuleOptions,
    excluded: tuple[int, ...],
    device: Device,
    dtype: BackboneDtype,
) -> Metrics:
    """Ask a backbone piece by piece; pieces that a run before has left are not asked again."""
    state, length = out / STATE, options.length
    clear_leftovers(out)  # of an earlier run, or of a worker that was lost
    tokenizer = load_tokenizer(backbone, revision=revision)
    shards = tokens(tokenized, "train")
    check_known(shards.max_id, tokenizer)
    whole = UniformOffsets.within(len(shards), length)
    most = int(whole[-1]) if options.confidence_tokens is None else options.confidence_tokens
    offsets = UniformOffsets(length, min(whole.count, most // length))
    model = load_backbone(backbone, revision=revision, dtype=dtype, device=device)
    check_positions(model, length, "Lower segment_length.")
    pieces = _pieces(offsets)
    parts: list[SpanCounts] = []
    for number, (first, last) in enumerate(pieces):
        piece, body = state / f"piece-{number}", {"tokens": [first, last]}
        if not has_part(piece, "piece", body, _confidence_logger):
            spans, support = confidence_counts(
                model,
                shards[first:last],
                UniformOffsets(length, (last - first) // length),
                min_probability=options.min_probability,
                batch_size=_BATCH,
                excluded=excluded,
            )
            save = partial(save_orders, spans=spans, support=support)
            save_part(piece, "piece", body, save)
        parts.append(_read_spans(piece))
        leave_note(state, number + 1, len(pieces), "asking the backbone")
    counted = add_span_counts(parts)
    save_orders(out, spans=counted[0], support=counted[1])
    write_corpus_digest(out, ids_digest(shards, offsets))
    return {
        "tokens": float(offsets[-1]),
        **{f"spans_{n}": float(len(counted[0][n])) for n in counted[0]},
        **{f"runs_{n}": float(counted[1][n].sum()) for n in counted[1]},
    }


def confidence_rules_stage(
    root: Path, counted: Artifact, backbone: str, revision: str | None, options: RuleOptions
) -> Artifact:
    """Make the runs that occur at least tau times the rules of one cell."""
    fingerprint = tokenizer_fingerprint(load_tokenizer(backbone, revision=revision))
    spec = StageSpec(
        "confidence-rules",
        2,
        {
            "tau": options.tau,
            "overlap": options.overlap,
            "containment": options.containment,
            "min_probability": options.min_probability,  # recorded
            "segment_length": options.length,
            "tokenizer": fingerprint,
            **({"protect": list(options.protect)} if options.protect else {}),
        },
        {"runs": counted.digest},
    )

    def build(out: Path) -> Metrics:
        origin = RuleOrigin(
            options=options,
            tokenizer_fingerprint=fingerprint,
            corpus_digest=corpus_digest(counted.path),
        )
        return write_rules(out, RuleSet.filtered(*_read_spans(counted.path), origin)[0])

    return run_stage(root, spec, build)


def _pieces(offsets: UniformOffsets) -> list[tuple[int, int]]:
    """Return (first, end) in tokens of each piece; a piece holds whole batches but for the last."""
    batch = _BATCH * int(offsets[1])
    step = max(1, _PIECE_TOKENS // batch) * batch
    end = int(offsets[-1])
    return [(first, min(first + step, end)) for first in range(0, end, step)]


def _read_spans(folder: Path) -> SpanCounts:
    return load_orders(folder, "spans"), load_orders(folder, "support")
