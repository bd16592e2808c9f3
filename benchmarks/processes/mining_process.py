"""One measurement of mining in a process of its own; the other benchmarks start this.

``predict`` fits the cost law and states what counting will take, ``count`` counts once and reports
the peak of its memory, ``pairs`` times one thread against two, ``ray`` the cluster against the
bare kernel. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.common import THREADS, Report, parse
from benchmarks.corpus import Ids, open_ids
from benchmarks.timing import alternate, peak_bytes, ratio, timed
from umim_core.cost.mining_law import SAMPLE_TOKENS, fit_mining_law
from umim_core.mining.counting import OrderCounter, count_ngrams, excluded_mask
from umim_core.mining.hashing import rank_indexes
from umim_core.mining.mining_options import SearchOptions
from umim_core.rules.grams import ORDERS, NgramCounts
from umim_core.text.shards import ShardWriter, TokenShards
from umim_core.text.token_ids import Ints, UniformOffsets

LENGTH: Final = 512  # tokens of a segment
_WARM_SEGMENTS: Final = 100
_WRITE_TOKENS: Final = 1 << 22


def whole_segments(ids: Ids) -> tuple[Ids, UniformOffsets]:
    """Return the ids without the remainder of a segment, and the borders."""
    segments = len(ids) // LENGTH
    return ids[: segments * LENGTH], UniformOffsets(LENGTH, segments)


def warm_up() -> None:
    """Load the compiled loops."""
    ids, offsets = whole_segments(np.arange(_WARM_SEGMENTS * LENGTH, dtype=np.int32) % 7)
    count_ngrams(ids, offsets, 2, threads=THREADS)


def predict(ids: Ids, offsets: UniformOffsets, options: argparse.Namespace) -> Report:
    """Fit the law on a sample of the ids and predict counting ``--total`` tokens like them."""
    law = fit_mining_law(
        ids,
        offsets,
        options.tau,
        threads=THREADS,
        sample_tokens=options.sample_tokens,
        resident_bytes=peak_bytes,
    )
    prediction = law.predict(options.total or len(ids), SearchOptions(options.tau))
    return prediction.as_dict() | {"sample_tokens": min(options.sample_tokens, len(ids))}


def count(ids: Ids, offsets: UniformOffsets, options: argparse.Namespace) -> Report:
    """Count once, with two threads; the counts may be saved."""
    seconds, counts = timed(lambda: count_ngrams(ids, offsets, options.tau, threads=THREADS))
    peak = peak_bytes()
    if options.save is not None:
        save_counts(options.save, counts)
    return {"tokens": len(ids), "seconds": seconds, "peak_bytes": peak, "rules": sizes(counts)}


def pairs(ids: Ids, offsets: UniformOffsets, options: argparse.Namespace) -> Report:
    """Time one thread against two, and count the distinct candidates of each order."""
    sides: dict[str, Callable[[], object]] = {
        f"threads_{n}": lambda n=n: count_ngrams(ids, offsets, options.tau, threads=n)
        for n in (1, THREADS)
    }
    seconds = alternate(sides, options.rounds)
    return {
        "tokens": len(ids),
        "seconds": seconds,
        "distinct": distinct(ids, offsets, options.tau),
    }


def ray_pairs(ids: Ids, offsets: UniformOffsets, options: argparse.Namespace) -> Report:
    """Time counting on a cluster of two cores against the bare kernel, over the same shards.

    The start of the cluster and the first count of each side are left out.
    """
    from tasks.cluster.ray_cluster import ray_cluster
    from tasks.data.counting import count_distributed
    from tasks.data.counting_tables import Corpus

    results: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory(prefix="umim-ray-benchmark-") as folder,
        ray_cluster(THREADS, object_store_bytes=options.object_store),
    ):
        corpus = Corpus(write_shards(ids, Path(folder) / "shards"), offsets)
        shards = corpus.open()
        sides = {
            "kernel": lambda: count_ngrams(shards, offsets, options.tau, threads=THREADS),
            "ray": lambda: count_distributed(corpus, options.tau),
        }
        seconds = alternate(sides, options.rounds, results.__setitem__)
    return {
        "tokens": len(ids),
        "seconds": seconds,
        "share": ratio(seconds, "kernel", "ray"),
        "equal": same_counts(results["kernel"], results["ray"]),
    }


def write_shards(ids: Ids, folder: Path) -> Path:
    """Write ids as token shards."""
    writer = ShardWriter(folder)
    for low in range(0, len(ids), _WRITE_TOKENS):
        writer.add(ids[low : low + _WRITE_TOKENS])
    writer.close()
    assert len(TokenShards.open(folder)) == len(ids)
    return folder


def distinct(ids: Ids, offsets: UniformOffsets, tau: int) -> dict[str, int]:
    """Return the distinct candidates that are counted, per order."""
    keys: dict[int, Ints] = {}
    found = {}
    for n in ORDERS:
        counter = OrderCounter(n, rank_indexes(keys, n), excluded_mask(()), threads=THREADS)
        counter.add(ids, offsets)
        keys[n], _ = counter.frequent(tau)
        found[str(n)] = len(counter.table)
    return found


def sizes(counts: NgramCounts) -> dict[str, int]:
    """Return the number of frequent grams per order."""
    return {str(n): len(counts.keys[n]) for n in ORDERS}


def same_counts(one: NgramCounts, other: NgramCounts, times: int = 1) -> bool:
    """Return whether ``other`` has the keys of ``one`` and ``times`` its counts."""
    return all(
        np.array_equal(one.keys[n], other.keys[n])
        and np.array_equal(times * one.support[n], other.support[n])
        for n in ORDERS
    )


def save_counts(path: Path, counts: NgramCounts) -> None:
    """Write keys and support of all orders."""
    arrays = {f"keys_{n}": counts.keys[n] for n in ORDERS}
    support = {f"support_{n}": counts.support[n] for n in ORDERS}
    np.savez(path, allow_pickle=False, tau=np.array(counts.tau), **arrays, **support)


def load_counts(path: Path) -> NgramCounts:
    """Read what :func:`save_counts` wrote."""
    with np.load(path, allow_pickle=False) as arrays:
        keys = {n: arrays[f"keys_{n}"] for n in ORDERS}
        support = {n: arrays[f"support_{n}"] for n in ORDERS}
        return NgramCounts(keys, support, int(arrays["tau"]))


MEASUREMENTS: Final = {"predict": predict, "count": count, "pairs": pairs, "ray": ray_pairs}
OPTIONS: Final[dict[str, object]] = {
    "what": {"choices": MEASUREMENTS, "required": True},
    "ids": {"type": Path, "required": True},
    "tokens": int,
    "tau": 5,
    "total": int,  # tokens to predict for
    "sample_tokens": SAMPLE_TOKENS,
    "rounds": 10,
    "save": Path,  # receives the counts (.npz)
    "object_store": 3 << 30,  # bytes
}


def main() -> None:
    """Measure and print."""
    options = parse(__doc__, OPTIONS)
    ids, offsets = whole_segments(open_ids(options.ids, options.tokens))
    if options.what != "ray":  # whose sides have a first run of their own
        warm_up()
    print(json.dumps(MEASUREMENTS[options.what](ids, offsets, options)))


if __name__ == "__main__":
    main()
