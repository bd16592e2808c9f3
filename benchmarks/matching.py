"""Matching against a Python loop and the tokenizer: a table, then one JSON line.

    python -m benchmarks.matching --out docs/results/matching.json
    python -m benchmarks.matching --ids tokens.npy --tokenizer DIR --held-out 1000000

Rules are mined on the ids but for their end. That end, decoded to text, is what the tokenizer and
the matchers read, one thread each. Both matchers must return the same spans. Gates: P2 of
docs/performance.md, and below 1 s to load as many rules as the paper mines from WikiText-103.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.runner import Benchmark, Gates, Report, alternate, rate, ratio, spread
from benchmarks.subjects import EMBEDDED, SEGMENT, docstring_ids, open_ids, whole_segments
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.config.rule_options import AS_FOUND, RuleOptions
from umim_core.mining.counting import count_ngrams
from umim_core.rules.grams import ORDERS
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleOrigin, RuleSet
from umim_core.text.token_ids import decode

OURS, LOOP, TOKENIZER = "ours", "Python sets", "tokenizer"
RULES_OF_PAPER: Final = [216_700, 684_793, 1_266_080]  # of 2, 3, 4 tokens
_VOCABULARY: Final = 1 << 15
_PIECE_TOKENS: Final = 4096
Spans = list[tuple[int, int]]  # (start in the flat ids, length) of every merged span, in order


class SetLoop:
    """Look up tuples in sets, the longest first: the oracle of ours.

    A set of the pairs that begin a rule lets most positions pass with one lookup, which makes the
    loop up to half faster.
    """

    def __init__(self, rules: RuleSet) -> None:
        self._longest_first = [
            (n, set(map(tuple, rules.ids_by_order[n].tolist()))) for n in reversed(ORDERS)
        ]
        self._pairs = {rule[:2] for _, of_order in self._longest_first for rule in of_order}

    def __call__(self, segments: NDArray[np.integer]) -> Spans:
        """Return the merged spans of segments [S, L]."""
        longest_first, pairs, spans = self._longest_first, self._pairs, Spans()
        for row, segment in enumerate(segments):
            ids, first, at, end = segment.tolist(), row * len(segment), 0, len(segment) - 1
            while at < end:
                length = 1
                if (ids[at], ids[at + 1]) in pairs:
                    for n, rules in longest_first:
                        if tuple(ids[at : at + n]) in rules:
                            length = n
                            spans.append((first + at, n))
                            break
                at += length
        return spans


def encode(texts: list[str], tokenizer: Any) -> list[NDArray[np.int32]]:
    backend = tokenizer.backend_tokenizer
    encoded = backend.encode_batch_fast(texts, add_special_tokens=False)
    return [np.array(piece.ids, dtype=np.int32) for piece in encoded]


def compare(
    rules: RuleSet, ids: NDArray[np.integer], tokenize: Callable[[], object], rounds: int
) -> tuple[Report, bool]:
    """Run all sides on ids in whole segments [T]; say whether both matchers gave the same spans."""
    segments = np.asarray(ids).reshape(-1, SEGMENT)
    offsets = np.arange(len(segments) + 1, dtype=np.int64) * SEGMENT
    matcher, loop = Matcher(rules), SetLoop(rules)
    sides: dict[str, Callable[[], object]] = {
        OURS: lambda: matcher.segment_many(ids, offsets),
        LOOP: lambda: loop(segments),
        TOKENIZER: tokenize,
    }
    spans: dict[str, Any] = {}  # of the tokenizer: its own result

    def warmed(name: str, result: Any) -> None:
        if name == OURS:
            starts, lengths = result[:2]
            merged = lengths > 1
            result = list(zip(starts[merged].tolist(), lengths[merged].tolist(), strict=True))
        spans[name] = result

    seconds = alternate(sides, rounds, warmed)
    figures = sizes_of(rules)
    figures["merged_spans"] = len(spans[LOOP])
    figures["sides"] = {
        name: rate(seconds[name], len(ids))
        | ({} if name == OURS else {"ratio": ratio(seconds, name, OURS)})
        for name in sides
    }
    figures["tokenizing_share"] = ratio(seconds, OURS, TOKENIZER)
    return figures, spans[OURS] == spans[LOOP]


def sizes_of(rules: RuleSet) -> Report:
    counts = {str(n): count for n, count in rules.counts_by_order.items()}
    return {"rules": counts, "bytes_per_rule": {"memory": rules.tables.nbytes / len(rules)}}


def synthetic_rules(per_order: Sequence[int]) -> RuleSet:
    """Return random rules, which share next to no prefixes: the worst case for the tables."""
    generator = np.random.default_rng(0)
    bits = _VOCABULARY.bit_length() - 1
    ids, support = {}, {}
    for n, count in zip(ORDERS, per_order, strict=True):
        keys = np.zeros(0, dtype=np.int64)
        while len(keys) < count:
            more = generator.integers(0, 1 << n * bits, count, dtype=np.int64)
            keys = np.union1d(keys, more)
        keys = np.sort(generator.choice(keys, count, replace=False))
        columns = [(keys >> bits * (n - 1 - i)) & (_VOCABULARY - 1) for i in range(n)]
        ids[n] = np.stack(columns, axis=1).astype(np.int32)
        support[n] = np.ones(count, dtype=np.int64)
    return RuleSet(ids, support)


def gates(report: Report) -> Gates:
    gates = Gates()
    for name, measured in report["rule_sets"].items():
        label = name.replace(", ", "_").replace(" ", "_")
        share, loop = measured["tokenizing_share"], measured["sides"][LOOP]["ratio"]
        gates.at_most(f"{label}_of_tokenizing", share["median"], 0.05)
        gates.at_least(f"{label}_times_python_loop", loop["median"], 5.0)
    measured = [*report["rule_sets"].values(), report["synthetic"]]
    largest = max(rule_set["bytes_per_rule"]["memory"] for rule_set in measured)
    gates.at_most("bytes_per_rule_memory", largest, 50.0)
    load = report["synthetic"]["load_seconds"]["median"]
    gates.at_most("load_seconds", load, 1.0)
    return gates


def run(options: argparse.Namespace, report: Report) -> None:
    ids = open_ids(options.ids or docstring_ids())
    tokenizer = load_tokenizer(options.tokenizer)
    counts = count_ngrams(*whole_segments(ids[: -options.held_out]), 5)
    searches = {"tau 5": RuleOptions(tau=5), "tau 50": RuleOptions(tau=50)}
    searches["tau 5, nested"] = RuleOptions.model_validate({"tau": 5, **AS_FOUND})
    end = ids[-options.held_out :]
    pieces = [end[low : low + _PIECE_TOKENS] for low in range(0, len(end), _PIECE_TOKENS)]
    texts = [decode(tokenizer, piece.tolist(), special=True) for piece in pieces]
    rest, _ = whole_segments(np.concatenate(encode(texts, tokenizer)))
    report |= {"held_out_tokens": len(rest), "segment_length": SEGMENT, "rule_sets": {}}
    report["equal"] = True
    with tempfile.TemporaryDirectory(prefix="umim-matching-") as folder:
        for name, search in searches.items():
            rules = RuleSet.from_counts(counts, RuleOrigin(options=search))
            figures, equal = compare(rules, rest, lambda: encode(texts, tokenizer), options.rounds)
            report["rule_sets"][name] = figures
            report["equal"] &= equal
        rules, place = synthetic_rules(options.synthetic), Path(folder) / "synthetic"
        rules.save(place)

        def load() -> object:
            return Matcher(RuleSet.load(place)).segment(rest[:SEGMENT])

        seconds = alternate({"load": load}, options.rounds)
        report["synthetic"] = sizes_of(rules) | {"load_seconds": spread(seconds["load"])}


BENCHMARK: Final = Benchmark(
    libraries=("numba", "numpy", "tokenizers", "transformers"),
    options={
        "ids": Path,
        "tokenizer": EMBEDDED,
        "held_out": 1 << 20,
        "rounds": 10,
        "synthetic": {"type": int, "nargs": 3, "default": RULES_OF_PAPER},
    },
    measure=run,
    gates=gates,
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
