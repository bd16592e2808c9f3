"""One measurement of mining in a process of its own; the other benchmarks start this.

``count`` counts once and reports the growth of its memory and the bound on it, ``ray`` times the
cluster against the bare kernel. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.common import THREADS, Report, parse
from benchmarks.corpus import Ids, open_ids
from benchmarks.timing import alternate, forget_peak, peak_bytes, ratio, timed
from umim_core.config.rule_options import RuleOptions
from umim_core.mining.counting import count_ngrams
from umim_core.mining.mining_memory import mining_memory, sample_shares
from umim_core.rules.grams import ORDERS, NgramCounts
from umim_core.text.token_files import write_tokens
from umim_core.text.token_ids import UniformOffsets

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


def count(ids: Ids, offsets: UniformOffsets, options: argparse.Namespace) -> Report:
    """Count once, with two threads, next to the bound on the memory."""
    search = RuleOptions(tau=options.tau)
    shares = sample_shares(ids, offsets, search, threads=THREADS)
    bound = mining_memory(len(ids), search, shares, threads=THREADS)
    forget_peak()
    before = peak_bytes()
    seconds, counts = timed(lambda: count_ngrams(ids, offsets, options.tau, threads=THREADS))
    memory = {"peak_bytes": peak_bytes() - before, "bound_bytes": bound}
    return {"tokens": len(ids), "seconds": seconds, **memory, "rules": sizes(counts)}


def ray_pairs(ids: Ids, offsets: UniformOffsets, options: argparse.Namespace) -> Report:
    """Time counting on a cluster of two cores against the bare kernel, over the same shards.

    The start of the cluster and the first count of each side are left out.
    """
    from tasks.cluster.ray_cluster import ray_cluster
    from tasks.data.counting import ClusterCounter
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
            "ray": lambda: ClusterCounter(corpus).count(options.tau),
        }
        seconds = alternate(sides, options.rounds, results.__setitem__)
    return {
        "tokens": len(ids),
        "seconds": seconds,
        "share": ratio(seconds, "kernel", "ray"),
        "equal": same_counts(results["kernel"], results["ray"]),
    }


def write_shards(ids: Ids, folder: Path) -> Path:
    """Write ids as token files."""
    starts = range(0, len(ids), _WRITE_TOKENS)
    assert len(write_tokens(folder, ((ids[at : at + _WRITE_TOKENS], False) for at in starts)))
    return folder


def sizes(counts: NgramCounts) -> dict[str, int]:
    """Return the number of frequent grams per order."""
    return {str(n): len(counts.keys[n]) for n in ORDERS}


def same_counts(one: NgramCounts, other: NgramCounts) -> bool:
    """Return whether both have the same n-grams and counts."""
    return all(
        np.array_equal(one.keys[n], other.keys[n])
        and np.array_equal(one.support[n], other.support[n])
        for n in ORDERS
    )


MEASUREMENTS: Final = {"count": count, "ray": ray_pairs}
OPTIONS: Final[dict[str, object]] = {
    "what": {"choices": MEASUREMENTS, "required": True},
    "ids": {"type": Path, "required": True},
    "tokens": int,
    "tau": 5,
    "rounds": 10,
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
