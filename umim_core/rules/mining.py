"""Mining in one process: a corpus in, a rule directory out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from umim_core.artifacts import sha256_bytes
from umim_core.backbone import load_tokenizer, special_ids, tokenizer_fingerprint
from umim_core.errors import ArtifactError, ConfigError, CorpusError
from umim_core.rules.counting import check_tau, count_ngrams
from umim_core.rules.filters import Containment, Overlap, step_counts
from umim_core.rules.ruleset import RuleSet
from umim_core.text import (
    Source,
    TokenIds,
    iter_documents,
    iter_token_ids,
    segments,
    tokenize_documents,
)


@dataclass(frozen=True)
class MiningReport:
    """What mining found, per order n = 2, 3, 4.

    Attributes:
        tokens: Tokens in whole segments.
        segments: Number of segments.
        raw: n-grams that reach tau.
        overlap: Those left by the overlap filter.
        rules: Those left by both filters.
        digest: SHA-256 of the rule set.
    """

    tokens: int
    segments: int
    raw: dict[int, int]
    overlap: dict[int, int]
    rules: dict[int, int]
    digest: str


def mine_rules(
    source: Source,
    out: Path,
    *,
    tokenizer: str | None = None,
    tau: int = 5,
    segment_length: int = 512,
    overlap: Overlap = "greedy",
    containment: Containment = "drop",
) -> MiningReport:
    """Count n-grams, filter them and write a rule directory.

    Args:
        source: Text, or ready token ids.
        out: Rule directory; must not exist yet.
        tokenizer: Name of the tokenizer; may be None for ready ids (then no fingerprint is kept).
        tau: Least count.
        segment_length: Tokens per segment; n-grams cross no border, the remainder is dropped.
        overlap: Overlap policy.
        containment: Containment policy.

    Raises:
        ConfigError: If text is given without a tokenizer, or the segment length is below 2.
        RuleSetError: If ``tau`` is below 1.
        CorpusError: If the source is unusable, holds less than one segment, or holds ids that the
            tokenizer does not have.
        ArtifactError: If ``out`` exists or cannot be written.
    """
    check_tau(tau)
    if segment_length < 2:
        raise ConfigError("segment_length must be at least 2", segment_length, "Default: 512.")
    if os.path.lexists(out):  # before hours of counting, not after
        raise ArtifactError(
            "the output directory must not exist", str(out), "Remove it or choose another name."
        )
    known = None if tokenizer is None else load_tokenizer(tokenizer)
    ids, offsets = segments(_ids(source, known), segment_length)
    if not len(ids):
        raise CorpusError(
            f"the corpus must hold at least one segment of {segment_length} tokens",
            "less",
            "Give more text or lower --segment-length.",
        )
    if known is not None and int(ids.max()) >= len(known):
        raise CorpusError(
            f"ids must lie in 0..{len(known) - 1}, the tokenizer's vocabulary",
            int(ids.max()),
            "Name the tokenizer that made them.",
        )
    counts = count_ngrams(ids, offsets, tau, frozenset() if known is None else special_ids(known))
    rules = RuleSet.from_counts(
        counts,
        overlap=overlap,
        containment=containment,
        segment_length=segment_length,
        tokenizer_fingerprint=None if known is None else tokenizer_fingerprint(known),
        corpus_digest=sha256_bytes(np.ascontiguousarray(ids, np.int32).tobytes()),
    )
    rules.save(out)
    return MiningReport(
        len(ids),
        len(offsets) - 1,
        *step_counts(counts, tau, overlap),
        rules.counts_by_order,
        rules.digest,
    )


def _ids(source: Source, tokenizer: PreTrainedTokenizerBase | None) -> Iterator[NDArray[np.int32]]:
    """Return the corpus as chunks of ids."""
    if isinstance(source, TokenIds):
        return iter_token_ids(source)
    if tokenizer is None:
        raise ConfigError(
            "text needs a tokenizer", "none", "Name one, e.g. --tokenizer umim-docs-llama."
        )
    return tokenize_documents(iter_documents(source), tokenizer)
