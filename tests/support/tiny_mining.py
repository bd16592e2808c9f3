"""A small tokenised corpus, mined through the stages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from support.sites import here, made
from support.token_artifacts import write_documents
from tasks.cluster.lease import ClusterLease
from tasks.data.counting import ClusterCounter
from tasks.run.stage import Artifact, Site
from tasks.stages.mine import count_stage, filter_stage
from tasks.stages.named import NamedTokenizer
from umim_core.config.recipe import ClusterConfig
from umim_core.config.rule_options import RuleOptions
from umim_core.mining.counting import count_ngrams
from umim_core.rules.grams import NgramCounts
from umim_core.store.disk import write_rows
from umim_core.text.sources import JsonLines

LENGTH, TAU = 20, 3
OPTIONS = RuleOptions(tau=TAU, segment_length=LENGTH)


def skewed_ids(size: int) -> np.ndarray:
    """Return ids 1..31 in which small ones are common, and every thirtieth a 0 (``<eos>``)."""
    ids = np.minimum(np.random.default_rng(0).geometric(0.2, size), 31).astype(np.int32)
    ids[::30] = 0
    return ids


@dataclass(frozen=True)
class TinyCorpus:
    ids: np.ndarray
    tokenized: Artifact
    backbone: str  # folder of its tokenizer; its texts lie beside it

    @classmethod
    def make(cls, folder: Path, tokenizer: PreTrainedTokenizerBase, size: int = 6007) -> TinyCorpus:
        ids = skewed_ids(size)
        tokenizer.save_pretrained(folder / "tokenizer")
        documents = np.split(ids, np.arange(70, size, 70))
        texts = ({"text": " ".join(tokenizer.convert_ids_to_tokens(row))} for row in documents)
        write_rows(folder / "texts.jsonl", texts)
        artifact = made(folder, "tokenize", lambda out: write_documents(out / "train", *documents))
        return cls(ids, artifact, str(folder / "tokenizer"))

    @property
    def texts(self) -> JsonLines:
        return JsonLines(paths=(str(Path(self.backbone).with_name("texts.jsonl")),))

    @cached_property
    def tokenizer(self) -> NamedTokenizer:
        """What the stages are given, loaded once."""
        return NamedTokenizer(self.backbone)

    def count(self, root: Path, lease: ClusterLease, **changes: object) -> Artifact:
        options = OPTIONS.model_copy(update=changes)
        tokens, documents = self.tokenized.part("train"), options.count_documents
        call = count_stage(
            tokens=tokens, tokenizer=self.tokenizer, options=options, documents=documents
        )
        return call.build(Site(root, lease))

    def filter(self, root: Path, counted: Artifact, **changes: object) -> Artifact:
        options = OPTIONS.model_copy(update=changes)
        call = filter_stage(
            counted=counted,
            tokens=self.tokenized.part("train"),
            tokenizer=self.tokenizer,
            options=options,
        )
        return call.build(here(root))


class NoCluster(ClusterLease):
    """Start nothing: for stages that count in this process."""

    def __init__(self) -> None:
        super().__init__(ClusterConfig())

    def ensure(self) -> None:
        pass


class InProcess(ClusterCounter):
    """Count in this process, and tell the orders as a cluster does."""

    def count(self, tau: int) -> NgramCounts:
        opened, how = self.corpus.open(), {"longest": self.longest, "threads": 1}
        counts = count_ngrams(opened, self.corpus.offsets, tau, self.corpus.excluded, **how)
        for order in counts.orders:
            found = counts.keys[order], counts.support[order]
            found = self.kept(order, lambda found=found: found)
            counts.keys[order], counts.support[order] = found
        return counts
