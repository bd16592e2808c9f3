"""Stages ``confidence`` and ``confidence-rules``: spans the backbone is sure of, made rules.

The first asks the frozen backbone about the training tokens and keeps what it counted piece by
piece, so a run that dies resumes with the next piece. The second costs nothing and applies the
least count, so several thresholds share the first. Its artifact is laid out as that of ``filter``.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Final

from tasks.run.stage import Artifact, Metrics, StageSpec, run_stage
from tasks.stages.corpus import tokens
from tasks.stages.distill import dtype_key
from tasks.stages.mine import corpus_digest, write_corpus_digest
from umim_core.backbone.backbone import load_backbone
from umim_core.backbone.fingerprint import backbone_identity, tokenizer_fingerprint
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.config.recipe import BackboneDtype, Cell, Device, MiningConfig
from umim_core.distill.token_rows import load_array
from umim_core.errors import ArtifactError
from umim_core.mining.confidence import (
    SpanCounts,
    add_span_counts,
    check_segment,
    confidence_counts,
)
from umim_core.mining.preparation import excluded_ids, ids_digest, whole_segments
from umim_core.progress import followed, leave_note
from umim_core.rules.collisions import collision_rate
from umim_core.rules.grams import ORDERS
from umim_core.rules.origin import RuleOrigin
from umim_core.rules.ruleset import RuleSet
from umim_core.store.arrays import save_array
from umim_core.store.artifacts import read_manifest, write_manifest
from umim_core.store.publication import publish_directory
from umim_core.text.token_ids import UniformOffsets

logger = logging.getLogger("umim.confidence")
_SCHEMA: Final = 1
_BATCH: Final = 8  # segments per forward
_PIECE_TOKENS: Final = 1 << 18


def confidence_stage(
    root: Path,
    tokenized: Artifact,
    cell: Cell,
    segment_length: int,
    config: MiningConfig,
    device: Device = "cpu",
    dtype: BackboneDtype = "float32",
) -> Artifact:
    """Count the maximal runs of 2 to 4 tokens that the backbone is confident about.

    Args:
        root: Artifact root.
        tokenized: Token ids; the training split is read.
        cell: Backbone, probability and limit on tokens.
        segment_length: Tokens per segment L; the backbone sees no further back.
        config: Which tokens take part in no rule.
        device: Where the backbone runs.
        dtype: Its data type, as it is distilled.

    Raises:
        EvaluationError: If a segment exceeds the backbone's positions.
    """
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
        state = out / "state"
        _clear(out)
        shards = tokens(tokenized, "train")
        whole = whole_segments(shards, tokenizer, segment_length)
        most = int(whole[-1]) if cell.confidence_tokens is None else cell.confidence_tokens
        offsets = UniformOffsets(segment_length, min(whole.count, most // segment_length))
        backbone = load_backbone(cell.backbone, revision=cell.revision, dtype=dtype, device=device)
        check_segment(backbone, segment_length)
        pieces = _pieces(offsets)
        parts: list[SpanCounts] = []
        with followed(state):
            for number, (first, last) in enumerate(pieces):
                piece = state / f"piece-{number}"
                found = _load_piece(piece, (first, last))
                if found is None:
                    found = confidence_counts(
                        backbone,
                        shards[first:last],
                        UniformOffsets(segment_length, (last - first) // segment_length),
                        min_probability=cell.min_probability,
                        batch_size=_BATCH,
                        excluded=excluded,
                    )
                    _save_piece(piece, (first, last), found)
                parts.append(found)
                leave_note(state, number + 1, len(pieces), "asking the backbone")
        counted = add_span_counts(parts)
        _save_counts(out, counted)
        write_corpus_digest(out, ids_digest(shards, offsets))
        return {
            "tokens": float(offsets[-1]),
            **{f"spans_{n}": float(len(counted[0][n])) for n in ORDERS},
            **{f"runs_{n}": float(counted[1][n].sum()) for n in ORDERS},
        }

    return run_stage(root, spec, build)


def confidence_rules_stage(
    root: Path, counted: Artifact, cell: Cell, segment_length: int
) -> Artifact:
    """Make the runs that occur at least tau times the rules of one cell.

    Args:
        root: Artifact root.
        counted: The ``confidence`` stage's artifact.
        cell: The least count tau, and whose tokenizer it is.
        segment_length: Tokens per segment, recorded.
    """
    fingerprint = tokenizer_fingerprint(load_tokenizer(cell.backbone, revision=cell.revision))
    spec = StageSpec(
        "confidence-rules",
        1,
        {"tau": cell.tau, "segment_length": segment_length, "tokenizer": fingerprint},
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
            source="confidence",
        )
        rules = RuleSet.filtered(*_read_counts(counted.path), origin)
        (out / "rules").mkdir()
        rules.write(out / "rules")
        # No filter stands between what reaches tau and the rules; the report shows every step.
        steps = ("raw", "overlap", "rules")
        found = rules.counts_by_order
        numbers = {f"{step}_{n}": float(found[n]) for step in steps for n in ORDERS}
        return {**numbers, "tau": float(cell.tau), "collision_rate": collision_rate(rules)}

    return run_stage(root, spec, build)


def _pieces(offsets: UniformOffsets) -> list[tuple[int, int]]:
    """Return (first, end) in tokens of each piece; a piece holds whole batches but for the last."""
    batch = _BATCH * int(offsets[1])
    step = max(1, _PIECE_TOKENS // batch) * batch
    end = int(offsets[-1])
    return [(first, min(first + step, end)) for first in range(0, end, step)]


def _clear(out: Path) -> None:
    """Remove what a run that died left behind, but for the finished pieces."""
    for path in out.iterdir():
        if path.name != "state":
            path.unlink()
    for path in (out / "state").glob("*.partial"):
        shutil.rmtree(path)


def _save_counts(folder: Path, counted: SpanCounts) -> None:
    for n in ORDERS:
        save_array(folder / f"spans_{n}.npy", counted[0][n])
        save_array(folder / f"support_{n}.npy", counted[1][n])


def _read_counts(folder: Path) -> SpanCounts:
    spans, support = (
        {n: load_array(folder / f"{name}_{n}.npy") for n in ORDERS} for name in ("spans", "support")
    )
    return spans, support


def _save_piece(piece: Path, borders: tuple[int, int], counted: SpanCounts) -> None:
    def write(folder: Path) -> None:
        _save_counts(folder, counted)
        write_manifest(folder, kind="piece", schema=_SCHEMA, body={"tokens": list(borders)})

    publish_directory(piece, write)


def _load_piece(piece: Path, borders: tuple[int, int]) -> SpanCounts | None:
    """Return a finished piece; one that is torn or of other tokens is removed, counted again."""
    if not piece.is_dir():
        return None
    try:
        found = read_manifest(piece, kind="piece", schema=_SCHEMA).get("tokens")
        if found != list(borders):
            raise ArtifactError(
                f"{piece.name} must hold the tokens {borders[0]} to {borders[1]}",
                found,
                "Pieces had another size; it is counted again.",
            )
    except ArtifactError as error:
        logger.warning("confidence: %s is counted again: %s", piece.name, error)
        shutil.rmtree(piece)
        return None
    logger.info("confidence: %s was finished by an earlier run", piece.name)
    return _read_counts(piece)
