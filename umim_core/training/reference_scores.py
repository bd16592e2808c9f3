"""Scores of the start of a preference training: computed once, kept beside its resume state.

    reference/scores.npy      of every answer, question after question [N] (float64)
    reference/manifest.json   with the key: the digest of everything that decides the scores

Each rank scores its share of the batches. Rank 0 alone reads and writes the folder, and what it
holds goes to all ranks as numbers: every rank trains against the same bits, before and after a
kill. Of scores that are found some are computed again, because no key covers the machine.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from umim_core.adaptation.choices import EncodedQuestion
from umim_core.adaptation.preference import ending_scores
from umim_core.errors import ArtifactError
from umim_core.merging.merged_model import MergedModel
from umim_core.rules.matcher import Matcher
from umim_core.store.arrays import open_array, save_array
from umim_core.store.artifacts import canonical_json, read_manifest, sha256_bytes, write_manifest
from umim_core.store.publication import publish_directory
from umim_core.training.train_ranks import (
    from_first_rank,
    rank_and_world,
    ranks_where,
    sum_over_ranks,
)

logger = logging.getLogger("umim.train")
SCHEMA: Final = 1
_KIND: Final = "reference-scores"
_SCORES: Final = "scores.npy"
_CHECKED: Final = 100  # one question in so many is scored again
_TOLERANCE: Final = 1e-4  # nats per token, float32: other questions in a batch change the last bits


@torch.no_grad()
def reference_scores(
    questions: Sequence[EncodedQuestion],
    merged_model: MergedModel,
    trained: nn.Module,
    *,
    batch_size: int,
    folder: Path,
) -> list[Tensor]:
    """Return the scores of all questions under a model that is not trained yet.

    Per question it is the mean token log-probability of each answer [C] (nats per token).
    """
    rank, world = rank_and_world()
    sizes = [len(question.endings) for question in questions]
    key = _key(questions, merged_model, trained, batch_size)
    stored = _read(folder, key) if rank == 0 else None
    known = bool(from_first_rank(int(stored is not None)))
    if known:
        own = [0.0] * sum(sizes) if stored is None else stored
    else:
        own = []
        for number, batch in enumerate(_batches(questions, batch_size)):
            if number % world == rank:
                own += torch.cat(ending_scores(batch, merged_model)).tolist()
            else:
                own += [0.0] * sum(len(question.endings) for question in batch)
    scores = torch.tensor(
        sum_over_ranks(own),
        dtype=torch.promote_types(merged_model.backbone.dtype, torch.float32),
        device=merged_model.backbone.device,
    )
    reference = list(torch.split(scores, sizes))
    if known:
        logger.info("reference scores of the start: found")
        _check(questions, reference, merged_model, batch_size, folder)
    elif rank == 0:
        _write(folder, key, scores)
    return reference


def _batches(
    questions: Sequence[EncodedQuestion], size: int
) -> Iterator[Sequence[EncodedQuestion]]:
    return (questions[start : start + size] for start in range(0, len(questions), size))


def _key(
    questions: Sequence[EncodedQuestion], merged_model: MergedModel, trained: nn.Module, size: int
) -> str:
    """Return the SHA-256 of all that decides the scores' bits on one machine."""
    matcher, backbone = merged_model.matcher, merged_model.backbone
    # The ids of all contexts and answers, which cover prompt and cut.
    ids = [[part.tolist() for part in (q.context, *q.endings)] for q in questions]
    parts = {
        "backbone": backbone.fingerprint,
        "dtype": str(backbone.dtype),
        "trained": type(trained).__name__,
        "weights": {name: _digest(value) for name, value in trained.state_dict().items()},
        "rules": matcher.rules.digest if isinstance(matcher, Matcher) else None,
        "unit_positions": merged_model.unit_positions,
        "merge_depth": merged_model.merge_depth,
        "raw_tail": merged_model.raw_tail,
        "questions": sha256_bytes(canonical_json(ids).encode()),
        "batch_size": size,
        "ranks": rank_and_world()[1],
    }
    return sha256_bytes(canonical_json(parts).encode())


def _digest(value: Tensor) -> str:
    raw = value.detach().cpu().flatten().view(torch.uint8).numpy()
    return sha256_bytes(f"{value.dtype} {tuple(value.shape)}\n".encode() + raw.tobytes())


def _read(folder: Path, key: str) -> list[float] | None:
    """Return the scores of a folder, or None if it is torn, of another key or not there."""
    if not folder.exists():
        return None
    try:
        manifest = read_manifest(folder, kind=_KIND, schema=SCHEMA)
        scores: list[float] = open_array(folder / _SCORES).tolist()
    except ArtifactError as error:
        logger.warning("reference scores are torn and computed anew: %s", error)
        return None
    return scores if manifest.get("key") == key else None


def _write(folder: Path, key: str, scores: Tensor) -> None:
    def build(out: Path) -> None:
        save_array(out / _SCORES, scores.cpu().numpy().astype(np.float64))
        write_manifest(out, kind=_KIND, schema=SCHEMA, body={"key": key})

    shutil.rmtree(folder, ignore_errors=True)
    publish_directory(folder, build)


def _check(
    questions: Sequence[EncodedQuestion],
    reference: Sequence[Tensor],
    merged_model: MergedModel,
    batch_size: int,
    folder: Path,
) -> None:
    """Refuse scores that the model does not give, on every rank."""
    rank, world = rank_and_world()
    again = [
        scores
        for batch in _batches(questions[::_CHECKED][rank::world], batch_size)
        for scores in ending_scores(batch, merged_model)
    ]
    pairs = zip(again, reference[::_CHECKED][rank::world], strict=True)
    differ = [
        not torch.allclose(own, stored, rtol=0.0, atol=_TOLERANCE, equal_nan=True)
        for own, stored in pairs
    ]
    if lying := ranks_where(any(differ)):
        raise ArtifactError(
            f"reference scores that were kept must be the start's to {_TOLERANCE:g} nats per token",
            f"others on ranks {lying}",
            f"Remove {folder.name}, of the state that is resumed; they are then computed anew.",
        )
