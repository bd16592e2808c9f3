"""Mining in one process: a corpus in, a rule directory out."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self

from transformers import PreTrainedTokenizerBase

from umim_core.backbone import load_tokenizer, tokenizer_fingerprint
from umim_core.errors import ArtifactError, ConfigError, CorpusError
from umim_core.rules.candidates import CandidateReport, miss_probability
from umim_core.rules.counting import Kernel, check_tau
from umim_core.rules.filters import Containment, Overlap, step_counts, tau_for_budget
from umim_core.rules.finding import MAX_CANDIDATES, LocalCounter, SearchOptions, find_ngrams
from umim_core.rules.grams import NgramCounts, UniformOffsets, read_ids, select
from umim_core.rules.protect import protected_ids
from umim_core.rules.ruleset import RuleSet
from umim_core.text import Source, iter_token_pieces
from umim_core.text.shards import ShardWriter, TokenShards

_HASHED_TOKENS: Final = 1 << 20


@dataclass(frozen=True)
class MiningOptions:
    """How rules are mined.

    Attributes:
        tau: Least count.
        segment_length: Tokens per segment; n-grams cross no border, the remainder is dropped.
        overlap: Overlap policy.
        containment: Containment policy.
        rule_budget: Most rules; tau is raised until they fit. None for no limit.
        min_documents: Least number of documents that a rule occurs in.
        protect: Regular expressions of tokens that no rule may contain, or names such as "digits".
        sample_tokens: Candidate mode, see ``SearchOptions``.
        max_candidates: As there.
        seed: Of the sample.
        threads: Threads; None takes one per core.
        kernel: ``numba`` or ``numpy``.
    """

    tau: int = 5
    segment_length: int = 512
    overlap: Overlap = "greedy"
    containment: Containment = "drop"
    rule_budget: int | None = None
    min_documents: int = 1
    protect: tuple[str, ...] = ()
    sample_tokens: int | None = None
    max_candidates: int = MAX_CANDIDATES
    seed: int = 0
    threads: int | None = None
    kernel: Kernel = "numba"

    def check(self) -> Self:
        """Return the options if they are within their bounds.

        Raises:
            RuleSetError: If tau is below 1.
            ConfigError: If another one is out of its bounds.
        """
        check_tau(self.tau)
        for name, least in (
            ("segment_length", 2),
            ("rule_budget", 1),
            ("min_documents", 1),
            ("sample_tokens", 1),
            ("max_candidates", 1),
            ("threads", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} must be at least {least}", value, "Raise it.")
        return self

    @property
    def search(self) -> SearchOptions:
        """What is looked for, as the counters understand it."""
        return SearchOptions(
            self.tau, self.min_documents > 1, self.sample_tokens, self.max_candidates, self.seed
        )


@dataclass(frozen=True)
class MiningReport:
    """What mining found, per order n = 2, 3, 4.

    Attributes:
        tokens: Tokens in whole segments.
        segments: Number of segments.
        documents: Number of documents.
        tau: Least count of a rule; above the one asked for where a budget raised it.
        raw: n-grams that reach tau.
        overlap: Those left by the overlap filter.
        rules: Those left by both filters.
        digest: SHA-256 of the rule set.
        seconds: Time of tokenizing, counting and filtering.
        candidates: How candidates were chosen, in candidate mode.
    """

    tokens: int
    segments: int
    documents: int
    tau: int
    raw: dict[int, int]
    overlap: dict[int, int]
    rules: dict[int, int]
    digest: str
    seconds: dict[str, float]
    candidates: CandidateReport | None = None


def mine_rules(
    source: Source,
    out: Path,
    *,
    tokenizer: str | None = None,
    options: MiningOptions | None = None,
) -> MiningReport:
    """Count n-grams, filter them and write a rule directory.

    The token ids go through a temporary folder beside ``out`` (4 bytes per token), so that the
    corpus need not fit in memory.

    Args:
        source: Text, or ready token ids.
        out: Rule directory; must not exist yet.
        tokenizer: Name of the tokenizer; may be None for ready ids (then no fingerprint is kept).
        options: How to mine; None for the defaults.

    Raises:
        ConfigError: If text is given without a tokenizer, or an option is out of its bounds.
        RuleSetError: If ``tau`` is below 1, or documents are to be counted in ready ids.
        CorpusError: If the source is unusable, holds less than one segment, or holds ids that the
            tokenizer does not have.
        ArtifactError: If ``out`` exists or cannot be written.
    """
    chosen = (options or MiningOptions()).check()
    if os.path.lexists(out):  # before hours of counting, not after
        raise ArtifactError(
            "the output directory must not exist", str(out), "Remove it or choose another name."
        )
    known = None if tokenizer is None else load_tokenizer(tokenizer)
    began = time.perf_counter()
    with _tokenized(source, known, out.parent) as shards:
        tokenized = time.perf_counter()
        offsets = whole_segments(shards, known, chosen.segment_length)
        excluded = excluded_ids(known, chosen.protect)
        counter = LocalCounter(shards, offsets, excluded, chosen.threads, chosen.kernel)
        ends = shards.document_ends() if chosen.min_documents > 1 else None
        counts, report = find_ngrams(shards, offsets, excluded, chosen.search, counter, ends)
        digest = _ids_digest(shards, offsets)
        documents = shards.num_documents
    counted = time.perf_counter()
    counts, rules = make_rules(
        counts,
        chosen,
        tokenizer_fingerprint=None if known is None else tokenizer_fingerprint(known),
        corpus_digest=digest,
    )
    rules.save(out)
    tau = counts.tau
    if report is not None:
        missed = miss_probability(tau, report.fraction, report.sample_tau)
        report = replace(report, miss_probability=missed)
    seconds = {"tokenize": tokenized - began, "count": counted - tokenized}
    return MiningReport(
        int(offsets[-1]),
        offsets.count,
        documents,
        tau,
        *step_counts(counts, tau, chosen.overlap),
        rules.counts_by_order,
        rules.digest,
        seconds | {"filter": time.perf_counter() - counted},
        report,
    )


def make_rules(
    counts: NgramCounts,
    options: MiningOptions,
    *,
    tokenizer_fingerprint: str | None,
    corpus_digest: str | None,
) -> tuple[NgramCounts, RuleSet]:
    """Filter counts into rules, within the budget where there is one.

    Returns:
        The counts that reach the final threshold, and the rules.
    """
    kept = select(counts, max(options.tau, counts.tau), options.min_documents)
    if options.rule_budget is not None:
        tau = tau_for_budget(kept, options.rule_budget, options.overlap, options.containment)
        kept = select(kept, tau)
    rules = RuleSet.from_counts(
        kept,
        overlap=options.overlap,
        containment=options.containment,
        segment_length=options.segment_length,
        tokenizer_fingerprint=tokenizer_fingerprint,
        corpus_digest=corpus_digest,
        min_documents=options.min_documents if options.min_documents > 1 else None,
    )
    return kept, rules


def excluded_ids(
    tokenizer: PreTrainedTokenizerBase | None, protect: tuple[str, ...]
) -> tuple[int, ...]:
    """Return the ids that take part in no rule: special and protected ones.

    Raises:
        ConfigError: If tokens are to be protected and there is no tokenizer.
    """
    if tokenizer is None:
        if protect:
            raise ConfigError(
                "protected tokens need a tokenizer", list(protect), "Name it with --tokenizer."
            )
        return ()
    return tuple(int(token) for token in protected_ids(tokenizer, protect))


def whole_segments(
    shards: TokenShards, tokenizer: PreTrainedTokenizerBase | None, length: int
) -> UniformOffsets:
    """Return the borders of the whole segments of a corpus.

    Raises:
        CorpusError: If there is none, or the corpus holds ids that the tokenizer does not have.
    """
    offsets = UniformOffsets(length, len(shards) // length)
    if not offsets.count:
        raise CorpusError(
            f"the corpus must hold at least one segment of {length} tokens",
            "less",
            "Give more text or lower --segment-length.",
        )
    if tokenizer is not None and shards.max_id >= len(tokenizer):
        raise CorpusError(
            f"ids must lie in 0..{len(tokenizer) - 1}, the tokenizer's vocabulary",
            shards.max_id,
            "Name the tokenizer that made them.",
        )
    return offsets


@contextmanager
def _tokenized(
    source: Source, tokenizer: PreTrainedTokenizerBase | None, beside: Path
) -> Iterator[TokenShards]:
    """Give the corpus as token shards in a folder that is removed afterwards."""
    try:
        beside.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix=".umim-tokens-", dir=beside)
    except OSError as error:
        raise ArtifactError(
            f"{beside} must be a folder that can be written", error.strerror, "Choose another one."
        ) from error
    with folder as name:
        writer = ShardWriter(Path(name))
        for ids, ends_document in iter_token_pieces(source, tokenizer):
            writer.add(ids)
            if ends_document:
                writer.end_document()
        writer.close()
        yield TokenShards.open(Path(name))


def _ids_digest(shards: TokenShards, offsets: UniformOffsets) -> str:
    """Return the SHA-256 of the ids in whole segments, as int32."""
    digest = hashlib.sha256()
    total = offsets[-1]
    for start in range(0, total, _HASHED_TOKENS):
        digest.update(read_ids(shards, start, min(start + _HASHED_TOKENS, total)).tobytes())
    return digest.hexdigest()
