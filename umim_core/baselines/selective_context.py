"""Selective Context: the units of a text with the least self-information are deleted.

The self-information of x_t is -log p(x_t | what stands before it), in nats. Nothing stands before
the first token: it counts as log V, that of a uniform draw. A worked example, in units of two
tokens and with a budget of 3 of 6::

    self-information   4  1   2  1   3  3
    of the unit        5 5    3 3    6 6      a unit has the sum of its tokens'
    kept               0             4  5     the unit at the border keeps its beginning

Source: Li et al., "Compressing Context to Enhance Inference Efficiency of Large Language Models"
(EMNLP 2023). Differences: docs/baselines-differences.md.

Shapes: T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from umim_core.backbone.backbone import Backbone
from umim_core.baselines.lexical_units import token_texts
from umim_core.baselines.methods import Text, TokenReducer, highest
from umim_core.merging.likelihood import check_rows, target_scores
from umim_core.text.token_ids import Ints


@torch.no_grad()
def self_information(ids: Ints, scorer: Backbone) -> NDArray[np.float64]:
    """Return the self-information (nats) of every token [T], ids of the scorer's own tokenizer.

    A text that is longer than the model's positions is read in windows that begin half of them
    before the first token that is still to be scored.
    """
    check_rows([ids], scorer.vocab_size)
    information = np.full(len(ids), math.log(scorer.vocab_size))
    limit = scorer.max_positions or max(2, len(ids))
    tensor, done = torch.from_numpy(ids).to(scorer.device), 1
    while done < len(ids):
        start = max(0, done - limit // 2) if done > 1 else 0
        end = min(len(ids), start + limit)
        hidden = scorer.hidden(scorer.embed(tensor[None, start : end - 1]))[0]
        scores = target_scores(hidden[done - 1 - start :], tensor[done:end], scorer)
        information[done:end] = -scores.log_probs.cpu().double().numpy()
        done = end
    return information


@dataclass(frozen=True)
class SelectiveContext(TokenReducer):
    """Keep the units with the most self-information."""

    scorer: Backbone
    cut: Callable[[list[str]], Ints] | None = None  # numbers units; None: tokens

    def keep(self, text: Text, budget: int) -> Ints:
        unit_of = np.arange(len(text.ids))
        if self.cut is not None:
            unit_of = self.cut(token_texts(text.ids, self.scorer.require_tokenizer()))
        sums = np.zeros(int(unit_of[-1]) + 1)
        np.add.at(sums, unit_of, self_information(text.ids, self.scorer))
        return highest(sums[unit_of], text.protected, budget)
