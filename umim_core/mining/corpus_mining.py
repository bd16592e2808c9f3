"""Mining in one process: a corpus in, a rule directory out."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from umim_core.backbone.fingerprint import tokenizer_fingerprint as fingerprint_of
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.errors import ConfigError, RuleSetError
from umim_core.mining.counting import thread_count
from umim_core.mining.finding import LocalCounter, find_ngrams
from umim_core.mining.mining_memory import check_memory
from umim_core.mining.mining_options import MiningOptions
from umim_core.mining.preparation import (
    check_absent,
    check_documents,
    excluded_ids,
    ids_digest,
    tokenized_corpus,
    whole_segments,
)
from umim_core.rules.filters import step_counts, tau_for_budget
from umim_core.rules.grams import ORDERS, NgramCounts, select
from umim_core.rules.matcher import Matcher
from umim_core.rules.origin import RuleOrigin
from umim_core.rules.ruleset import RuleSet
from umim_core.text.sources import Source
from umim_core.text.token_files import TokenFiles
from umim_core.text.token_ids import MAX_TOKEN_ID, UniformOffsets

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from umim_core.backbone.backbone import Backbone

_CHOICE_TOKENS: Final = 1 << 25  # tokens at most that spans are chosen on
Ints = NDArray[np.int64]
_ROUNDS: Final = 12  # five sufficed on general English, whatever K was
_THREADS: Final = 2


def choose_spans(rules: RuleSet, ids: NDArray[np.integer], offsets: Ints, count: int) -> RuleSet:
    """Keep the K = ``count`` spans that together save the most tokens of a text.

    No span crosses a border [num_segments + 1] of its segments, flat ids [T].

    Returns:
        K rules, or all that save anything where there are fewer; of the same origin.
    """
    if count < 1:
        raise ConfigError("the number of spans must be at least 1", count, "Ask for 8192, say.")
    rules = replace(rules, prices=None)
    sizes = np.repeat(list(ORDERS), [rules.counts_by_order[n] for n in ORDERS])
    support = np.concatenate([rules.support_by_order[n] for n in ORDERS])
    chosen = _highest(support * (sizes - 1), count)
    best, most = chosen, -1
    for _ in range(_ROUNDS):
        own = rules.take(chosen)
        saved = saved_tokens(own, ids, offsets)
        if int(saved.sum()) <= most:
            break
        most, best = int(saved.sum()), chosen.copy()
        best[chosen] = saved > 0
        value = np.zeros(len(rules), dtype=np.int64)
        rest = _raw_rest(own, ids, offsets)
        for n in ORDERS:  # apart, or the longer ones would hide the shorter
            value[sizes == n] = saved_tokens(rules.take(sizes == n), rest, offsets)
        value[chosen] = saved
        again = _highest(value, count)
        if np.array_equal(again, chosen):
            break
        chosen = again
    return rules.take(best)


def saved_tokens(rules: RuleSet, ids: NDArray[np.integer], offsets: Ints) -> Ints:
    """Return how many tokens of a text each rule saves [R] (int64)."""
    starts, lengths, _ = Matcher(rules).segment_many(ids, offsets, threads=_THREADS)
    saved = np.zeros(len(rules), dtype=np.int64)
    for n in ORDERS:
        at = starts[lengths == n]
        if len(at):
            spans = np.asarray(ids)[at[:, None] + np.arange(n)]
            saved += (n - 1) * np.bincount(rules.places(spans), minlength=len(rules))
    return saved


def _raw_rest(rules: RuleSet, ids: NDArray[np.integer], offsets: Ints) -> NDArray[np.int32]:
    """Return a text in which every merged token is an id that no candidate holds."""
    starts, lengths, _ = Matcher(rules).segment_many(ids, offsets, threads=_THREADS)
    rest = np.array(ids, dtype=np.int32)
    for offset in range(ORDERS[-1]):
        rest[starts[(lengths > 1) & (lengths > offset)] + offset] = MAX_TOKEN_ID
    return rest


def _highest(value: Ints, count: int) -> NDArray[np.bool_]:
    """Return which candidates have the highest values [R] (bool), of equal ones the first."""
    chosen = np.zeros(len(value), dtype=np.bool_)
    chosen[np.argsort(-value, kind="stable")[:count]] = True
    return chosen


@dataclass(frozen=True)
class MiningReport:
    """Counts of a mining run, per order n = 2, 3, 4; tokens are those in whole segments.

    Attributes:
        tau: Least count of a rule; above the one asked for where a budget raised it.
        raw: n-grams that reach tau; empty for confidence rules.
        overlap: Those left by the overlap filter; likewise.
        rules: Those left by both filters.
        seconds: Time of tokenizing, counting and filtering.
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


def spans_of(rules: RuleSet, shards: TokenFiles, offsets: UniformOffsets, count: int) -> RuleSet:
    """Choose spans by what they save of a corpus, on evenly spread segments of a large one."""
    segments = min(offsets.count, max(1, _CHOICE_TOKENS // offsets.length))
    chosen = [number * offsets.count // segments for number in range(segments)]
    ids = np.concatenate([shards[offsets[i] : offsets[i + 1]] for i in chosen])
    return choose_spans(rules, ids, np.arange(segments + 1) * offsets.length, count)


class _Found(NamedTuple):
    rules: RuleSet
    seconds: dict[str, float]
    raw: dict[int, int] = {}  # noqa: RUF012  # never written to
    overlap: dict[int, int] = {}  # noqa: RUF012


def mine_rules(
    source: Source, out: Path, *, tokenizer: str | None = None, options: MiningOptions | None = None
) -> MiningReport:
    """Count n-grams, filter them and write a rule directory.

    The token ids go through a temporary folder next to ``out`` (4 bytes per token), so that the
    corpus need not fit in memory. Ready token ids need no tokenizer; then no fingerprint is kept.
    """
    chosen = (options or MiningOptions()).check()
    check_absent(out)
    known = None if tokenizer is None else load_tokenizer(tokenizer)
    excluded = excluded_ids(known, chosen.protect)  # a bad pattern is refused before hours of work

    def find(shards: TokenFiles, offsets: UniformOffsets) -> _Found:
        began = time.perf_counter()
        check_documents(shards, chosen.min_documents)
        threads = thread_count(chosen.threads)
        check_memory(shards, offsets, chosen, excluded, threads=threads)
        counter = LocalCounter(shards, offsets, excluded, chosen.threads)
        ends = shards.document_ends() if chosen.count_documents else None
        counts = find_ngrams(chosen, counter, ends)
        if not any(len(keys) for keys in counts.keys.values()):
            raise _no_rules(counter, chosen)
        digest = ids_digest(shards, offsets)
        counted = time.perf_counter()
        fingerprint = None if known is None else fingerprint_of(known)
        frequent, rules = make_rules(counts, chosen, chosen.origin(fingerprint, digest))
        if chosen.spans is not None:
            rules = spans_of(rules, shards, offsets, chosen.spans)
        raw, overlap = step_counts(frequent, frequent.tau, chosen.overlap)
        seconds = {"count": counted - began, "filter": time.perf_counter() - counted}
        return _Found(rules, seconds, raw, overlap)

    return _mined(source, out, known, chosen.segment_length, find)


def _mined(
    source: Source,
    out: Path,
    tokenizer: PreTrainedTokenizerBase | None,
    segment_length: int,
    find: Callable[[TokenFiles, UniformOffsets], _Found],
) -> MiningReport:
    """Tokenize a corpus, find rules in its whole segments and write their directory."""
    began = time.perf_counter()
    with tokenized_corpus(source, tokenizer, out.parent) as shards:
        seconds = {"tokenize": time.perf_counter() - began}
        offsets = whole_segments(shards, tokenizer, segment_length)
        result = find(shards, offsets)
        documents = shards.num_documents
    result.rules.save(out)
    return MiningReport(
        int(offsets[-1]),
        offsets.count,
        documents,
        result.rules.origin.tau or 1,
        result.raw,
        result.overlap,
        result.rules.counts_by_order,
        result.rules.digest,
        seconds | result.seconds,
    )


def _no_rules(counter: LocalCounter, options: MiningOptions) -> RuleSetError:
    """Return the error of a threshold that nothing reaches, with the largest that something does.

    Lower thresholds are tried until one is reached; each costs a count.
    """
    tau = options.tau
    while tau > 1:
        tau = max(1, tau // 8)
        counts = find_ngrams(replace(options, tau=tau, min_documents=1), counter)
        if most := max((int(x.max()) for x in counts.support.values() if len(x)), default=0):
            return RuleSetError(
                f"tau must be at most {most:,}, the count of the most frequent n-gram",
                options.tau,
                "Lower --tau; far below that, for rules that matter.",
            )
    return RuleSetError(
        "the corpus must hold an n-gram that may be a rule",
        "none",
        "Give more text, or protect fewer tokens.",
    )


def make_rules(
    counts: NgramCounts, options: MiningOptions, origin: RuleOrigin
) -> tuple[NgramCounts, RuleSet]:
    """Filter counts into rules, within the budget where there is one.

    Returns:
        The counts that reach the final threshold, and the rules, which record it in ``origin``.
    """
    frequent = select(counts, max(options.tau, counts.tau), options.min_documents)
    if options.rule_budget is not None:
        tau = tau_for_budget(frequent, options.rule_budget, options.overlap, options.containment)
        frequent = select(frequent, tau)
    return frequent, RuleSet.from_counts(frequent, origin.model_copy(update={"tau": frequent.tau}))


def mine_confident_spans(
    source: Source,
    out: Path,
    *,
    backbone: Backbone,
    options: MiningOptions,
    min_probability: float | None = None,
) -> MiningReport:
    """Make rules of the spans that a language model is confident about, and write their directory.

    The source is text, or ready ids of the backbone's tokenizer. Of the options a budget and a
    number of documents have no part in it. Every token of a span exceeds ``min_probability``; None
    is the paper's.
    """
    from umim_core.mining.confidence import (  # it needs torch
        DEFAULT_PROBABILITY,
        check_probability,
        check_segment,
        confidence_counts,
    )

    chosen = options.check()
    asked = DEFAULT_PROBABILITY if min_probability is None else min_probability
    for name in ("rule_budget", "min_documents"):
        value = getattr(chosen, name)
        if value != getattr(MiningOptions, name):
            raise ConfigError(
                f"{name} must be left out for confidence rules", value, "It would have no effect."
            )
    check_absent(out)
    tokenizer = backbone.require_tokenizer()
    check_probability(asked)
    check_segment(backbone, chosen.segment_length)
    excluded = excluded_ids(tokenizer, chosen.protect)

    def find(shards: TokenFiles, offsets: UniformOffsets) -> _Found:
        began = time.perf_counter()
        counted = confidence_counts(
            backbone, shards, offsets, min_probability=asked, excluded=excluded
        )
        recorded = chosen.origin(
            backbone.tokenizer_fingerprint or None, ids_digest(shards, offsets)
        )
        sure = {"source": "confidence", "min_probability": asked}
        rules = RuleSet.filtered(*counted, recorded.model_copy(update=sure))
        return _Found(rules, {"count": time.perf_counter() - began})

    return _mined(source, out, tokenizer, chosen.segment_length, find)
