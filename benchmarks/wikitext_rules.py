"""Rules of WikiText-2 by threshold and filter policy, and the token reduction on its test split.

python -m benchmarks.wikitext_rules --data DIR --tokenizer NAME=DIR --tokenizer NAME=DIR

DIR holds train.txt and test.txt, or a tokenizer. Every threshold and policy filters the same
counts. Writes the results, their page and their figure.
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.common import ROOT, Report, close, facts
from umim_core.backbone.fingerprint import special_ids, tokenizer_fingerprint
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.mining.counting import count_ngrams
from umim_core.rules.collisions import collision_rate
from umim_core.rules.filters import step_counts
from umim_core.rules.grams import ORDERS, NgramCounts
from umim_core.rules.inspection import coverage
from umim_core.rules.matcher import Matcher
from umim_core.rules.origin import Containment, Overlap, RuleOrigin
from umim_core.rules.ruleset import RuleSet
from umim_core.store.artifacts import sha256_bytes, sha256_file
from umim_core.text.token_ids import segments
from umim_core.text.tokens import tokenize_documents

RESULTS: Final = ROOT / "docs" / "results" / "wikitext2-rules.json"
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
Segments = tuple[np.ndarray, np.ndarray]


def measure(data: Path, tokenizers: dict[str, Path]) -> Report:
    """Return everything that page and figure show.

    Args:
        data: Folder with ``train.txt`` and ``test.txt``.
        tokenizers: Display name -> folder of a tokenizer.
    """
    texts = {split: (data / f"{split}.txt").read_text("utf-8") for split in ("train", "test")}
    return {
        "benchmark": "wikitext_rules",
        "facts": facts(LIBRARIES, None),
        "corpus": {
            "name": "WikiText-2",
            "sha256": {split: sha256_bytes(text.encode()) for split, text in texts.items()},
        },
        "segment_length": LENGTH,
        "tokenizers": [_measure_one(texts, name, path) for name, path in tokenizers.items()],
    }


def _measure_one(texts: dict[str, str], name: str, path: Path) -> dict[str, Any]:
    """Count once, at the least threshold; every cell filters these counts."""
    tokenizer = load_tokenizer(str(path))
    cut = {s: segments(tokenize_documents([t], tokenizer), LENGTH) for s, t in texts.items()}
    counts = count_ngrams(*cut["train"], min(TAUS), special_ids(tokenizer))
    sizes = {s: {"tokens": len(ids), "segments": len(at) - 1} for s, (ids, at) in cut.items()}
    print(f"{name}: {sizes}", flush=True)
    # The thresholds of the figure, log-spaced, those of the table among them.
    spaced = np.geomspace(min(TAUS), HIGHEST_TAU, 20).round().astype(int).tolist()
    points = product(POLICIES, sorted({*spaced, *TAUS}))
    return {
        "name": name,
        "sha256": sha256_file(path / "tokenizer.json"),
        "fingerprint": tokenizer_fingerprint(tokenizer),
        **sizes,
        "cells": [_cell(counts, cut["test"], tau, *p) for tau, p in product(TAUS, POLICIES)],
        "curve": [_point(counts, cut["test"], tau, *policy)[0] for policy, tau in points],
    }


def _point(
    counts: NgramCounts, test: Segments, tau: int, overlap: Overlap, containment: Containment
) -> tuple[dict[str, Any], RuleSet]:
    """Mine with one threshold and policy; return a point of the figure and its rules."""
    rules = RuleSet.from_counts(
        counts, RuleOrigin(tau=tau, overlap=overlap, containment=containment, segment_length=LENGTH)
    )
    point = {"tau": tau, "overlap": overlap, "containment": containment, "rules": len(rules)}
    return point | {"token_reduction": coverage(*test, Matcher(rules)).token_reduction}, rules


def _cell(
    counts: NgramCounts, test: Segments, tau: int, overlap: Overlap, containment: Containment
) -> dict[str, Any]:
    """Return a row of the table."""
    point, rules = _point(counts, test, tau, overlap, containment)
    raw, passed = step_counts(counts, tau, overlap)
    numbers = {
        "raw": raw,
        "after_overlap": passed,
        "rules": rules.counts_by_order,
        "spans": coverage(*test, Matcher(rules)).spans,
    }
    return {
        **point,
        **{name: {str(n): found[n] for n in ORDERS} for name, found in numbers.items()},
        "collision_rate": collision_rate(rules),
        "infix_free": rules.infix_free,
        "digest": rules.digest,
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure; write results, page and figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder with train.txt and test.txt")
    parser.add_argument("--tokenizer", action="append", default=[], metavar="NAME=DIR")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    named = [text.partition("=") for text in options.tokenizer]
    if options.data is None or not named or not all(path for _, _, path in named):
        parser.error("--data DIR and --tokenizer NAME=DIR are needed")
    tokenizers = {name: Path(path) for name, _, path in named}
    return close(measure(options.data, tokenizers), options.out)


if __name__ == "__main__":
    raise SystemExit(main())
