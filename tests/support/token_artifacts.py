"""Token ids on disk: files of one or several documents, and artifacts that hold them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tasks.run.stage import Artifact, Metrics, StageSpec, run_stage
from umim_core.text.tokens import TokenFiles, write_tokens


def write_documents(folder: Path, *documents: np.ndarray) -> TokenFiles:
    return write_tokens(folder, ((ids, True) for ids in documents))


def tokenized(root: Path, splits: dict[str, np.ndarray]) -> Artifact:
    def save(out: Path) -> Metrics:
        for split, ids in splits.items():
            write_documents(out / split, ids.astype(np.int32))
        return {}

    named = {split: ids.tolist() for split, ids in splits.items()}
    return run_stage(root, StageSpec("tokenize", 1, named, {}), save)
