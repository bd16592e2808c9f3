"""Sentences that are least like the question are deleted, the last one kept is trimmed.

A worked example, with sentences of 3, 2 and 3 tokens and a budget of 5 of 8::

    cosine with the question    .2 .2 .2   .9 .9   .5 .5 .5
    kept                                    3  4    5  6  7     nothing to trim
    with a budget of 4                      3  4    5  6        the second sentence lost its end

Question and text are encoded apart. ``sentence-cosine`` encodes by the frozen backbone, which
nobody trained for it. ``cpc`` is the same with the encoder that CPC's authors trained for it: a
directory or a hub repository that ``UMIM_CPC_ENCODER`` names.

Source: Liskavets et al., "Prompt Compression with Context-Aware Sentence Encoding for Fast and
Improved LLM Inference" (AAAI 2025). Differences: docs/baselines-differences.md.

Shapes: T tokens, U sentences, d width of the encoder.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModel, PreTrainedModel, PreTrainedTokenizerBase

from umim_core.backbone.backbone import Backbone
from umim_core.baselines.lexical_units import sentences, token_texts
from umim_core.baselines.methods import Text, TokenReducer, highest
from umim_core.baselines.own_models import hub_commit, load_own_model
from umim_core.errors import BackboneError, require
from umim_core.store.artifacts import directory_digest
from umim_core.text.token_ids import Ints

ENCODER_VARIABLE: Final = "UMIM_CPC_ENCODER"


@dataclass(frozen=True)
class BackboneEncoder:
    """A backbone as an encoder of sentences, each in its context; long texts are read in parts."""

    backbone: Backbone

    @torch.no_grad()
    def sums(self, ids: Ints, sentence_of: Ints) -> Tensor:
        """Return the sum of the last hidden states of every sentence [U, d] (float64).

        ``ids`` are the text [T], at least one token, ``sentence_of`` the sentence that each token
        belongs to [T], from 0, rising.
        """
        room = self.backbone.max_positions or len(ids)
        rows = torch.from_numpy(ids).to(self.backbone.device)[None]
        parts = [
            self.backbone.hidden(self.backbone.embed(row)) for row in torch.split(rows, room, dim=1)
        ]
        return _summed(torch.cat(parts, dim=1)[0], sentence_of, int(sentence_of[-1]) + 1)


@dataclass(frozen=True)
class TextEncoder:
    """A model with a tokenizer of its own; a text beyond its positions is read in parts."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    text_tokenizer: PreTrainedTokenizerBase

    @torch.no_grad()
    def sums(self, ids: Ints, sentence_of: Ints) -> Tensor:
        """See ``BackboneEncoder``; tokens are matched by the characters that they end with."""
        texts = token_texts(ids, self.text_tokenizer)
        ends = np.cumsum([len(text) for text in texts])
        encoded = self.tokenizer(
            "".join(texts),
            truncation=True,
            max_length=int(self.model.config.max_position_embeddings),
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            return_special_tokens_mask=True,
            verbose=False,
        )
        parts = []
        for row, places, special in zip(
            encoded["input_ids"],
            encoded["offset_mapping"],
            encoded["special_tokens_mask"],
            strict=True,
        ):
            real = np.array(special) == 0
            states = self.model(torch.tensor([row], device=self.model.device)).last_hidden_state[0]
            last = np.array([end - 1 for _, end in places], dtype=np.int64)[real]
            token = np.minimum(np.searchsorted(ends, last, side="right"), len(ids) - 1)
            count = int(sentence_of[-1]) + 1
            parts.append(_summed(states[torch.from_numpy(real)], sentence_of[token], count))
        return sum(parts[1:], parts[0])


def _summed(states: Tensor, sentence_of: Ints, count: int) -> Tensor:
    """Return the sums of states [n, d] by sentence [count, d] (float64)."""
    sums = states.new_zeros(count, states.shape[1], dtype=torch.float64)
    return sums.index_add_(0, torch.from_numpy(sentence_of).to(states.device), states.double())


@dataclass(frozen=True)
class SentenceCosine(TokenReducer):
    """Keep the sentences whose embeddings are the most like the question's."""

    encoder: BackboneEncoder | TextEncoder
    tokenizer: PreTrainedTokenizerBase

    def keep(self, text: Text, budget: int) -> Ints:
        """Return the indices [budget] of the tokens that stay; see ``TokenReducer``.

        A text without a question has its last sentence for one.
        """
        sentence_of = sentences(token_texts(text.ids, self.tokenizer))
        question = text.question
        if not len(question):
            question = text.ids[sentence_of == sentence_of[-1]]
        relevance = self.relevance(text.ids, sentence_of, question)
        return highest(relevance[sentence_of], text.protected, budget)

    def relevance(self, ids: Ints, sentence_of: Ints, question: Ints) -> NDArray[np.float64]:
        """Return the cosine of every sentence's embedding and the question's [U].

        The question [Q], at least one token, is encoded apart from the text [T]. ``sentence_of``
        has the sentence that each of its tokens belongs to [T], from 0, rising.
        """
        target = self.encoder.sums(question, np.zeros_like(question))
        # The cosine of a mean is that of the sum.
        sums = self.encoder.sums(ids, sentence_of)
        return torch.cosine_similarity(sums, target).cpu().numpy()


def sentence_cosine(backbone: Backbone) -> SentenceCosine:
    return SentenceCosine(BackboneEncoder(backbone), backbone.require_tokenizer())


def _named_encoder() -> str:
    name = os.environ.get(ENCODER_VARIABLE, "")
    rule = "cpc needs the encoder that its authors trained"
    remedy = "Set it to a directory or a hub repository, or use sentence-cosine."
    require(bool(name), BackboneError, rule, f"{ENCODER_VARIABLE} names none", remedy)
    return name


def trained_encoder() -> str:
    """Return the encoder as name@commit, or directory name@digest."""
    name = _named_encoder()
    if (place := Path(name)).is_dir():
        return f"{place.name}@{directory_digest(place)}"
    return f"{name}@{hub_commit(name) or 'unknown'}"


def cpc(backbone: Backbone) -> SentenceCosine:
    tokenizer, kind = backbone.require_tokenizer(), "sentence encoder"
    model, of_model = load_own_model(kind, _named_encoder(), AutoModel)
    return SentenceCosine(TextEncoder(model, of_model, tokenizer), tokenizer)
