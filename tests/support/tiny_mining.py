"""A small tokenised corpus, mined through the stages, and what its counts must be."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import psutil
from transformers import PreTrainedTokenizerBase

from support.sites import here
from support.token_artifacts import write_documents
from tasks.cluster.lease import ClusterLease
from tasks.data.counting import ClusterCounter
from tasks.run.site import Site
from tasks.run.stage import Artifact, Metrics, StageSpec, run_stage
from tasks.stages.mine import count_stage, filter_stage
from tasks.stages.named import NamedTokenizer
from umim_core.config.recipe import ClusterConfig
from umim_core.config.rule_options import RuleOptions
from umim_core.mining.counting import LocalCounter, count_ngrams
from umim_core.rules.grams import ORDERS, NgramCounts

LENGTH, TAU = 20, 3
OPTIONS = RuleOptions(tau=TAU, segment_length=LENGTH)


def skewed_ids(size: int, seed: int = 0) -> np.ndarray:
    """Return ids 1..31 in which small ones are common, and every thirtieth a 0 (``<eos>``)."""
    ids = np.minimum(np.random.default_rng(seed).geometric(0.2, size), 31).astype(np.int32)
    ids[::30] = 0
    return ids


@dataclass(frozen=True)
class TinyCorpus:
    """A tokenised corpus of documents of 70 tokens.

    Attributes:
        ids: Its token ids.
        ends: Ends of its documents.
        tokenized: The artifact that holds it.
        backbone: The folder of its tokenizer.
    """

    ids: np.ndarray
    ends: np.ndarray
    tokenized: Artifact
    backbone: str

    @classmethod
    def make(cls, folder: Path, tokenizer: PreTrainedTokenizerBase, size: int = 6007) -> TinyCorpus:
        """Write the corpus, in shards of 999 tokens, and the tokenizer."""
        ids = skewed_ids(size)
        ends = np.append(np.arange(70, size, 70), size)
        tokenizer.save_pretrained(folder / "tokenizer")

        def build(out: Path) -> Metrics:
            documents = np.split(ids, ends[:-1])
            write_documents(out / "train", *documents)
            return {}

        artifact = run_stage(folder, StageSpec("tokenize", 1, {"size": size}, {}), build)
        return cls(ids, ends, artifact, str(folder / "tokenizer"))

    @cached_property
    def tokenizer(self) -> NamedTokenizer:
        """What the stages are given, loaded once."""
        return NamedTokenizer(self.backbone)

    def count(self, root: Path, lease: ClusterLease, **changes: object) -> Artifact:
        """Run the count stage."""
        options = OPTIONS.model_copy(update=changes)
        tokens, documents = self.tokenized.part("train"), options.count_documents
        call = count_stage(
            tokens=tokens, tokenizer=self.tokenizer, options=options, documents=documents
        )
        return call.build(Site(root, lease))

    def filter(self, root: Path, counted: Artifact, **changes: object) -> Artifact:
        """Run the filter stage."""
        options = OPTIONS.model_copy(update=changes)
        call = filter_stage(
            counted=counted,
            tokens=self.tokenized.part("train"),
            tokenizer=self.tokenizer,
            options=options,
        )
        return call.build(here(root))

    def grams(self) -> dict[int, Counter[tuple[int, ...]]]:
        """Count all n-grams without ``<eos>`` in whole segments, one by one."""
        return {n: Counter(gram for gram, _ in self._positions(n)) for n in ORDERS}

    def documents(self) -> dict[int, Counter[tuple[int, ...]]]:
        """Count the documents of all n-grams, by the document of the first token."""
        return {
            n: Counter(
                gram
                for gram, _ in {
                    (gram, int(np.searchsorted(self.ends, at, side="right")))
                    for gram, at in self._positions(n)
                }
            )
            for n in ORDERS
        }

    def _positions(self, n: int) -> list[tuple[tuple[int, ...], int]]:
        flat = self.ids.tolist()
        starts = [
            at
            for low in range(0, len(flat) // LENGTH * LENGTH, LENGTH)
            for at in range(low, low + LENGTH - n + 1)
        ]
        return [(tuple(flat[at : at + n]), at) for at in starts if 0 not in flat[at : at + n]]


def frequent(
    counts: dict[int, Counter[tuple[int, ...]]], tau: int
) -> dict[int, dict[tuple[int, ...], int]]:
    """Return the n-grams that occur at least ``tau`` times."""
    return {n: {gram: found for gram, found in counts[n].items() if found >= tau} for n in counts}


def stored(counted: Artifact, name: str = "support") -> dict[int, dict[tuple[int, ...], int]]:
    """Return what a count stage stored, by n-gram."""
    keys = {n: np.load(counted.path / f"keys_{n}.npy") for n in ORDERS}
    counts = NgramCounts(keys, keys, 0)
    return {
        n: dict(
            zip(
                map(tuple, counts.ids(n).tolist()),
                np.load(counted.path / f"{name}_{n}.npy").tolist(),
                strict=True,
            )
        )
        for n in ORDERS
    }


def titles(parent: psutil.Process) -> dict[psutil.Process, str]:
    """Return what the processes below one call themselves."""
    found: dict[psutil.Process, str] = {}
    for process in parent.children(recursive=True):
        try:
            found[process] = " ".join(process.cmdline())
        except psutil.Error:
            continue
    return found


class NoCluster(ClusterLease):
    """Start nothing: for stages that count in this process."""

    def __init__(self) -> None:
        super().__init__(ClusterConfig())

    def ensure(self) -> None:
        """Do nothing."""


class InProcess(ClusterCounter):
    """Count in this process, and tell the orders as a cluster does."""

    def count(self, tau: int) -> NgramCounts:
        """Count what no earlier run has finished."""
        opened, how = self.corpus.open(), {"longest": self.longest, "threads": 1}
        counts = count_ngrams(opened, self.corpus.offsets, tau, self.corpus.excluded, **how)
        for order in counts.orders:
            found = counts.keys[order], counts.support[order]
            found = self.kept(order, lambda found=found: found)
            counts.keys[order], counts.support[order] = found
        return counts

    def documents_of(self, keys: dict[int, np.ndarray], ends: np.ndarray) -> dict[int, np.ndarray]:
        """Count the documents of given n-grams."""
        corpus = replace(self.corpus, tokens=self.corpus.open())
        return LocalCounter(corpus.tokens, corpus.offsets, threads=1).documents_of(keys, ends)
