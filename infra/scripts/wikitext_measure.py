"""The measurements of wikitext_rules.py, which makes the checkout importable."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np

from umim_core.backbone.backbone import load_tokenizer, special_ids, tokenizer_fingerprint
from umim_core.mining.counting import count_ngrams
from umim_core.rules.collisions import collision_rate
from umim_core.rules.filters import Containment, Overlap, step_counts
from umim_core.rules.grams import ORDERS, NgramCounts
from umim_core.rules.inspection import coverage
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet
from umim_core.store.artifacts import sha256_bytes, sha256_file
from umim_core.text.token_ids import segments
from umim_core.text.tokens import tokenize_documents

LENGTH: Final = 512
TAUS: Final = (500, 50, 5)
HIGHEST_TAU: Final = 2000  # of the figure
POLICIES: Final[tuple[tuple[Overlap, Containment], ...]] = (
    ("greedy", "drop"),
    ("greedy", "keep"),
    ("none", "drop"),
    ("none", "keep"),
)
LIBRARIES: Final = ("numba", "numpy", "tokenizers", "transformers")
Cell = dict[str, Any]
Segments = tuple[np.ndarray, np.ndarray]


def measure(data: Path, tokenizers: dict[str, Path]) -> dict[str, Any]:
    """Return everything the page and the figure show.

    Args:
        data: Folder with ``train.txt`` and ``test.txt``.
        tokenizers: Display name -> folder of a tokenizer.
    """
    texts = {split: (data / f"{split}.txt").read_text("utf-8") for split in ("train", "test")}
    return {
        "corpus": {
            "name": "WikiText-2",
            "sha256": {split: sha256_bytes(text.encode()) for split, text in texts.items()},
        },
        "segment_length": LENGTH,
        "machine": {"platform": platform.platform(), "cores": os.cpu_count()},
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in LIBRARIES},
        },
        "tokenizers": [_measure_one(texts, name, path) for name, path in tokenizers.items()],
    }


def _measure_one(texts: dict[str, str], name: str, path: Path) -> dict[str, Any]:
    """Count once, at the least threshold; every cell filters these counts."""
    tokenizer = load_tokenizer(str(path))
    cut = {s: segments(tokenize_documents([t], tokenizer), LENGTH) for s, t in texts.items()}
    train, test = cut["train"], cut["test"]
    counts = count_ngrams(*train, min(TAUS), special_ids(tokenizer))
    print(f"{name}: {len(train[0]):,} training tokens, {len(test[0]):,} test tokens", flush=True)
    return {
        "name": name,
        "sha256": sha256_file(path / "tokenizer.json"),
        "fingerprint": tokenizer_fingerprint(tokenizer),
        "train": {"tokens": len(train[0]), "segments": len(train[1]) - 1},
        "test": {"tokens": len(test[0]), "segments": len(test[1]) - 1},
        "cells": [_cell(counts, test, tau, *policy) for tau, policy in product(TAUS, POLICIES)],
        "curve": [_point(counts, test, tau, *policy) for policy, tau in product(POLICIES, _grid())],
    }


def _grid() -> list[int]:
    """Return the thresholds of the figure, log-spaced, those of the table among them."""
    spaced = np.geomspace(min(TAUS), HIGHEST_TAU, 20).round().astype(int).tolist()
    return sorted({*spaced, *TAUS})


def _mined(counts: NgramCounts, tau: int, overlap: Overlap, containment: Containment) -> RuleSet:
    return RuleSet.from_counts(
        counts, tau=tau, overlap=overlap, containment=containment, segment_length=LENGTH
    )


def _cell(
    counts: NgramCounts, test: Segments, tau: int, overlap: Overlap, containment: Containment
) -> Cell:
    """Mine with one threshold and policy: a row of the table."""
    rules = _mined(counts, tau, overlap, containment)
    raw, passed = step_counts(counts, tau, overlap)
    found = coverage(*test, Matcher(rules))
    return {
        "tau": tau,
        "overlap": overlap,
        "containment": containment,
        "raw": _by_order(raw),
        "after_overlap": _by_order(passed),
        "rules": _by_order(rules.counts_by_order),
        "spans": _by_order(found.spans),
        "token_reduction": found.token_reduction,
        "collision_rate": collision_rate(rules),
        "infix_free": rules.infix_free,
        "digest": rules.digest,
    }


def _point(
    counts: NgramCounts, test: Segments, tau: int, overlap: Overlap, containment: Containment
) -> Cell:
    """Mine with one threshold and policy: a point of the figure."""
    rules = _mined(counts, tau, overlap, containment)
    return {
        "tau": tau,
        "overlap": overlap,
        "containment": containment,
        "rules": len(rules),
        "token_reduction": coverage(*test, Matcher(rules)).token_reduction,
    }


def _by_order(numbers: dict[int, int]) -> dict[str, int]:
    return {str(n): numbers[n] for n in ORDERS}
