"""Protocols of baselines: token reducers, segmenters with a span merger, cache policies.

===================  =========================  =================================================
a method is          it decides                 what it saves
===================  =========================  =================================================
``TokenReducer``     which raw tokens stay      prefill and KV cache
``MergedSpans``      which spans become one     prefill and KV cache
                     embedding, and which
``EvictedColumns``   which columns of the KV    KV cache; the prefill is whole
                     cache survive a forward
===================  =========================  =================================================

Baselines by name stand in ``registry``.

How many tokens or columns stay is not the method's choice. Its budget is the number of units that
the merge rules leave of the same text, so all methods of a table have the same token reduction,
text by text; or what a target leaves of its tokens (``TargetReduction``). Policies that ignore the
budget are the full cache, which the others are compared with, and span eviction, which follows the
rules. With T = 5, a protected first token, scores that a token reducer gives, and a budget of 3::

    ids       <s>   a    b    c    d
    scores          2    1    2    1        the highest stay; of equal ones the first
    kept      <s>   a         c             2 dropped, token reduction 2 / 5

Shapes: T raw tokens, K kept, H key/value heads, A attention heads, L columns, W columns of a
forward, D head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import DynamicCache

from umim_core.backbone.backbone import Backbone
from umim_core.backbone.key_rotation import KeyRotation
from umim_core.errors import ConfigError, require
from umim_core.merging.likelihood import TokenScores
from umim_core.merging.module import Pooling
from umim_core.merging.packing import Segmenter
from umim_core.text.token_ids import Ints

ScoreEndings = Callable[[Ints, Sequence[Ints], Backbone, int], list[TokenScores]]


@dataclass(frozen=True)
class Text:
    """A text whose tokens are to be reduced."""

    ids: Ints  # raw ones [T]
    protected: NDArray[np.bool_]  # which of them must stay [T]
    question: Ints  # raw ids [Q] of the question that it asks; none if it is not known


class TokenReducer(ABC):
    """A method that deletes tokens of the prompt: it chooses which raw tokens of a text stay."""

    @abstractmethod
    def keep(self, text: Text, budget: int) -> Ints:
        """Return the tokens that stay: indices [budget] (int64), rising, protected ones among them.

        The budget is 1 .. T, and as many as are protected at least; published forms keep about as
        many. The same text and budget give the same ones.
        """


@dataclass(frozen=True)
class HeldColumns:
    """The KV cache of one layer after a forward, for one text."""

    layer: int  # from 0
    keys: Tensor  # [H, L, D]; the forward wrote the last W columns
    attention: Tensor | None  # of the forward's queries [A, W, L], if the policy reads it


class CachePolicy(ABC):
    """Chooses which columns of a KV cache survive a forward; one object per text.

    It is asked after each forward, layer by layer, and may remember what it saw.
    """

    reads_attention: ClassVar[bool] = False  # eager attention is slower
    # Turns the keys that stay to their positions inside the cache; None leaves all columns at the
    # positions of their tokens in the text.
    rotation: KeyRotation | None = None

    @abstractmethod
    def survivors(self, held: HeldColumns, budget: int) -> Tensor:
        """Return the columns of one layer that stay, of which ``budget`` may, at least 1.

        Indices [H, K] (int64) rise along a head; K is the same for all layers.
        """


@dataclass(frozen=True)
class MergedSpans:
    """A method that replaces spans by one embedding each, as UMIM does."""

    segmenter: Segmenter
    merger: Pooling | None  # None: the module of the checkpoint in whose place it stands


@dataclass(frozen=True)
class EvictedColumns:
    """A method that drops columns of the KV cache."""

    new_policy: Callable[[Ints], CachePolicy]  # of a text, given its raw ids [T]
    age: int | None = None  # tokens after which spans leave the cache (span eviction)
    # Scores continuations of a context [T] under a budget of its columns while columns go before
    # the prompt is read to its end; None where they go behind it.
    score: ScoreEndings | None = None


Method = TokenReducer | MergedSpans | EvictedColumns


@dataclass(frozen=True)
class TargetReduction:
    """A token reduction that is asked for: of T tokens round(target * T) go, at most all but one.

    With a target of 0.14, 50 tokens lose 7, 10 lose 1 and 3 lose none. Halves are rounded to the
    even number.
    """

    target: float

    def __post_init__(self) -> None:
        share: object = self.target
        rule = "a target token reduction must lie above 0 and below 1"
        remedy = "Give a share of the tokens, such as 0.14."
        require(isinstance(share, float) and 0.0 < share < 1.0, ConfigError, rule, share, remedy)

    def stays(self, tokens: int) -> int:
        return max(1, tokens - round(self.target * tokens))

    def fit(self, ids: Ints, room: int) -> tuple[Ints, int]:
        """Drop leading ids [T] until what stays fits the room, 1 at least; return both."""
        while (over := self.stays(len(ids)) - room) > 0:
            ids = ids[over:]  # so many fewer tokens lower what stays by at most as much
        return ids, self.stays(len(ids))


def reduce_tokens(reducer: TokenReducer, text: Text, budget: int) -> Ints:
    """Return the indices [K] (int64), rising, of the tokens of a text that stay.

    The budget is 1 .. T, or 0 of an empty text. The reducer is not asked where all tokens stay.
    More stay where more are protected, and of a published form.
    """
    tokens = len(text.ids)
    assert budget <= tokens  # noqa: S101  the caller's
    count = max(budget, int(text.protected.sum()))
    return np.arange(tokens) if count == tokens else reducer.keep(text, count)


def read_behind(
    backbone: Backbone,
    ids: Tensor,
    cache: DynamicCache,
    first: int | None = None,
    *,
    attention: bool = False,
) -> tuple[Tensor, list[Tensor]]:
    """Read ids [W] of one text behind what a cache holds of it; the cache grows by them.

    Their positions count from ``first``, the columns of the cache if it is None. Returned are the
    hidden states [W, d], and the weights [A, W, L] of every layer where ``attention`` is asked for,
    which must be eager then.
    """
    columns = cache.get_seq_length()
    start = columns if first is None else first
    positions = torch.arange(start, start + len(ids), device=ids.device)[None]
    out = backbone.trunk(
        inputs_embeds=backbone.embed(ids[None]),
        attention_mask=positions.new_ones(1, columns + len(ids)),  # all of it is one text
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        output_attentions=attention,
    )
    return out.last_hidden_state[0], [weights[0] for weights in out.attentions or ()]


def highest(scores: NDArray[np.float64], protected: NDArray[np.bool_], budget: int) -> Ints:
    """Return the protected tokens and those of the highest scores; of equal ones the first.

    Scores and protection are per token [T]. At most ``budget`` are protected; their scores do not
    count. The indices [budget] (int64) rise.
    """
    order = np.lexsort((np.arange(len(scores)), -scores, ~protected))
    return np.sort(order[:budget])
