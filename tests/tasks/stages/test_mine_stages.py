"""Stages ``count`` and ``filter``, on a real cluster too: equal to counting one by one; resumed."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

import tasks.stages.mine
from support.tiny_mining import (
    LENGTH,
    OPTIONS,
    TAU,
    InProcess,
    NoCluster,
    TinyCorpus,
    frequent,
    stored,
)
from support.tiny_pipeline import counting_in_process
from tasks.cluster.lease import ClusterLease
from tasks.data.counting import ClusterCounter, Corpus, Counted
from tasks.run.stage import Artifact
from umim_core.config.recipe import ClusterConfig
from umim_core.errors import CorpusError, ResourceLimitError
from umim_core.mining.counting import count_ngrams
from umim_core.mining.mine import mine_rules
from umim_core.rules.grams import ORDERS
from umim_core.rules.ruleset import RuleSet
from umim_core.store.artifacts import directory_digest
from umim_core.text.sources import TokenIds
from umim_core.text.token_ids import segment_borders


@pytest.fixture(scope="module", params=["here", pytest.param("cluster", marks=pytest.mark.full)])
def lease(request: pytest.FixtureRequest) -> Iterator[ClusterLease]:
    """Where is counted: in this process, or on a cluster.

    The quick count on a cluster is that of flows/test_full_pipeline.py.
    """
    if request.param == "here":
        with counting_in_process():
            yield NoCluster()
        return
    request.getfixturevalue("two_cores")
    with ClusterLease(ClusterConfig(cpus=2, workers=0)) as found:
        found.ensure()
        yield found


@pytest.fixture(scope="module")
def corpus(
    tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerBase
) -> TinyCorpus:
    return TinyCorpus.make(tmp_path_factory.mktemp("corpus"), tiny_tokenizer)


@pytest.fixture(scope="module")
def counted(
    corpus: TinyCorpus, lease: ClusterLease, tmp_path_factory: pytest.TempPathFactory
) -> Artifact:
    place = tmp_path_factory.mktemp("counted")
    return corpus.count(place, lease, block_tokens=1000)  # six tasks an order


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The orders that count stages finish and keep, as they do."""
    orders: list[int] = []
    save = tasks.stages.mine._save_order

    def note(out: Path, order: int, keys: np.ndarray, support: np.ndarray) -> None:
        save(out, order, keys, support)
        orders.append(order)

    monkeypatch.setattr(tasks.stages.mine, "_save_order", note)
    return orders


def rules_of(artifact: Artifact) -> dict[int, dict[tuple[int, ...], int]]:
    rules = RuleSet.load(artifact.path / "rules")
    return {
        n: dict(
            zip(
                map(tuple, rules.ids_by_order[n].tolist()),
                rules.support_by_order[n].tolist(),
                strict=True,
            )
        )
        for n in ORDERS
    }


def test_the_stage_counts_every_ngram_that_reaches_tau(
    corpus: TinyCorpus, counted: Artifact
) -> None:
    want = frequent(corpus.grams(), TAU)
    assert all(len(want[n]) > 50 for n in ORDERS)
    assert stored(counted) == want
    assert [counted.metrics[f"ngrams_{n}"] for n in ORDERS] == [len(want[n]) for n in ORDERS]
    assert counted.metrics["tokens"] == len(corpus.ids) // LENGTH * LENGTH
    assert not (counted.path / "state").exists()


@pytest.mark.full  # the library counts documents, too: test_mine.py
def test_a_rule_occurs_in_enough_documents(
    corpus: TinyCorpus, lease: ClusterLease, tmp_path: Path
) -> None:
    counted = corpus.count(tmp_path, lease, min_documents=4)
    support, documents = corpus.grams(), corpus.documents()
    assert stored(counted, "documents") == {
        n: {gram: documents[n][gram] for gram in grams}
        for n, grams in frequent(support, TAU).items()
    }
    made = corpus.filter(tmp_path, counted, min_documents=4, overlap="none", containment="keep")
    want = {
        n: {gram: found for gram, found in grams.items() if documents[n][gram] >= 4}
        for n, grams in frequent(support, TAU).items()
    }
    assert rules_of(made) == want
    assert all(0 < len(want[n]) < counted.metrics[f"ngrams_{n}"] for n in ORDERS)


def test_the_command_and_the_stages_give_the_same_rule_set(
    corpus: TinyCorpus, counted: Artifact, tmp_path: Path
) -> None:
    np.save(tmp_path / "ids.npy", corpus.ids.astype(np.uint16))
    source = TokenIds(path=str(tmp_path / "ids.npy"))
    mine_rules(source, tmp_path / "out", tokenizer=corpus.backbone, options=OPTIONS)
    made = corpus.filter(tmp_path, counted).path / "rules"
    assert directory_digest(made) == directory_digest(tmp_path / "out")
    whole = corpus.ids[: len(corpus.ids) // LENGTH * LENGTH].astype("<i4")
    assert RuleSet.load(made).origin.corpus_digest == hashlib.sha256(whole.tobytes()).hexdigest()


@pytest.mark.full
def test_protected_tokens_are_in_no_ngram(
    corpus: TinyCorpus, lease: ClusterLease, tmp_path: Path
) -> None:
    counted = corpus.count(tmp_path, lease, protect=("^w3$",))
    want = frequent(corpus.grams(), TAU)
    left = {n: {g: found for g, found in want[n].items() if 3 not in g} for n in ORDERS}
    assert stored(counted) == left != want


def test_memory_beyond_the_limit_is_refused_before_anything_is_counted(
    corpus: TinyCorpus, lease: ClusterLease, tmp_path: Path, saved: list[int]
) -> None:
    blocks = 1000 if isinstance(lease, NoCluster) else None  # by the cores of the cluster
    with pytest.raises(ResourceLimitError) as caught:
        corpus.count(tmp_path, lease, max_memory_gib=0.0001, block_tokens=blocks)
    assert str(caught.value).startswith("mining must take at most 0.0001 GiB of memory; got ")
    assert "GiB for 6,000 tokens. Raise tau or the limit" in str(caught.value)
    assert saved == []
    assert not list(tmp_path.glob("count/*/manifest.json"))


def run_that_dies(corpus: TinyCorpus, root: Path, lease: ClusterLease, order: int) -> Path:
    """Run a count stage that dies after an order, and return its state."""
    keep = tasks.stages.mine._kept_order

    def dying(state: Path, found: int, count: Callable[[], Counted]) -> Counted:
        kept = keep(state, found, count)
        if found == order:
            raise RuntimeError("died on purpose")
        return kept

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks.stages.mine, "_kept_order", dying)
        with pytest.raises(RuntimeError, match="died on purpose"):
            corpus.count(root, lease)
    (state,) = root.glob("count/*.partial/whole/state")
    kept = sorted(path.name for path in state.glob("order-*"))
    assert kept == [f"order-{n}" for n in range(2, order + 1)]
    return state


def test_a_finished_order_is_not_counted_again(
    corpus: TinyCorpus,
    counted: Artifact,
    lease: ClusterLease,
    tmp_path: Path,
    saved: list[int],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The command line, where another test has run it, keeps this log to itself.
    monkeypatch.setattr(logging.getLogger("umim.count"), "propagate", True)
    run_that_dies(corpus, tmp_path, lease, 2)
    saved.clear()
    with caplog.at_level(logging.INFO, "umim.count"):
        again = corpus.count(tmp_path, lease)
    assert again.digest == counted.digest
    assert saved == [3, 4]
    told = [record.getMessage() for record in caplog.records if record.name == "umim.count"]
    assert told == ["count: order 2 was finished by an earlier run"]


@pytest.mark.full
@pytest.mark.parametrize("name", ["keys_2.npy", "support_2.npy", "manifest.json"])
def test_a_torn_order_is_counted_again(
    corpus: TinyCorpus,
    counted: Artifact,
    lease: ClusterLease,
    tmp_path: Path,
    saved: list[int],
    caplog: pytest.LogCaptureFixture,
    name: str,
) -> None:
    path = run_that_dies(corpus, tmp_path, lease, 3) / "order-2" / name
    path.write_bytes(path.read_bytes()[:-9])
    saved.clear()
    assert corpus.count(tmp_path, lease).digest == counted.digest
    assert saved == [2, 4]
    assert "order-2 is built again" in caplog.text


@pytest.mark.full  # the quick count is that of the library: test_counting.py
@pytest.mark.parametrize("kind", ["shards", "array"])
def test_the_documents_of_given_ngrams_are_counted_exactly(
    corpus: TinyCorpus, two_cores: None, kind: str
) -> None:
    offsets = segment_borders(len(corpus.ids), LENGTH)
    ids = corpus.ids[: offsets[-1]]
    counts = count_ngrams(ids, offsets, 2, excluded=(0,))
    tokens = corpus.tokenized.path / "train" if kind == "shards" else ids
    counter = ClusterCounter(Corpus(tokens, offsets))
    documents, spread = counter.documents_of(counts.keys, corpus.ends), corpus.documents()
    for n in ORDERS:
        rows = [tuple(row) for row in counts.ids(n).tolist()]
        assert documents[n].tolist() == [spread[n][row] for row in rows]


@pytest.mark.full  # the quick error of a worker is that of a broken file: test_tokenizing.py
@pytest.mark.parametrize("documents", [False, True])
def test_the_typed_error_of_a_worker_reaches_the_caller(
    corpus: TinyCorpus, two_cores: None, documents: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    ids = corpus.ids[:6000].copy()
    ids[4321] = -3
    broken = Corpus(ids, range(0, 300 * LENGTH + 1, LENGTH))
    keys = {n: np.zeros(0, np.int64) for n in ORDERS}
    with pytest.raises(CorpusError) as caught:
        if documents:
            ClusterCounter(broken).documents_of(keys, np.array([300 * LENGTH]))
        else:
            ClusterCounter(broken, block_tokens=1000).count(TAU)
    assert type(caught.value) is CorpusError
    told = r"corpus: token ids must lie in 0\.\.262143; got -3 at position \d+\. Check the t.*"
    assert re.fullmatch(told, str(caught.value)), "one line, without the advice of Ray"
    assert "Traceback" not in capfd.readouterr().err


def test_more_documents_than_there_are_give_no_empty_rule_set(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks.stages.mine, "ClusterCounter", InProcess)
    corpus = TinyCorpus.make(tmp_path / "corpus", tiny_tokenizer, 1000)
    corpus.count(tmp_path, NoCluster(), min_documents=2)
    found = corpus.count(tmp_path, NoCluster(), min_documents=1000)
    assert not found.executed
    with pytest.raises(CorpusError, match=r"min_documents is 1000, .* as many documents; got 15"):
        corpus.filter(tmp_path, found, min_documents=1000)
    assert not list(tmp_path.glob("filter/*"))


def test_rules_record_the_patterns_of_tokens_that_they_were_kept_off(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks.stages.mine, "ClusterCounter", InProcess)
    corpus = TinyCorpus.make(tmp_path / "corpus", tiny_tokenizer, 1000)
    protect = {"protect": ("^w3$",)}
    made = corpus.filter(tmp_path, corpus.count(tmp_path, NoCluster(), **protect), **protect)
    assert RuleSet.load(made.path / "rules").options.protect == ("^w3$",)
