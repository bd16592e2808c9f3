"""LLMLingua, LLMLingua-2 and Selective Context against models' own logits and the package."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import WordPiece
from transformers import BertConfig, BertForTokenClassification, PreTrainedTokenizerFast

from support.reduced_texts import FAMILIES, WORDS, given, ids_of, word_backbone, word_classifier
from umim_core.backbone.backbone import Backbone
from umim_core.backbone.model_files import freeze
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.baselines.lexical_units import sentences, token_texts
from umim_core.baselines.llmlingua import CompressedPrefix, LLMLingua, published_choice
from umim_core.baselines.llmlingua2 import LLMLingua2, TokenClassifier, load_token_classifier
from umim_core.baselines.methods import Ints, reduce_tokens
from umim_core.baselines.own_models import hub_commit
from umim_core.baselines.selective_context import SelectiveContext, self_information
from umim_core.errors import BackboneError

# Choices of the package's own code (llmlingua 0.2.2), the models that it would load replaced by
# `pair_losses` and `piece_classifier`, counts of tokens of `umim-docs-llama` in place of OpenAI's;
# `git show ea8ed576:tests/support/llmlingua_choices.py` wrote them.
RECORDED = json.loads(Path(__file__).with_name("llmlingua_choices.json").read_text("utf-8"))
WHOLE = ["the", "a", "of", "in", "and", "sort", "array", "value", "interpolator", "perpendicular"]


def pair_losses(tokens: int) -> NDArray[np.float64]:
    """The loss of every token behind every other [T, T]."""
    return np.random.default_rng(tokens).uniform(0.1, 9.0, (tokens, tokens))


class PairLosses:
    """Losses of tokens after kept ones, in the place of ``CompressedPrefix``."""

    def __init__(self, tokens: int) -> None:
        self._losses, self._last = pair_losses(tokens), 0

    def score(self, segment: Ints) -> NDArray[np.float64]:
        return self._losses[np.concatenate([[self._last], segment[:-1]]), segment]

    def append(self, ids: Ints) -> None:
        self._last = int(ids[-1])


def piece_classifier() -> TokenClassifier:
    """A BERT of drawn weights whose words have pieces, as multilingual BERT's have."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = enumerate([*special, *WHOLE, "##s", "##ed", *".,()?-:"])
    core = Tokenizer(WordPiece({piece: n for n, piece in pieces}, unk_token="[UNK]"))
    core.normalizer = normalizers.BertNormalizer(lowercase=False)
    core.pre_tokenizer, core.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    core.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = {f"{name[1:-1].lower()}_token": name for name in special}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **names)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=32,  # a chunk, special tokens included
        num_labels=2,
    )
    model, rng = BertForTokenClassification(config), np.random.default_rng(0)
    for _, weight in sorted(model.named_parameters()):
        weight.data = torch.from_numpy(rng.normal(0, 0.5, weight.shape)).float()
    return TokenClassifier(freeze(model), tokenizer)


@torch.no_grad()
def surprise(ids: Ints, backbone: Backbone, prefix: int = 0) -> list[float]:
    """Minus log p of every token behind a prefix, from the logits of the whole model."""
    scores = backbone.model(input_ids=torch.from_numpy(ids)[None]).logits[0].log_softmax(-1)
    return [
        -float(scores[t - 1, ids[t]]) if t else math.log(backbone.vocab_size)
        for t in range(prefix, len(ids))
    ]


def test_segments_are_scored_after_what_was_kept_of_those_before(
    backbone: Backbone, rng: np.random.Generator
) -> None:
    ids = rng.integers(1, 32, 12)
    kept: list[int] = []
    for start, share in ((0, 2), (4, 3), (8, 3)):  # 2.67, 5.33 and 8 so far, rounded down
        scores = surprise(ids[[*kept, *range(start, start + 4)]], backbone, len(kept))
        chosen = sorted(range(4), key=lambda t: -scores[t])[:share]
        kept += sorted(start + t for t in chosen)
    assert reduce_tokens(LLMLingua(backbone, segment=4), given(ids), 8).tolist() == kept


def test_a_prefix_beyond_the_positions_keeps_its_last_half(
    backbone: Backbone, rng: np.random.Generator
) -> None:
    ids = rng.integers(1, 32, 80)
    prefix = CompressedPrefix(backbone)
    prefix.append(ids[:30])
    prefix.append(ids[30:60])
    expected = surprise(ids[28:], backbone, 32)
    assert prefix.score(ids[60:]).tolist() == pytest.approx(expected, abs=1e-4)


def test_the_passage_of_the_least_perplexity_goes_first() -> None:
    backbone, blank = word_backbone("llama"), len(WORDS) - 1
    ids = np.array([3, 4, 5, 6, 7, blank, 8, 9, 3, 4, blank, 5, 6, 7, 8, 9, 3, 4], dtype=np.int64)
    parts = [range(6), range(6, 11), range(11, 18)]
    scores = [self_information(ids[list(part)], backbone).mean() for part in parts]
    [last] = sorted(range(3), key=lambda k: scores[k])[:1]
    kept = reduce_tokens(LLMLingua(backbone), given(ids), 4).tolist()
    assert not set(kept) & set(parts[last])  # two others hold more than twice the budget


TEXT = "the cat sat in the mat. it ran and slept. dog 42"


def test_the_tokens_with_the_least_self_information_go(backbone: Backbone) -> None:
    ids = ids_of(TEXT)
    scores = surprise(ids, backbone)
    expected = sorted(sorted(range(len(ids)), key=lambda t: -scores[t])[:5])
    assert reduce_tokens(SelectiveContext(backbone), given(ids), 5).tolist() == expected


def test_sentences_stay_by_the_sum_of_their_tokens_and_the_last_is_cut(backbone: Backbone) -> None:
    ids = ids_of(TEXT)
    scores, parts = surprise(ids, backbone), [range(6), range(6, 10), range(10, 12)]
    order = sorted(parts, key=lambda part: -sum(scores[t] for t in part))
    expected = sorted([t for part in order for t in part][:8])
    reducer = SelectiveContext(backbone, sentences)
    assert reduce_tokens(reducer, given(ids), 8).tolist() == expected


def test_long_texts_are_scored_after_half_of_the_positions_at_least(
    backbone: Backbone, rng: np.random.Generator
) -> None:
    ids = rng.integers(1, 32, 90)
    found = self_information(ids, backbone)
    assert found[:64].tolist() == pytest.approx(surprise(ids[:64], backbone), abs=1e-4)
    assert found[64:].tolist() == pytest.approx(surprise(ids[32:], backbone, 32), abs=1e-4)


WORDS_TEXT = "the cat sat in the mat. it ran and slept."


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
    ids, classifier = ids_of(WORDS_TEXT), word_classifier()
    begins = [word != "." for word in WORDS_TEXT.replace(".", " .").split()]
    scores = [c for c, begun in zip(chances(WORDS_TEXT, classifier), begins, strict=True) if begun]
    expected = sorted(sorted(range(len(ids)), key=lambda t: -scores[t])[:4])
    tokenizer = word_backbone(family).require_tokenizer()
    reducer = LLMLingua2(classifier, tokenizer, forced=())
    assert reduce_tokens(reducer, given(ids), 4).tolist() == expected
    forced = LLMLingua2(classifier, tokenizer, forced=("in", "slept."))  # before all others
    assert reduce_tokens(forced, given(ids), 2).tolist() == [3, 9]


def test_long_texts_are_read_in_chunks_of_the_classifiers_positions() -> None:
    classifier = word_classifier()
    text = " ".join(["cat", "dog"] * 20)  # 40 tokens in chunks of 16
    found = classifier.words(text)
    expected = [
        c for n in (16, 16, 8) for c in chances(" ".join(["cat", "dog"] * (n // 2)), classifier)
    ]
    assert found.chances.tolist() == pytest.approx(expected, abs=1e-6)
    assert np.bincount(found.chunks).tolist() == [16, 16, 8]


def test_a_classifier_is_loaded_from_a_directory_if_it_is_trained(tmp_path: Path) -> None:
    classifier = word_classifier()
    classifier.model.save_pretrained(tmp_path)
    classifier.tokenizer.save_pretrained(tmp_path)
    loaded = load_token_classifier(str(tmp_path))
    assert loaded.words("cat dog").chances.tolist() == classifier.words("cat dog").chances.tolist()
    assert not any(weight.requires_grad for weight in loaded.model.parameters())
    state = classifier.model.state_dict()
    trunk = {key: value for key, value in state.items() if not key.startswith("classifier.")}
    classifier.model.save_pretrained(tmp_path, state_dict=trunk)
    with pytest.raises(BackboneError, match=r"lacks classifier\.bias"):
        load_token_classifier(str(tmp_path))


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


def case_name(case: dict[str, Any]) -> str:
    return "-".join(str(value) for value in case.values() if isinstance(value, int | float))


@pytest.mark.parametrize("case", RECORDED["losses"], ids=case_name)
def test_the_published_form_drops_what_the_package_drops(case: dict[str, Any]) -> None:
    tokens = case["tokens"]
    ids = np.arange(tokens)
    whole = np.concatenate([[0.0], pair_losses(tokens)[ids[:-1], ids[1:]]])
    free = np.zeros(tokens, dtype=bool)
    kept = published_choice(ids, free, case["budget"], case["segment"], whole, PairLosses(tokens))
    assert sorted(set(ids.tolist()) - set(kept.tolist())) == case["dropped"]


@pytest.mark.parametrize("case", RECORDED["words"], ids=lambda case: f"{case['rate']}")
def test_words_that_the_package_keeps_stay(case: dict[str, Any]) -> None:
    """At a budget of as many tokens as the package keeps, of texts of one chunk and of several."""
    tokenizer = load_tokenizer("umim-docs-llama")
    text = case["text"]
    ids = np.array(tokenizer.encode(text, add_special_tokens=False), dtype=np.int64)
    texts = token_texts(ids, tokenizer)
    starts, place = [], 0
    for word, _ in case["words"]:
        starts.append(text.index(word, place))
        place = starts[-1] + len(word)
    firsts = np.cumsum([0, *map(len, texts)])[:-1] + [len(t) - len(t.lstrip()) for t in texts]
    word_of = np.searchsorted(starts, firsts, side="right") - 1
    expected = [t for t, word in enumerate(word_of) if case["words"][word][1]]
    reducer = LLMLingua2(piece_classifier(), tokenizer, forced=())
    found = reduce_tokens(reducer, given(ids), len(expected))
    assert 0 < len(expected) < len(ids)
    assert found.tolist() == expected
