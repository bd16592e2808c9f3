from __future__ import annotations

import logging
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.errors import ConfigError
from umim_core.text.sources import TextFiles, TokenIds
from umim_core.text.token_ids import cut_segments
from umim_core.text.tokens import first_ids, tokenize_parts

PROSE = (
    "Return the sum of the elements over an axis. It's 3.14, isn't it?\n\n"
    "Parameters\n----------\naxis : int, optional (default: 0).\n    Höhe über null; 10000 km.\n"
) * 40


@pytest.fixture(scope="module")
def byte_level() -> PreTrainedTokenizerBase:
    tokenizer = load_tokenizer("umim-docs-llama")
    tokenizer.model_max_length = 16
    return tokenizer


def llama_3_like() -> PreTrainedTokenizerBase:
    """Make a BPE whose words take punctuation and line ends together, as Llama 3's do."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([PROSE], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe)


def sentencepiece_like() -> PreTrainedTokenizerBase:
    """Make a BPE that puts a mark in front of every text, as Llama 2's does."""
    bpe = Tokenizer(models.BPE(unk_token="<unk>"))
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>"], show_progress=False, max_token_length=12
    )
    bpe.train_from_iterator(PROSE.split("\n"), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, unk_token="<unk>")


def ids_of(
    documents: list[str], tokenizer: PreTrainedTokenizerBase, batch_size: int = 256
) -> list[list[int]]:
    """Tokenize documents, each of which may come in several pieces."""
    found: list[list[int]] = [[]]
    for ids, last in tokenize_parts(((d, True) for d in documents), tokenizer, batch_size):
        assert ids.dtype == np.int32
        found[-1] += ids.tolist()
        if last:
            found.append([])
    return found[:-1]


def whole(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False, verbose=False)


# Tokenising


@pytest.mark.parametrize("batch_size", [1, 2, 3, 100])
def test_documents_are_tokenised_in_order(
    byte_level: PreTrainedTokenizerBase, batch_size: int
) -> None:
    documents = ["the sum", "", "over an axis", "the", "ü", ""]
    found = ids_of(documents, byte_level, batch_size)
    assert found == [whole(d, byte_level) for d in documents]


def test_no_special_tokens_no_truncation_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # A tokenizer of its own: transformers warns once per object.
    tokenizer = load_tokenizer("umim-docs-llama")
    tokenizer.model_max_length = 16
    logger = logging.getLogger("transformers")  # it does not pass records on to the root
    logger.addHandler(caplog.handler)
    try:
        (ids,) = ids_of([PROSE], tokenizer)
        assert caplog.messages == []
        tokenizer(PROSE)
        assert "longer than the specified maximum" in caplog.text, "the warning must exist"
    finally:
        logger.removeHandler(caplog.handler)
    assert tokenizer.decode(ids) == PROSE
    assert len(ids) > tokenizer.model_max_length


@pytest.mark.parametrize("make", ["byte_level", "llama_3_like", "sentencepiece_like"])
def test_a_long_document_gives_the_ids_of_the_whole(
    make: str, byte_level: PreTrainedTokenizerBase
) -> None:
    makers = {"llama_3_like": llama_3_like, "sentencepiece_like": sentencepiece_like}
    tokenizer = makers[make]() if make in makers else byte_level
    text = PROSE * 80  # longer than two pieces
    documents = ["before", text, "after"]
    assert ids_of(documents, tokenizer) == [whole(t, tokenizer) for t in documents]


@pytest.mark.parametrize(
    ("most", "read", "all_read"), [(1, 1, False), (4, 4, False), (5, 5, False), (6, 5, True)]
)
def test_the_first_ids_of_a_corpus_are_read(
    tmp_path: Path, byte_level: PreTrainedTokenizerBase, most: int, read: int, all_read: bool
) -> None:
    np.save(tmp_path / "ids.npy", np.arange(5, dtype=np.uint16))
    ids, ended = first_ids(TokenIds(path=str(tmp_path / "ids.npy")), byte_level, most)
    assert (ids.tolist(), ended) == (list(range(read)), all_read)


@pytest.mark.parametrize("most", [0, -1])
def test_a_limit_below_one_is_refused(
    tmp_path: Path, byte_level: PreTrainedTokenizerBase, most: int
) -> None:
    with pytest.raises(ConfigError, match=f"limit of tokens must be at least 1; got {most}"):
        first_ids(TextFiles(paths=(str(tmp_path),)), byte_level, most)


# Segments


@given(
    documents=st.lists(st.lists(st.integers(0, 2**18 - 1), max_size=12), max_size=12),
    length=st.integers(2, 9),
)
def test_segments_are_the_cut_concatenation(documents: list[list[int]], length: int) -> None:
    ids = list(chain.from_iterable(documents))
    flat, offsets = cut_segments(np.array(ids, dtype=np.int64), length)
    expected = [ids[i : i + length] for i in range(0, len(ids) - length + 1, length)]
    assert [flat[a:b].tolist() for a, b in pairwise(offsets)] == expected
    assert flat.size == offsets[-1]
    assert (flat.dtype, offsets.dtype) == (np.int32, np.int64)
