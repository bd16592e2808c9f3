"""Stages ``count`` and ``filter``: equal to counting one by one, resumed, refused.

They count in this process; that a cluster counts the same is in ``data/test_counting.py``,
``data/test_mining_faults.py`` and, quickly, in ``flows/test_full_pipeline.py``.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

import tasks.stages.mine
from support.ngram_oracle import grams_of
from support.tiny_mining import LENGTH, OPTIONS, NoCluster, TinyCorpus
from support.tiny_pipeline import counting_in_process
from tasks.data.counting import Counted
from tasks.run.stage import Artifact
from umim_core.errors import CorpusError, ResourceLimitError
from umim_core.mining.mine import mine_rules
from umim_core.rules.ruleset import RuleSet
from umim_core.store.artifacts import directory_digest

NOWHERE = NoCluster()


@pytest.fixture(scope="module", autouse=True)
def _here() -> Iterator[None]:
    with counting_in_process():
        yield


@pytest.fixture(scope="module")
def corpus(
    tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerBase
) -> TinyCorpus:
    return TinyCorpus.make(tmp_path_factory.mktemp("corpus"), tiny_tokenizer)


@pytest.fixture(scope="module")
def counted(corpus: TinyCorpus, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return corpus.count(tmp_path_factory.mktemp("counted"), NOWHERE)


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


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"min_documents": 4, "overlap": "none", "containment": "keep"},
        {"protect": ("^w3$",)},
        {"longest": 6, "rule_budget": 100},
    ],
    ids=str,
)
def test_the_stages_give_the_rule_set_of_the_command(
    corpus: TinyCorpus, tmp_path: Path, changes: dict[str, Any]
) -> None:
    options = OPTIONS.model_copy(update=changes)
    mine_rules(corpus.texts, tmp_path / "out", tokenizer=corpus.backbone, options=options)
    counted = corpus.count(tmp_path, NOWHERE, **changes)
    made = corpus.filter(tmp_path, counted, **changes).path / "rules"
    assert directory_digest(made) == directory_digest(tmp_path / "out")
    rules = RuleSet.load(made)
    whole = corpus.ids[: len(corpus.ids) // LENGTH * LENGTH].astype("<i4")
    assert rules.origin.corpus_digest == hashlib.sha256(whole.tobytes()).hexdigest()
    assert len(rules) > 50 and rules.options.protect == options.protect
    assert ("protect" in changes) == all(3 not in gram for gram in grams_of(rules))


def test_memory_beyond_the_limit_is_refused_before_anything_is_counted(
    corpus: TinyCorpus, tmp_path: Path, saved: list[int]
) -> None:
    with pytest.raises(ResourceLimitError) as caught:
        corpus.count(tmp_path, NOWHERE, max_memory_gib=0.0001, block_tokens=1000)
    assert str(caught.value).startswith("mining must take at most 0.0001 GiB of memory; got ")
    assert "GiB for 6,000 tokens. Raise tau or the limit" in str(caught.value)
    assert saved == []
    assert not list(tmp_path.glob("count/*/manifest.json"))


def test_a_finished_order_is_not_counted_again(
    corpus: TinyCorpus,
    counted: Artifact,
    tmp_path: Path,
    saved: list[int],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The command line, where another test has run it, keeps this log to itself.
    monkeypatch.setattr(logging.getLogger("umim"), "propagate", True)
    keep = tasks.stages.mine._kept_order

    def dying(state: Path, found: int, count: Callable[[], Counted]) -> Counted:
        kept = keep(state, found, count)
        if found == 2:
            raise RuntimeError("died on purpose")
        return kept

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="died on purpose"):
        patch.setattr(tasks.stages.mine, "_kept_order", dying)
        corpus.count(tmp_path, NOWHERE)
    (state,) = tmp_path.glob("count/*.partial/whole/state")
    assert [path.name for path in state.glob("order-*")] == ["order-2"]
    saved.clear()
    with caplog.at_level(logging.INFO, "umim.stage"):
        again = corpus.count(tmp_path, NOWHERE)
    assert again.digest == counted.digest
    assert saved == [3, 4]
    told = [message for message in caplog.messages if "finished" in message]
    assert told == ["order 2 was finished by an earlier run"]


def test_more_documents_than_there_are_give_no_empty_rule_set(
    corpus: TinyCorpus, tmp_path: Path
) -> None:
    corpus.count(tmp_path, NOWHERE, min_documents=2)
    found = corpus.count(tmp_path, NOWHERE, min_documents=1000)
    assert not found.executed
    with pytest.raises(CorpusError, match=r"min_documents is 1000, .* as many documents; got 86"):
        corpus.filter(tmp_path, found, min_documents=1000)
    assert not list(tmp_path.glob("filter/*"))
