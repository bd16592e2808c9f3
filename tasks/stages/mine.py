"""Stages that make rules: of frequent n-grams, of spans the backbone is sure of, of a directory.

    count         n-grams of the training split (Ray Data)
    confidence    spans of it that the frozen backbone is sure of
    filter        rules of either, per threshold
    given-rules   a rule directory

What is counted once serves several thresholds. A count that dies resumes with its next order, or
with its next piece of the text.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from tasks.data.counting import ClusterCounter, Corpus, Counted, cluster_cpus, default_block_tokens
from tasks.run.stage import Artifact, Metrics, Part, Site, stage
from tasks.stages.named import NamedBackbone, NamedRules, NamedTokenizer
from umim_core.backbone.backbone import load_backbone
from umim_core.backbone.tokenizer_files import load_tokenizer, special_ids
from umim_core.config.rule_options import RuleOptions
from umim_core.errors import EvaluationError
from umim_core.mining.confidence import SpanCounts, add_span_counts, confidence_counts
from umim_core.mining.mine import count, excluded_ids, rules_of
from umim_core.progress import followed, leave_note
from umim_core.rules.grams import NgramCounts
from umim_core.rules.inspection import collision_rate
from umim_core.rules.ruleset import RuleOrigin, RuleSet
from umim_core.store.arrays import open_array, save_array
from umim_core.store.artifacts import json_digest, read_json, write_json
from umim_core.store.publication import STATE, build_once
from umim_core.text.token_ids import ids_digest, segment_borders
from umim_core.text.tokens import TokenFiles, check_known

logger = logging.getLogger("umim.stage")
_BATCH: Final = 8  # segments per forward
_CORPUS: Final = "corpus.json"  # the digest of the tokens that were read
_PIECE_TOKENS: Final = 1 << 18


_COSTS: Final = dict.fromkeys(
    ("options.block_tokens", "options.max_memory_gib", "options.threads"),
    "how fast it is counted and with how much memory, not what comes out",
)
_FILTERS: Final = dict.fromkeys(
    ("options.overlap", "options.containment", "options.spans"),
    "applied by the next stage",
)


@stage(
    version=4,
    resumable=True,
    free={
        **_COSTS,
        **_FILTERS,
        "options.min_documents": "counts of documents serve any least number of them",
    },
)
def count_stage(
    out: Path,
    site: Site,
    *,
    tokens: Part,
    tokenizer: NamedTokenizer,
    options: RuleOptions,
    documents: bool,
) -> Metrics:
    """Count the n-grams of the training split that reach tau, the smallest that is needed.

    The documents of each are counted, too, where the options ask for more than one (``documents``).

    An order that is counted is kept under ``state`` until the stage is finished, so a run that
    dies resumes with the next one.
    """
    site.lease.ensure()
    excluded, state = excluded_ids(tokenizer.loaded, options.protect), out / STATE
    text = TokenFiles.open(tokens.path)
    check_known(text.ids, tokenizer.loaded)
    offsets = segment_borders(len(text.ids), options.length)
    at_a_time = options.block_tokens
    if at_a_time is None and options.max_memory_gib is not None:
        at_a_time = default_block_tokens(int(offsets[-1]), cluster_cpus())
    with followed(state):
        counter = ClusterCounter(
            Corpus(tokens.path, offsets, excluded),
            options.block_tokens,
            kept=partial(_kept_order, state),
            progress=partial(leave_note, state),
            longest=options.longest,
        )
        counts = count(options, counter.count, text, offsets, excluded, at_a_time=at_a_time)
    save_orders(out, keys=counts.keys, support=counts.support)
    if documents and counts.documents is not None:
        save_orders(out, documents=counts.documents)
    write_json(out / _CORPUS, {"digest": ids_digest(text.ids, offsets)})
    return {
        "tokens": float(offsets[-1]),
        **{f"ngrams_{order}": float(len(counts.keys[order])) for order in counts.orders},
    }


@stage(version=4, free=_COSTS)
def filter_stage(
    out: Path,
    _: Site,
    *,
    counted: Artifact,
    tokens: Part,
    tokenizer: NamedTokenizer,
    options: RuleOptions,
) -> Metrics:
    """Filter counts into the rule set of one threshold and policy; the artifact holds ``rules``."""
    corpus: Any = read_json(counted.path / _CORPUS)
    origin = RuleOrigin(
        options=options,
        tokenizer_fingerprint=tokenizer.fingerprint,
        corpus_digest=corpus["digest"],
    )
    if options.source == "confidence":
        return write_rules(out, RuleSet.filtered(*_read_spans(counted.path), origin)[0])
    text = TokenFiles.open(tokens.path)
    least = int(counted.manifest()["config"]["options"]["tau"])
    offsets = segment_borders(len(text.ids), options.length)
    keys, support, documents = (
        load_orders(counted.path, name) for name in ("keys", "support", "documents")
    )
    counts = NgramCounts(keys, support, least, documents or None)
    mined = rules_of(counts, origin, text, offsets)
    return write_rules(out, mined.rules, raw=mined.raw, overlap=mined.overlap)


def _kept_order(state: Path, order: int, count: Callable[[], Counted]) -> Counted:
    folder = state / f"order-{order}"
    keep_part(folder, {"order": order}, lambda out: _save_order(out, order, *count()))
    return load_orders(folder, "keys")[order], load_orders(folder, "support")[order]


def _save_order(out: Path, order: int, keys: np.ndarray, support: np.ndarray) -> None:
    save_orders(out, keys={order: keys}, support={order: support})


@stage(version=2)
def given_rules_stage(
    out: Path, _: Site, *, tokenizer: NamedTokenizer, rules: NamedRules
) -> Metrics:
    """Take over a rule directory; the artifact holds ``rules``."""
    loaded = RuleSet.load(rules.place, tokenizer_fingerprint=tokenizer.fingerprint)
    loaded.check_vocabulary(len(tokenizer.loaded), special_ids(tokenizer.loaded))
    return write_rules(out, loaded)


@stage(
    version=2,
    resumable=True,
    of_run=("device", "dtype"),
    free={**_COSTS, **_FILTERS, "options.tau": "applied by the next stage"},
)
def confidence_stage(
    out: Path, site: Site, *, tokens: Part, backbone: NamedBackbone, options: RuleOptions
) -> Metrics:
    """Count the maximal runs of 2 to 4 tokens that the backbone is confident about.

    It is asked piece by piece; pieces that a run before has left are not asked again.
    """
    state, length, device, dtype = out / STATE, options.length, site.device, site.dtype
    name, revision, place = backbone.name, backbone.revision, tokens.path

    def count_spans() -> Metrics:
        tokenizer = load_tokenizer(name, revision=revision)
        excluded = excluded_ids(tokenizer, options.protect)
        ids = TokenFiles.open(place).ids
        check_known(ids, tokenizer)
        whole = segment_borders(len(ids), length)
        most = int(whole[-1]) if options.confidence_tokens is None else options.confidence_tokens
        offsets = whole[: most // length + 1]
        model = load_backbone(name, revision=revision, dtype=dtype, device=device)
        model.check_positions("rows", length, EvaluationError, "Lower segment_length.")
        pieces = _pieces(offsets)
        parts: list[SpanCounts] = []
        for number, (first, last) in enumerate(pieces):

            def ask(out: Path, first: int = first, last: int = last) -> None:
                spans, support = confidence_counts(
                    model,
                    ids[first:last],
                    segment_borders(last - first, length),
                    min_probability=options.min_probability,
                    batch_size=_BATCH,
                    excluded=excluded,
                )
                save_orders(out, spans=spans, support=support)

            piece = state / f"piece-{number}"
            keep_part(piece, {"tokens": [first, last]}, ask)
            parts.append(_read_spans(piece))
            leave_note(state, number + 1, len(pieces), "asking the backbone")
        counted = add_span_counts(parts)
        save_orders(out, spans=counted[0], support=counted[1])
        write_json(out / _CORPUS, {"digest": ids_digest(ids, offsets)})
        return {
            "tokens": float(offsets[-1]),
            **{f"spans_{n}": float(len(counted[0][n])) for n in counted[0]},
            **{f"runs_{n}": float(counted[1][n].sum()) for n in counted[1]},
        }

    with followed(state):
        return site.lease.call(count_spans, writes=out)


def _pieces(offsets: range) -> list[tuple[int, int]]:
    """Return (first, end) in tokens of each piece; a piece holds whole batches but for the last."""
    batch = _BATCH * int(offsets[1])
    step = max(1, _PIECE_TOKENS // batch) * batch
    end = int(offsets[-1])
    return [(first, min(first + step, end)) for first in range(0, end, step)]


def _read_spans(folder: Path) -> SpanCounts:
    return load_orders(folder, "spans"), load_orders(folder, "support")


def keep_part(folder: Path, of: Mapping[str, object], make: Callable[[Path], None]) -> None:
    """Make a part of a stage unless an earlier run has left it, whole and of the same."""
    key = json_digest(of)
    built = build_once(folder, key, make, kind="part", schema=1, rebuild="damaged")
    if not built.executed:
        logger.info("%s was finished by an earlier run", folder.name.replace("-", " "))


def save_orders(folder: Path, **arrays: Mapping[int, np.ndarray]) -> None:
    """Write one array per order and name, e.g. ``keys_2.npy``."""
    for name, by_order in arrays.items():
        for order, array in by_order.items():
            save_array(folder / f"{name}_{order}.npy", array)


def load_orders(folder: Path, name: str) -> dict[int, np.ndarray]:
    orders = sorted(int(path.stem.rpartition("_")[2]) for path in folder.glob(f"{name}_*.npy"))
    return {order: np.array(open_array(folder / f"{name}_{order}.npy")) for order in orders}


def write_rules(out: Path, rules: RuleSet, **steps: Mapping[int, int]) -> dict[str, float]:
    """Write the folder ``rules`` of an artifact and return its metrics."""
    rules.write(out / "rules")
    sizes = rules.counts_by_order
    shown = {"raw": sizes, "overlap": sizes, "rules": sizes} | steps
    numbers = {f"{name}_{n}": float(shown[name][n]) for name in shown for n in rules.orders}
    tau = {} if rules.options.source == "explicit" else {"tau": float(rules.options.tau)}
    return {**numbers, **tau, "collision_rate": collision_rate(rules)}
