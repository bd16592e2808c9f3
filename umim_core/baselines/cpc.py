"""CPC: the sentences that are least like the question are deleted, the last one kept is trimmed.

A worked example, with sentences of 3, 2 and 3 tokens and a budget of 5 of 8::

    cosine with the question    .2 .2 .2   .9 .9   .5 .5 .5
    kept                                    3  4    5  6  7     nothing to trim
    with a budget of 4                      3  4    5  6        the second sentence lost its end

Source: Liskavets et al., "Prompt Compression with Context-Aware Sentence Encoding for Fast and
Improved LLM Inference" (AAAI 2025). Differences: docs/baselines.md.

Shapes: T tokens, Q tokens of the question, U sentences, d width of the encoder.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from umim_core.backbone.backbone import Backbone
from umim_core.baselines.forward_cost import causal_pairs, forward_flops
from umim_core.baselines.lexical_units import lexical_units
from umim_core.baselines.methods import BASELINES, Ints, ReducedTokens, Text
from umim_core.baselines.reduction import highest
from umim_core.rules.matcher import Matcher


@dataclass(frozen=True)
class CPC:
    """Keep the sentences whose embeddings, read after the question, are the most like it.

    Attributes:
        encoder: The sentence encoder: any backbone with the tokenizer of the text. An embedding is
            the mean of the last hidden states of a sentence, in its context.
    """

    encoder: Backbone

    def keep(self, text: Text, budget: int) -> Ints:
        """Return the indices [budget] of the tokens that stay; see ``TokenReducer``.

        A text without a question has its last sentence for one.
        """
        sentence_of = lexical_units(text.ids, "sentence", self.encoder)
        question = text.question
        if not len(question):
            question = text.ids[sentence_of == sentence_of[-1]]
        relevance = self.relevance(text.ids, sentence_of, question)
        return highest(relevance[sentence_of], text.protected, budget)

    @torch.no_grad()
    def relevance(self, ids: Ints, sentence_of: Ints, question: Ints) -> NDArray[np.float64]:
        """Return the cosine of every sentence's embedding and the question's [U].

        A text that does not fit the encoder behind the question is read in parts, the question in
        front of each; of a question that takes more than half of the positions the end is read.

        Args:
            ids: The text [T], at least one token.
            sentence_of: Sentence that each token belongs to [T], from 0, rising.
            question: Ids [Q], at least one.
        """
        room = self.encoder.max_positions or len(ids) + len(question)
        asked = question[-max(1, room // 2) :]
        length = max(1, room - len(asked))
        parts = [
            self._states(np.concatenate([asked, ids[start : start + length]]))
            for start in range(0, len(ids), length)
        ]
        target = parts[0][: len(asked)].mean(dim=0)
        states = torch.cat([part[len(asked) :] for part in parts])
        number = torch.from_numpy(sentence_of).to(states.device)
        # The cosine of a mean is that of the sum.
        sums = states.new_zeros(int(sentence_of[-1]) + 1, states.shape[1])
        sums.index_add_(0, number, states)
        return torch.cosine_similarity(sums, target[None]).cpu().numpy()

    def _states(self, ids: Ints) -> Tensor:
        """Return the last hidden states of ids [T]: [T, d] (float64)."""
        rows = torch.from_numpy(ids).to(self.encoder.device)[None]
        return self.encoder.hidden(self.encoder.embed(rows))[0].double()

    def flops(self, text: Text, budget: int) -> int:
        """Estimate one forward of the encoder over question and text."""
        tokens = len(text.ids) + len(text.question)
        return forward_flops(self.encoder.model, tokens, causal_pairs(tokens))


@BASELINES.add("cpc")
def cpc(backbone: Backbone, matcher: Matcher) -> ReducedTokens:
    """Delete the sentences whose embeddings are the least like the question's."""
    return ReducedTokens(CPC(backbone))
