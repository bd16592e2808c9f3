"""Texts, backbones and a token classifier for the tests of token reducers; all tiny."""

from __future__ import annotations

import numpy as np
import torch
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    BertConfig,
    BertForTokenClassification,
    BertModel,
    BertPreTrainedModel,
    PreTrainedTokenizerBase,
)

from support.tiny_models import SIZES, random_model, tiny_config, word_tokenizer
from umim_core.backbone.backbone import Backbone, wrap_backbone
from umim_core.backbone.model_files import freeze
from umim_core.baselines.llmlingua2 import TokenClassifier
from umim_core.baselines.methods import Ints, Text
from umim_core.baselines.sentence_cosine import TextEncoder

FAMILIES = ("gpt2", "llama")
_KNOWN = ["<eos>", "the", "of", "in", "and", "it", "cat", "dog", "mat", "sat", "ran"]
_KNOWN += ["slept.", "mat.", "dog.", "what?", "42"]
_BLANK_LINE = "\n\n"
WORDS = [*_KNOWN, *(f"w{i}" for i in range(len(_KNOWN), SIZES["vocab_size"] - 1)), _BLANK_LINE]
_PIECES = ["[UNK]", ".", "?", *(word.rstrip(".?") for word in _KNOWN[1:])]
PLACES = 16  # positions of the classifier


def word_backbone(family: str) -> Backbone:
    """A random backbone of 64 positions whose tokens are the words of ``WORDS``."""
    return wrap_backbone(
        random_model(tiny_config(family)), word_tokenizer(WORDS, unk_token=WORDS[0])
    )


def word_classifier() -> TokenClassifier:
    """A random classifier of 16 positions that reads a full stop as a token of its own."""
    return TokenClassifier(
        _bert(BertForTokenClassification),
        word_tokenizer(_PIECES, Whitespace(), unk_token=_PIECES[0]),
    )


def word_encoder(text_tokenizer: PreTrainedTokenizerBase) -> TextEncoder:
    """A random encoder of 16 positions that sees both sides and has the classifier's tokens."""
    return TextEncoder(
        _bert(BertModel),
        word_tokenizer(_PIECES, Whitespace(), unk_token=_PIECES[0]),
        text_tokenizer,
    )


def _bert(kind: type[BertPreTrainedModel]) -> BertPreTrainedModel:
    config = BertConfig(
        vocab_size=len(_PIECES),
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=PLACES,
        initializer_range=0.5,
        num_labels=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return freeze(kind(config))


def ids_of(text: str) -> Ints:
    return np.array([WORDS.index(word) for word in text.split()], dtype=np.int64)


def given(ids: Ints, *protected: int, question: str = "") -> Text:
    marks = np.zeros(len(ids), dtype=bool)
    marks[list(protected)] = True
    return Text(ids, marks, ids_of(question))
