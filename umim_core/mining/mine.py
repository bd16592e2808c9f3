"""Mining: a corpus in, a rule directory out.

::

    text -> token files -> segments -> count -> rules_of -> rule directory
                                                  (filters, or the choice of spans)

``mine_rules`` does all of it in one process, and asks a language model in place of counting where
rules are spans that it is confident about. The stages of the pipeline call ``count`` and
``rules_of``, and count on a cluster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from umim_core.backbone.tokenizer_files import load_tokenizer, tokenizer_fingerprint
from umim_core.config.rule_options import AS_FOUND, RuleOptions
from umim_core.errors import ConfigError, CorpusError, EvaluationError, RuleSetError, require
from umim_core.mining.counting import count_documents, count_ngrams, thread_count
from umim_core.mining.mining_memory import check_memory
from umim_core.mining.span_choice import choose_spans
from umim_core.rules.grams import NgramCounts
from umim_core.rules.protect import protected_ids
from umim_core.rules.ruleset import RuleOrigin, RuleSet
from umim_core.store.publication import check_absent
from umim_core.text.sources import Source
from umim_core.text.token_ids import (
    AnyInts,
    Ids,
    Ints,
    flat,
    ids_digest,
    segment_borders,
    spread_rows,
)
from umim_core.text.tokens import TokenFiles, check_known, tokenized_corpus

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from umim_core.backbone.backbone import Backbone

_CHOICE_TOKENS: Final = 1 << 25  # tokens at most that spans are chosen on


class Mined(NamedTuple):
    """Rules, and per order the n-grams that reach tau and those that pass the overlap filter."""

    rules: RuleSet
    raw: dict[int, int] = {}  # noqa: RUF012  never written to
    overlap: dict[int, int] = {}  # noqa: RUF012


@dataclass(frozen=True)
class MiningReport:
    """Counts of a mining run, per order n; tokens are those in whole segments.

    Attributes:
        tau: Least count of a rule.
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


def candidate_spans(
    texts: Sequence[AnyInts], tokenizer: PreTrainedTokenizerBase, longest: int
) -> tuple[RuleSet, Ids, Ints]:
    """Count the spans of texts of raw ids that may be chosen: those without digits, seen thrice.

    Returns:
        The spans, and the texts that they were counted in: flat ids [T] and borders.
    """
    ids, offsets = flat(texts)
    found = {"tau": 3, "longest": longest, "segment_length": None, "protect": ("digits",)}
    options = RuleOptions.model_validate(AS_FOUND | found)
    excluded = excluded_ids(tokenizer, options.protect)
    counts = count_ngrams(ids, offsets, options.tau, excluded, longest=longest)
    origin = RuleOrigin(
        options=options,
        tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
        corpus_digest=ids_digest(ids, offsets),
    )
    return RuleSet.from_counts(counts, origin), ids, offsets


def excluded_ids(
    tokenizer: PreTrainedTokenizerBase | None, protect: tuple[str, ...]
) -> tuple[int, ...]:
    """Return the ids that take part in no rule: special and protected ones."""
    if tokenizer is not None:
        return tuple(int(token) for token in protected_ids(tokenizer, protect))
    rule, remedy = "protected tokens need a tokenizer", "Name it with --tokenizer."
    require(not protect, ConfigError, rule, list(protect), remedy)
    return ()


def count(
    options: RuleOptions,
    counted: Callable[[int], NgramCounts],
    tokens: TokenFiles,
    offsets: range,
    excluded: tuple[int, ...] = (),
    *,
    threads: int = 1,
    at_a_time: int | None = None,
) -> NgramCounts:
    """Count the n-grams of a corpus that reach tau, once the options are known to fit it.

    ``counted`` counts those that reach a tau, here or on a cluster, whose workers have ``threads``
    threads and count tokens ``at_a_time``; None: all.
    """
    _check_documents(tokens, options)
    check_memory(tokens.ids, offsets, options, excluded, threads=threads, at_a_time=at_a_time)
    counts = counted(options.tau)
    if not options.count_documents:
        return counts
    documents = count_documents(tokens.ids, offsets, counts.keys, tokens.ends, options.threads)
    return replace(counts, documents=documents)


def rules_of(counts: NgramCounts, origin: RuleOrigin, tokens: TokenFiles, offsets: range) -> Mined:
    """Filter counts into rules, or choose spans by what they save of the corpus.

    Counts serve any higher tau, least number of documents and shorter rules; the tau of the rules
    is recorded.
    """
    options = origin.options
    _check_documents(tokens, options)
    tau = max(options.tau, counts.tau)
    spans, support = counts.frequent(tau, options.min_documents, options.longest)
    rules, passed = RuleSet.filtered(spans, support, origin.with_options({"tau": tau}))
    if options.spans is not None:  # on evenly spread segments of a large corpus
        spread = spread_rows(len(offsets) - 1, max(1, _CHOICE_TOKENS // offsets.step))
        segments = [tokens.ids[offsets[i] : offsets[i + 1]] for i in spread]
        rules = choose_spans(rules, *flat(segments), options.spans)
    return Mined(rules, {n: len(ids) for n, ids in spans.items()}, passed)


def _check_documents(tokens: TokenFiles, options: RuleOptions) -> None:
    rule = f"min_documents is {options.min_documents}, so the corpus must have as many documents"
    remedy = "Lower it; ready ids and a text file are one document each."
    fits = len(tokens.ends) >= options.min_documents
    require(fits, CorpusError, rule, len(tokens.ends), remedy)


def mine_rules(
    source: Source,
    out: str | Path,
    *,
    tokenizer: str | None = None,
    backbone: Backbone | None = None,
    options: RuleOptions | None = None,
) -> MiningReport:
    """Find the rules of a corpus, filter them and write a rule directory.

    They are frequent n-grams; or spans that a ``backbone``, which brings its tokenizer, is
    confident about, where the options have that source. The token ids go through a temporary folder
    next to ``out`` (4 bytes per token), so that the corpus need not fit in memory. Ready token ids
    need no tokenizer; then no fingerprint is kept.
    """
    chosen = options or RuleOptions()
    rule = "rules are mined with source 'frequency', or 'confidence' and a backbone"
    found = f"{chosen.source} with {'no backbone' if backbone is None else backbone.name}"
    remedy = "Correct the source, or name the model."
    fits = chosen.source == ("frequency" if backbone is None else "confidence")
    require(fits, ConfigError, rule, found, remedy)
    out = Path(out)
    check_absent(out)
    length = chosen.length
    if backbone is not None:
        from umim_core.mining.confidence import confidence_counts  # it needs torch

        backbone.check_positions("rows", length, EvaluationError, "Lower segment_length.")
        known: PreTrainedTokenizerBase | None = backbone.require_tokenizer()
    else:
        known = None if tokenizer is None else load_tokenizer(tokenizer)
    excluded = excluded_ids(known, chosen.protect)  # a bad pattern is refused before hours of work
    began = time.perf_counter()
    with tokenized_corpus(source, known, out.parent) as tokens:
        read = time.perf_counter()
        offsets = segment_borders(len(tokens.ids), length)
        if known is not None:
            check_known(tokens.ids, known)
        origin = RuleOrigin(
            options=chosen,
            tokenizer_fingerprint=None if known is None else tokenizer_fingerprint(known),
            corpus_digest=ids_digest(tokens.ids, offsets),
        )
        if backbone is not None:
            spans = confidence_counts(
                backbone,
                tokens.ids,
                offsets,
                min_probability=chosen.min_probability,
                excluded=excluded,
            )
            counted = time.perf_counter()
            mined = Mined(RuleSet.filtered(*spans, origin)[0])
        else:
            threads = thread_count(chosen.threads)
            how = {"longest": chosen.longest, "threads": threads}
            counted_here = partial(count_ngrams, tokens.ids, offsets, excluded=excluded, **how)
            counts = count(chosen, counted_here, tokens, offsets, excluded, threads=threads)
            rule = f"the corpus must hold an n-gram that occurs {chosen.tau:,} times"
            remedy = "Lower --tau, give more text, or protect fewer tokens."
            require(len(counts) > 0, RuleSetError, rule, f"{len(tokens.ids):,} tokens", remedy)
            counted = time.perf_counter()
            mined = rules_of(counts, origin, tokens, offsets)
        seconds = {
            "tokenize": read - began,
            "count": counted - read,
            "filter": time.perf_counter() - counted,
        }
        rules = mined.rules
        rules.save(out)
        return MiningReport(
            tokens=int(offsets[-1]),
            segments=len(offsets) - 1,
            documents=len(tokens.ends),
            tau=rules.options.tau,
            raw=mined.raw,
            overlap=mined.overlap,
            rules=rules.counts_by_order,
            digest=rules.digest,
            seconds=seconds,
        )
