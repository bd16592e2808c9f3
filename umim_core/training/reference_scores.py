"""Scores of the start of a preference training: computed once, kept beside its resume state.

    reference/scores.npy      of every answer, question after question [N] (float64)
    reference/manifest.json   with the key: the digest of everything that decides the scores

Each rank scores its share of the batches. Rank 0 alone reads and writes the folder, and what it
holds goes to all ranks as numbers: every rank trains against the same bits, before and after a
kill. Of scores that are found some are computed again, because no key covers the machine.
"""

from __future__ import annotations

import logging
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
from umim_core.store.artifacts import canonical_json, sha256_bytes
from umim_core.store.publication import build_once
from umim_core.training.train_ranks import (
    from_first_rank,
    rank_and_world,
    ranks_where,
    sum_over_ranks,
)

logger = logging.getLogger("umim.train")
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
    key = _key(questions, merged_model, trained, batch_size)
    backbone, sizes = merged_model.backbone, [len(question.endings) for question in questions]
    scores, is_new = np.zeros(sum(sizes)), 0

    def score() -> list[float]:
        share: list[float] = []
        for number, batch in enumerate(_batches(questions, batch_size)):
            if number % world == rank:
                share += torch.cat(ending_scores(batch, merged_model)).tolist()
            else:
                share += [0.0] * sum(len(question.endings) for question in batch)
        return sum_over_ranks(share)

    def build(out: Path) -> None:
        from_first_rank(1)  # the others score their share
        save_array(out / _SCORES, np.array(score()))

    if rank == 0:
        built = build_once(folder, key, build, kind="reference-scores", schema=1, rebuild="damaged")
        is_new = int(built.executed) or from_first_rank(0)
        scores = open_array(folder / _SCORES)
    elif is_new := from_first_rank(0):
        score()
    everywhere = torch.tensor(
        sum_over_ranks(scores.tolist()),
        dtype=torch.promote_types(backbone.dtype, torch.float32),
        device=backbone.device,
    )
    reference = list(torch.split(everywhere, sizes))
    if not is_new:
        logger.info("reference scores of the start: found")
        _check(questions, reference, merged_model, batch_size, folder)
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
        not torch.allclose(scored, stored, rtol=0.0, atol=_TOLERANCE, equal_nan=True)
        for scored, stored in pairs
    ]
    if lying := ranks_where(any(differ)):
        raise ArtifactError(
            f"reference scores that were kept must be the start's to {_TOLERANCE:g} nats per token",
            f"others on ranks {lying}",
            f"Remove {folder.name}, of the state that is resumed; they are then computed anew.",
        )
