"""Score of a causal language model on a text: nats per token and bits per byte.

Nats per token depend on the tokenizer; bits per byte do not, so they compare any two models.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from umim_core.backbone.backbone import Backbone
from umim_core.errors import CorpusError, EvaluationError
from umim_core.evaluation.perplexity import perplexity
from umim_core.merging.compressed import Compressed
from umim_core.text.tokens import tokenize_documents


@dataclass(frozen=True)
class LanguageModelScore:
    """Negative log-likelihood of a set of documents, by token and by byte.

    Attributes:
        nats: Sum of the negative log-probabilities of all targets.
        targets: Predicted tokens: every token of every document and its end-of-text token.
        bytes: Length of the documents in UTF-8.
        documents: Number of documents.
    """

    nats: float
    targets: int
    bytes: int
    documents: int

    @property
    def nats_per_token(self) -> float:
        """Mean loss; its exponential is the perplexity."""
        return self.nats / self.targets

    @property
    def bits_per_byte(self) -> float:
        """Total nats / ln 2 / UTF-8 bytes."""
        return self.nats / math.log(2) / self.bytes


def score_language_model(
    documents: Iterable[str], backbone: Backbone, *, length: int = 512, batch_size: int = 4
) -> LanguageModelScore:
    """Measure a model on documents joined by the end-of-text token, as in training.

    ::

        E d d d d E d d E     E is end-of-text; it stands before the first document too
        E d d d               windows of 4 tokens overlap by one token, so that every token but
              d d E d         the first is predicted once; a window sees nothing before its start
                    d d E

    Args:
        documents: Texts.
        backbone: The model; its tokenizer must have an end-of-text token.
        length: Tokens per window, the first of which is given, at least 2.
        batch_size: Windows per forward.

    Raises:
        CorpusError: If there is no text.
        EvaluationError: If the windows are too short or too long, or the tokenizer has no
            end-of-text token.
    """
    if length < 2:
        raise EvaluationError("a window must hold at least two tokens", length, "Use 512.")
    tokenizer = backbone.require_tokenizer()
    end = tokenizer.eos_token_id
    if not isinstance(end, int):
        raise EvaluationError(
            "documents are separated by one end-of-text token",
            end,
            "Set the tokenizer's eos_token.",
        )
    texts = list(documents)
    size = sum(len(text.encode()) for text in texts)
    if not size:
        raise CorpusError("there must be text to score", f"{len(texts)} documents", "Give some.")
    separator = np.array([end], dtype=np.int32)
    parts = [separator]
    for ids in tokenize_documents(texts, tokenizer):
        parts += [ids, separator]
    stream = np.concatenate(parts)
    windows = [stream[s : s + length] for s in range(0, len(stream) - 1, length - 1)]
    result = perplexity(windows, Compressed.without_merging(backbone), batch_size)
    return LanguageModelScore(result.nll_sum, result.targets, size, len(texts))
