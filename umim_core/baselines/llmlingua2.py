"""LLMLingua-2: words that a token classifier would not preserve are deleted.

A worked example, with the budget of 3 of 5 tokens of the text, "?" forced::

    classifier's tokens   the  re  ##port  ends  ?        its own tokenizer
    preserve              .1   .9  .5      .3    .2
    words                 .1   .7          .3    .2       mean of a word's tokens
    rank in the chunk     0    .75         .5    .25      share of the chunk's tokens below it
    text's tokens         the  report      ends  ?        of equal ones the first stay
    kept                       report      ends  ?

Words are those of the published code: a mark of punctuation is a word of its own. It keeps, chunk
by chunk, the words above a percentile of the chunk's tokens. A word's rank is the percentile up to
which that keeps it, so the words of the highest ranks are those that it keeps at the percentile
that meets the budget.

Source: Pan et al., "LLMLingua-2: Data Distillation for Efficient and Faithful Task-Agnostic Prompt
Compression" (Findings of ACL 2024). Differences: docs/baselines-differences.md.

Shapes: T tokens of the text, W words.
"""

from __future__ import annotations

import string
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForTokenClassification, PreTrainedModel, PreTrainedTokenizerBase

from umim_core.backbone.backbone import Backbone
from umim_core.baselines.lexical_units import token_texts
from umim_core.baselines.methods import Text, TokenReducer, highest
from umim_core.baselines.own_models import hub_commit, load_own_model
from umim_core.errors import BackboneError, require
from umim_core.text.token_ids import Ints

PUBLISHED: Final = "microsoft/llmlingua-2-bert-base-multilingual-cased-meetingbank"
CHUNK: Final = 512  # tokens, special ones included
FORCED: Final = ("\n", "?", ".", "!")
_PRESERVE: Final = 1  # label
_ABOVE_ALL: Final = 2.0  # more than any rank
_BELOW_ALL: Final = -1.0
_CONTINUED: Final = "##"
_BEGUN: Final = "\u2581"
_CHUNK_ENDS: Final = (".", "\n")


@dataclass(frozen=True)
class Words:
    """Words of a text as a classifier has them [W]."""

    starts: Ints  # characters
    ends: Ints
    chances: NDArray[np.float64]  # of preserving: the mean of the word's tokens'
    chunks: Ints  # number of the chunk that it was read in, rising


@dataclass(frozen=True)
class TokenClassifier:
    """A model of two labels that gives tokens a probability of being preserved, label 1."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @property
    def chunk(self) -> int:
        """Tokens that are read together, special ones included."""
        return min(CHUNK, int(self.model.config.max_position_embeddings))

    @cached_property
    def _marks_beginnings(self) -> bool:
        """Whether tokens mark the beginning of a word (SentencePiece), not its continuation."""
        vocabulary = self.tokenizer.get_vocab()
        pieces = any(token.startswith(_CONTINUED) for token in vocabulary)
        return not pieces and any(token.startswith(_BEGUN) for token in vocabulary)

    def _begins_word(self, token: str) -> bool:
        if self._marks_beginnings:
            return token.startswith(_BEGUN) or token in string.punctuation
        return not token.startswith(_CONTINUED)

    def words(self, text: str) -> Words:
        """Return the words of a text; blanks between them belong to none."""
        found: list[list[tuple[int, int, int, float]]] = []  # of a word's tokens
        for number, (first, last) in enumerate(self._chunks(text)):
            begun = False
            for token, (start, end), chance in self._preserve(text[first:last]):
                if not begun or self._begins_word(token):
                    found.append([])
                    begun = True
                found[-1].append((first + start, first + end, number, chance))
        return Words(
            np.array([word[0][0] for word in found], dtype=np.int64),
            np.array([word[-1][1] for word in found], dtype=np.int64),
            np.array([np.mean([chance for *_, chance in word]) for word in found]),
            np.array([word[0][2] for word in found], dtype=np.int64),
        )

    def _chunks(self, text: str) -> list[tuple[int, int]]:
        """Return where chunks begin and end, in characters.

        One ends behind the last full stop or line break that lets it fit, else where it is full:
        then, as in the published code, the special token behind it is left out.
        """
        read = self.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        tokens = self.tokenizer.convert_ids_to_tokens(read["input_ids"])
        places = read["offset_mapping"]
        special = self.tokenizer.num_special_tokens_to_add()
        chunks, first = [], 0
        while first < len(tokens):
            last = len(tokens)
            if last - first > self.chunk - special:
                last = first + self.chunk - max(0, special - 1)
                ends = range(last, first + 1, -1)
                last = next((end for end in ends if tokens[end - 1] in _CHUNK_ENDS), last)
            chunks.append((places[first][0], places[last - 1][1]))
            first = last
        return chunks

    @torch.no_grad()
    def _preserve(self, text: str) -> Iterator[tuple[str, tuple[int, int], float]]:
        """Yield the tokens of a chunk: text, place in characters, probability of preserving."""
        read = self.tokenizer(text, return_offsets_mapping=True, verbose=False)
        ids = read["input_ids"][: self.chunk]
        row = torch.tensor([ids], device=self.model.device)
        logits = self.model(input_ids=row, attention_mask=torch.ones_like(row)).logits[0]
        chances = logits.double().softmax(dim=-1)[:, _PRESERVE].tolist()
        tokens = self.tokenizer.convert_ids_to_tokens(ids)
        special = set(self.tokenizer.all_special_tokens)  # unknown tokens are, and never stay
        rows = zip(tokens, read["offset_mapping"][: self.chunk], chances, strict=True)
        return iter([row for row in rows if row[0] not in special])


def load_token_classifier(name: str) -> TokenClassifier:
    return TokenClassifier(
        *load_own_model("token classifier", name, AutoModelForTokenClassification)
    )


@dataclass(frozen=True)
class LLMLingua2(TokenReducer):
    """Keep the words that a token classifier would preserve."""

    classifier: TokenClassifier
    tokenizer: PreTrainedTokenizerBase
    forced: tuple[str, ...] = FORCED

    def keep(self, text: Text, budget: int) -> Ints:
        texts = token_texts(text.ids, self.tokenizer)
        ranks = token_ranks(texts, self.classifier.words("".join(texts)))
        forced = [one in self.forced or one.strip(" ") in self.forced for one in texts]
        ranks[forced] = _ABOVE_ALL
        return highest(ranks, text.protected, budget)


def token_ranks(texts: list[str], words: Words) -> NDArray[np.float64]:
    """Return the rank of each token's word among the tokens of its chunk [T], 0..1.

    ``texts`` are what each token adds to the text [T]. A token is of the word in which its first
    character stands that is no white space; one of white space alone, or of no word, ranks below
    all words.
    """
    ends = np.cumsum([len(one) for one in texts])
    firsts = ends - [len(one.lstrip()) or 1 for one in texts]
    word = np.searchsorted(words.starts, firsts, side="right") - 1
    ranks = np.full(len(texts), _BELOW_ALL)
    inside = word >= 0
    inside[inside] = firsts[inside] < words.ends[word[inside]]
    for chunk in np.unique(words.chunks):
        mine = np.flatnonzero(inside & (words.chunks[word] == chunk))
        chances = words.chances[word[mine]]
        below = np.searchsorted(np.sort(chances), chances, side="left")
        ranks[mine] = below / max(1, len(mine) - 1)
    return ranks


def published_classifier() -> str:
    """Return the published token classifier as name@commit."""
    commit = hub_commit(PUBLISHED)
    rule = "the classifier of llmlingua2 must be reachable on the hub, or in its cache here"
    remedy = "Load it once where there is a network."
    require(commit is not None, BackboneError, rule, PUBLISHED, remedy)
    return f"{PUBLISHED}@{commit}"


def llmlingua2(backbone: Backbone) -> LLMLingua2:
    return LLMLingua2(load_token_classifier(PUBLISHED), backbone.require_tokenizer())
