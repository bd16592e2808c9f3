from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from umim_core.embedded.docs_tokenizer import END_OF_TEXT, train_tokenizer
from umim_core.errors import ConfigError

TEXTS = ["low lower lowest", "new newer newest", "wide wider widest", "the lowest of the newest"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(TEXTS, out, vocab_size=270)
    return out


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


def test_first_merge_is_the_most_frequent_pair(folder: Path, tokenizer: object) -> None:
    pairs: Counter[tuple[str, str]] = Counter()
    for text in TEXTS:
        for i, word in enumerate(text.split()):
            letters = word if i == 0 else "Ġ" + word
            pairs.update(pairwise(letters))
    (best, count), (_, second) = pairs.most_common(2)
    assert count > second, "the example must have no tie"
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    assert tokenizer.convert_ids_to_tokens(257) == "".join(best)


@given(st.text(max_size=80))
def test_every_text_survives_the_round_trip(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    if END_OF_TEXT in text:
        return
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text


def test_end_of_text_is_id_zero_and_nothing_is_added(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.convert_tokens_to_ids(END_OF_TEXT) == 0
    assert tokenizer.bos_token_id == tokenizer.eos_token_id == 0
    assert tokenizer.encode("low") == tokenizer.encode("low", add_special_tokens=False)


def test_vocabulary_has_the_size_asked_for(tokenizer: PreTrainedTokenizerBase) -> None:
    assert len(tokenizer) == 270
    assert tokenizer.model_max_length == 2048


def test_the_order_of_the_texts_does_not_change_the_files(folder: Path, tmp_path: Path) -> None:
    shuffled = random.Random(3).sample(TEXTS, len(TEXTS))
    train_tokenizer(shuffled, tmp_path, vocab_size=270)
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["tokenizer.json", "tokenizer_config.json"]
    for name in names:
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


def test_a_vocabulary_without_room_for_the_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"at least 257.*got 256"):
        train_tokenizer(TEXTS, tmp_path, vocab_size=256)
    assert list(tmp_path.iterdir()) == []
