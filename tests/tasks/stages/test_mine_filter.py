from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

import tasks.stages.mine
from support.tiny_mining import InProcess, NoCluster, TinyCorpus
from tasks.stages.mine import corpus_digest
from umim_core.errors import ArtifactError, CorpusError
from umim_core.rules.ruleset import RuleSet


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


@pytest.mark.parametrize("text", ["[]", "{}", '{"digest": 7}'])
def test_a_corpus_digest_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "corpus.json").write_text(text)
    with pytest.raises(ArtifactError, match=r"corpus.json must hold the corpus digest; got"):
        corpus_digest(tmp_path)
