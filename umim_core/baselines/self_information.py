"""Self-information of tokens under a causal language model, whole or after a compressed prefix.

The self-information of x_t is -log p(x_t | what stands before it), in nats. Nothing stands before
the first token: it counts as log V, that of a uniform draw.

Shapes: T tokens, V vocabulary, d embedding size, S tokens of a segment.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import DynamicCache

from umim_core.backbone.attention_masks import check_attention_window
from umim_core.backbone.backbone import Backbone
from umim_core.baselines.methods import Ints
from umim_core.errors import EvaluationError
from umim_core.merging.likelihood import target_scores


@torch.no_grad()
def self_information(ids: Ints, scorer: Backbone) -> NDArray[np.float64]:
    """Return the self-information of every token [T] (nats).

    A text that is longer than the model's positions is read in windows that begin half of them
    before the first token that is still to be scored.

    Args:
        ids: Ids [T] (int64) of the scorer's own tokenizer.
        scorer: The language model.

    Raises:
        EvaluationError: If an id is outside the scorer's vocabulary.
    """
    _check_vocabulary(ids, scorer)
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


def _check_vocabulary(ids: Ints, scorer: Backbone) -> None:
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < scorer.vocab_size:
        raise EvaluationError(
            f"ids must lie between 0 and {scorer.vocab_size - 1}",
            f"{int(ids.min())} .. {int(ids.max())}",
            "The scoring model must have the tokenizer of the text.",
        )


class CompressedPrefix:
    """The kept tokens before a segment, in a KV cache; segments are scored after them.

    Where prefix and segment exceed the model's positions, the last tokens of the prefix stay, half
    as many as there are positions.
    """

    def __init__(self, scorer: Backbone) -> None:
        self._scorer = scorer
        self._cached_ids = np.zeros(0, dtype=np.int64)  # what the cache holds
        self._cache = DynamicCache()
        self._last: Tensor | None = None  # hidden state after the prefix [1, d]

    @torch.no_grad()
    def score(self, segment: Ints) -> NDArray[np.float64]:
        """Return the self-information of a segment's tokens [S] after the prefix (nats).

        Args:
            segment: Ids [S] (int64), at most half as many as the model has positions.

        Raises:
            EvaluationError: If an id is outside the scorer's vocabulary.
            GenerationError: If prefix and segment exceed the window of a sliding-window model.
        """
        _check_vocabulary(segment, self._scorer)
        limit = self._scorer.max_positions
        if limit is not None and len(self._cached_ids) + len(segment) > limit:
            tail = self._cached_ids[-(limit // 2) :]
            self._cached_ids, self._cache = tail[:0], DynamicCache()
            self.append(tail)
        hidden = self._read(segment)
        if len(self._cached_ids):
            self._cache.crop(-len(segment))
        else:
            self._cache = DynamicCache()
        before = [] if self._last is None else [self._last]
        targets = torch.from_numpy(segment).to(hidden.device)
        states = torch.cat([*before, hidden[:-1]])
        unknown = len(segment) - len(states)  # 1 where nothing stands before the segment
        information = np.full(len(segment), math.log(self._scorer.vocab_size))
        if len(states):
            scores = target_scores(states, targets[unknown:], self._scorer)
            information[unknown:] = -scores.log_probs.cpu().double().numpy()
        return information

    @torch.no_grad()
    def append(self, ids: Ints) -> None:
        """Add kept tokens [K] to the prefix."""
        if len(ids):
            self._last = self._read(ids)[-1:]
            self._cached_ids = np.concatenate([self._cached_ids, ids])

    def _read(self, ids: Ints) -> Tensor:
        """Read ids [S] after the prefix: hidden states [S, d]; the cache grows by them."""
        first, scorer = len(self._cached_ids), self._scorer
        check_attention_window(scorer.model.config, first + len(ids))
        places = torch.arange(first, first + len(ids), device=scorer.device)[None]
        out = scorer.trunk(
            inputs_embeds=scorer.embed(torch.from_numpy(ids).to(scorer.device)[None]),
            attention_mask=places.new_ones(1, first + len(ids)),
            position_ids=places,
            past_key_values=self._cache,
            use_cache=True,
        )
        hidden: Tensor = out.last_hidden_state[0]
        return hidden
