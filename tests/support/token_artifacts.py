"""Token ids on disk: shards of one or several documents, and artifacts that hold them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tasks.run.stage import Artifact, Metrics, StageSpec, run_stage
from umim_core.text.shards import SHARD_TOKENS, ShardWriter, TokenShards


def write_documents(
    folder: Path, *documents: np.ndarray, shard_tokens: int = SHARD_TOKENS
) -> TokenShards:
    """Write documents as token shards, and open them."""
    writer = ShardWriter(folder, shard_tokens)
    for document in documents:
        writer.add(document)
        writer.end_document()
    writer.close()
    return TokenShards.open(folder)


def tokenized(root: Path, splits: dict[str, np.ndarray], name: str = "tokenize") -> Artifact:
    """Return an artifact with a document a split."""

    def save(out: Path) -> Metrics:
        for split, ids in splits.items():
            write_documents(out / split, ids.astype(np.int32))
        return {}

    named = {split: ids.tolist() for split, ids in splits.items()}
    return run_stage(root, StageSpec(name, 1, named, {}), save)
