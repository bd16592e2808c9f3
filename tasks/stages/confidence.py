"""Stages ``confidence`` and ``confidence-rules``: spans the backbone is sure of, made rules.

The first asks the frozen backbone about the training tokens, on a worker of the cluster or in this
process, and keeps what it counted piece by piece, so a run that dies resumes with the next piece.
The second costs nothing and applies the least count, so several thresholds share the first. Its
artifact is laid out as that of ``filter``.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Final

from tasks.cluster.lease import ClusterLease
from tasks.cluster.worker_tasks import call_on_worker
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
from tasks.stages.distill import dtype_key
from umim_core.backbone.backbone import load_backbone
from umim_core.backbone.fingerprint import backbone_identity, tokenizer_fingerprint
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.config.recipe import BackboneDtype, Cell, Device, MiningConfig
from umim_core.mining.confidence import (
    SpanCounts,
    add_span_counts,
    check_segment,
    confidence_counts,
)
from umim_core.mining.preparation import excluded_ids, ids_digest, whole_segments
from umim_core.progress import followed, leave_note
from umim_core.rules.grams import ORDERS
from umim_core.rules.origin import RuleOrigin
from umim_core.rules.ruleset import RuleSet
from umim_core.store.publication import STATE
from umim_core.text.token_ids import UniformOffsets

logger = logging.getLogger("umim.confidence")
_BATCH: Final = 8  # segments per forward
_PIECE_TOKENS: Final = 1 << 18


def confidence_stage(
    root: Path,
    lease: ClusterLease,
    tokenized: Artifact,
    cell: Cell,
    segment_length: int,
    config: MiningConfig,
    device: Device = "cpu",
    dtype: BackboneDtype = "float32",
) -> Artifact:
    """Count the maximal runs of 2 to 4 tokens that the backbone is confident about."""
    tokenizer = load_tokenizer(cell.backbone, revision=cell.revision)
    excluded = excluded_ids(tokenizer, config.protect)
    spec = StageSpec(
        "confidence",
        1,
        {
            "min_probability": cell.min_probability,
            "tokens": cell.confidence_tokens,
            "segment_length": segment_length,
            "excluded": list(excluded),
            "device": device,
            **dtype_key(dtype),
        },
        {
            "tokens": tokenized.folder_digest("train"),
            "backbone": backbone_identity(cell.backbone, cell.revision),
        },
        resumable=True,
    )

    def build(out: Path) -> Metrics:
        asked = (tokenized, cell, segment_length, excluded, device, dtype)
        with followed(out / STATE):
            return call_on_worker(lease, partial(count_spans, out, *asked), writes=True)

    return run_stage(root, spec, build)


def count_spans(
    out: Path,
    tokenized: Artifact,
    cell: Cell,
    length: int,
    excluded: tuple[int, ...],
    device: Device,
    dtype: BackboneDtype,
) -> Metrics:
    """Ask a backbone piece by piece; pieces that a run before has left are not asked again."""
    state = out / STATE
    clear_leftovers(out)  # of an earlier run, or of a worker that was lost
    tokenizer = load_tokenizer(cell.backbone, revision=cell.revision)
    shards = tokens(tokenized, "train")
    whole = whole_segments(shards, tokenizer, length)
    most = int(whole[-1]) if cell.confidence_tokens is None else cell.confidence_tokens
    offsets = UniformOffsets(length, min(whole.count, most // length))
    backbone = load_backbone(cell.backbone, revision=cell.revision, dtype=dtype, device=device)
    check_segment(backbone, length)
    pieces = _pieces(offsets)
    parts: list[SpanCounts] = []
    for number, (first, last) in enumerate(pieces):
        piece, body = state / f"piece-{number}", {"tokens": [first, last]}
        if not has_part(piece, "piece", body, logger):
            spans, support = confidence_counts(
                backbone,
                shards[first:last],
                UniformOffsets(length, (last - first) // length),
                min_probability=cell.min_probability,
                batch_size=_BATCH,
                excluded=excluded,
            )
            save = partial(save_orders, spans=spans, support=support)
            save_part(piece, "piece", body, save)
        parts.append(_read_counts(piece))
        leave_note(state, number + 1, len(pieces), "asking the backbone")
    counted = add_span_counts(parts)
    save_orders(out, spans=counted[0], support=counted[1])
    write_corpus_digest(out, ids_digest(shards, offsets))
    return {
        "tokens": float(offsets[-1]),
        **{f"spans_{n}": float(len(counted[0][n])) for n in ORDERS},
        **{f"runs_{n}": float(counted[1][n].sum()) for n in ORDERS},
    }


def confidence_rules_stage(
    root: Path, counted: Artifact, cell: Cell, segment_length: int, config: MiningConfig
) -> Artifact:
    """Make the runs that occur at least tau times the rules of one cell."""
    fingerprint = tokenizer_fingerprint(load_tokenizer(cell.backbone, revision=cell.revision))
    spec = StageSpec(
        "confidence-rules",
        1,
        {
            "tau": cell.tau,
            "segment_length": segment_length,
            "tokenizer": fingerprint,
            **({"protect": list(config.protect)} if config.protect else {}),
        },
        {"runs": counted.digest},
    )

    def build(out: Path) -> Metrics:
        origin = RuleOrigin(
            tau=cell.tau,
            overlap=cell.overlap,
            containment=cell.containment,
            segment_length=segment_length,
            tokenizer_fingerprint=fingerprint,
            corpus_digest=corpus_digest(counted.path),
            protect=config.protect,
            source="confidence",
        )
        rules = RuleSet.filtered(*_read_counts(counted.path), origin)
        return write_rules(out, rules)

    return run_stage(root, spec, build)


def _pieces(offsets: UniformOffsets) -> list[tuple[int, int]]:
    """Return (first, end) in tokens of each piece; a piece holds whole batches but for the last."""
    batch = _BATCH * int(offsets[1])
    step = max(1, _PIECE_TOKENS // batch) * batch
    end = int(offsets[-1])
    return [(first, min(first + step, end)) for first in range(0, end, step)]


def _read_counts(folder: Path) -> SpanCounts:
    return load_orders(folder, "spans"), load_orders(folder, "support")
