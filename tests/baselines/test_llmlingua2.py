"""LLMLingua-2 against probabilities computed word by word; loading of its classifier."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from support.reduced_texts import (
    FAMILIES,
    given,
    ids_of,
    word_backbone,
    word_classifier,
)
from umim_core.baselines.llmlingua2 import (
    LLMLingua2,
    TokenClassifier,
    load_token_classifier,
)
from umim_core.baselines.methods import reduce_tokens
from umim_core.baselines.own_models import hub_commit
from umim_core.errors import BackboneError
from umim_core.evaluation.method_scoring import named_method

TEXT = "the cat sat in the mat. it ran and slept."


@torch.no_grad()
def chances(text: str, classifier: TokenClassifier) -> list[float]:
    """Probability of each word of the classifier; a full stop is one of its own."""
    ids = classifier.tokenizer.convert_tokens_to_ids(text.replace(".", " .").split())
    logits = classifier.model(input_ids=torch.tensor([ids])).logits[0]
    found: list[float] = torch.softmax(logits.double(), -1)[:, 1].tolist()
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_words_of_the_least_probability_go(family: str) -> None:
    """A token of the text is of the word that it begins with: ``mat.`` of ``mat``."""
    ids, classifier = ids_of(TEXT), word_classifier()
    begins = [word != "." for word in TEXT.replace(".", " .").split()]
    scores = [c for c, begun in zip(chances(TEXT, classifier), begins, strict=True) if begun]
    expected = sorted(sorted(range(len(ids)), key=lambda t: -scores[t])[:4])
    reducer = LLMLingua2(classifier, word_backbone(family).require_tokenizer(), forced=())
    assert reduce_tokens(reducer, given(ids), 4).kept.tolist() == expected


def test_forced_tokens_stay_before_all_others() -> None:
    reducer = LLMLingua2(
        word_classifier(), word_backbone("llama").require_tokenizer(), forced=("in", "slept.")
    )
    assert reduce_tokens(reducer, given(ids_of(TEXT)), 2).kept.tolist() == [3, 9]


def test_long_texts_are_read_in_chunks_of_the_classifiers_positions() -> None:
    classifier = word_classifier()
    text = " ".join(["cat", "dog"] * 20)  # 40 tokens in chunks of 16
    found = classifier.words(text)
    expected = [
        c for n in (16, 16, 8) for c in chances(" ".join(["cat", "dog"] * (n // 2)), classifier)
    ]
    assert found.chances.tolist() == pytest.approx(expected, abs=1e-6)
    assert np.bincount(found.chunks).tolist() == [16, 16, 8]


def test_a_classifier_in_a_directory_is_loaded(tmp_path: Path) -> None:
    classifier = word_classifier()
    classifier.model.save_pretrained(tmp_path)
    classifier.tokenizer.save_pretrained(tmp_path)
    loaded = load_token_classifier(str(tmp_path))
    assert loaded.words("cat dog").chances.tolist() == classifier.words("cat dog").chances.tolist()
    assert not any(weight.requires_grad for weight in loaded.model.parameters())


def test_results_name_the_commit_of_the_classifier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, place = "c" * 40, tmp_path / "models--o--c"
    for folder in ("refs", f"snapshots/{commit}"):
        (place / folder).mkdir(parents=True)
    (place / "refs" / "main").write_text(commit, "utf-8")  # as the hub's client leaves it
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert hub_commit("o/c") == commit
    assert hub_commit(str(tmp_path)) is None
    assert named_method("llmlingua2", None) == "llmlingua2"
    assert named_method("llmlingua2", f"o/c@{commit}") == f"llmlingua2 (o/c@{commit})"


def test_a_classifier_without_a_trained_head_is_refused(tmp_path: Path) -> None:
    classifier = word_classifier()
    state = classifier.model.state_dict()
    trunk = {key: value for key, value in state.items() if not key.startswith("classifier.")}
    classifier.model.save_pretrained(tmp_path, state_dict=trunk)
    classifier.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(BackboneError, match=r"lacks classifier\.bias"):
        load_token_classifier(str(tmp_path))
