"""Protocols of baselines: token reducers, segmenters with a span merger, cache policies.

===================  =========================  =================================================
a method is          it decides                 what it saves
===================  =========================  =================================================
``ReducedTokens``    which raw tokens stay      prefill and KV cache
``MergedSpans``      which spans become one     prefill and KV cache
                     embedding, and which
``EvictedColumns``   which columns of the KV    KV cache; the prefill is whole
                     cache survive a forward
===================  =========================  =================================================

A file of this package adds its method by ``@BASELINES.add(name)`` over a function that makes it for
a backbone and a matcher: recipes and lm-eval find it by the name, and ``umim baselines`` shows the
first line of the function's docstring. A method that chooses by a model of its own adds, by
``@OWN_MODELS.add`` under the same name, a function that names the model, for the keys of results.

How many tokens or columns stay is not the method's choice. Its budget is the number of units that
the merge rules leave of the same text, so all methods of a table have the same token reduction,
text by text; or what a target leaves of its tokens (``reduction.TargetReduction``). Policies that
ignore the budget are the full cache, which the others are compared with, and span eviction, which
follows the rules.

Shapes: T raw tokens, K kept, H key/value heads, A attention heads, L columns, W columns of a
forward, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import getdoc
from typing import ClassVar, Final, Literal, Protocol, get_type_hints

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from umim_core.backbone.backbone import Backbone
from umim_core.backbone.key_rotation import KeyRotation
from umim_core.merging.likelihood import TokenScores
from umim_core.merging.packing import Segmenter, SpanMerger
from umim_core.registry import Registry
from umim_core.rules.matcher import Matcher

Ints = NDArray[np.int64]
ScoreEndings = Callable[[Ints, Sequence[Ints], Backbone, int], list[TokenScores]]
Side = Literal["prompt", "cache"]


@dataclass(frozen=True)
class Text:
    """A text whose tokens are to be reduced.

    Attributes:
        ids: Raw ids [T] (int64).
        protected: Tokens that must stay [T] (bool).
        question: Raw ids [Q] (int64) of the question that it asks; empty if none is known.
    """

    ids: Ints
    protected: NDArray[np.bool_]
    question: Ints


class TokenReducer(Protocol):
    """Chooses which raw tokens of a text stay."""

    @property
    def exact(self) -> bool:
        """Whether exactly the budget stays; published forms keep about as many."""
        ...

    def keep(self, text: Text, budget: int) -> Ints:
        """Choose tokens.

        Args:
            text: The text.
            budget: Tokens that stay, 1 .. T, never fewer than are protected.

        Returns:
            Indices [budget] (int64), rising, of a reducer that is not exact [1 .. T]; every
            protected token is among them. The same text and budget give the same ones.
        """
        ...


@dataclass(frozen=True)
class HeldColumns:
    """The KV cache of one layer after a forward, for one text.

    Attributes:
        layer: Index of the layer.
        keys: Keys [H, L, D]; the forward wrote the last W columns.
        values: Values [H, L, D].
        tokens: Number in the text of the token that each column holds [H, L] (int64), rising. Where
            the policy has a rotation, the column's position in the cache is another.
        attention: Weights of the forward's queries [A, W, L]; None unless the policy reads them.
    """

    layer: int
    keys: Tensor
    values: Tensor
    tokens: Tensor
    attention: Tensor | None


class CachePolicy(Protocol):
    """Chooses which columns of a KV cache survive a forward; one object per text.

    It is asked after each forward, layer by layer, and may remember what it saw.

    Attributes:
        reads_attention: Whether it needs attention weights (eager attention is slower).
        rotation: Turns the keys that stay to their positions inside the cache; None leaves all
            columns at the positions of their tokens in the text.
    """

    reads_attention: ClassVar[bool]

    @property
    def rotation(self) -> KeyRotation | None:
        """See the attributes."""
        ...

    def survivors(self, held: HeldColumns, budget: int) -> Tensor:
        """Choose columns of one layer.

        Args:
            held: The layer's cache.
            budget: Columns that may stay, at least 1.

        Returns:
            Indices [H, K] (int64), rising along a head, K the same for all layers.
        """
        ...


@dataclass(frozen=True)
class ReducedTokens:
    """A method that deletes tokens of the prompt.

    Attributes:
        reducer: Chooses the tokens that stay.
        model: A model of its own that it chooses by, as name@commit; None for the backbone.
    """

    side: ClassVar[Side] = "prompt"
    reducer: TokenReducer
    model: str | None = None


@dataclass(frozen=True)
class MergedSpans:
    """A method that replaces spans by one embedding each, as UMIM does.

    Attributes:
        segmenter: Cuts a text into units.
        merger: Merges spans; None for the module of the checkpoint in whose place it stands.
    """

    side: ClassVar[Side] = "prompt"
    model: ClassVar[None] = None
    segmenter: Segmenter
    merger: SpanMerger | None


@dataclass(frozen=True)
class EvictedColumns:
    """A method that drops columns of the KV cache.

    Attributes:
        new_policy: Makes the policy of a text, given its raw ids [T].
        age: Tokens after which spans leave the cache (span eviction); None of other policies.
        score: Scores continuations of a context [T] under a budget of its columns while columns go
            before the prompt is read to its end; None where they go behind it.
    """

    side: ClassVar[Side] = "cache"
    model: ClassVar[None] = None
    new_policy: Callable[[Ints], CachePolicy]
    age: int | None = None
    score: ScoreEndings | None = None


Method = ReducedTokens | MergedSpans | EvictedColumns
MakeMethod = Callable[[Backbone, Matcher], Method]
BASELINES: Final = Registry[MakeMethod](__package__, "baseline")
OWN_MODELS: Final = Registry[Callable[[], str]](__package__, "baseline with a model of its own")
"""By name of a baseline: returns the model of its own, as name@commit, and loads nothing."""


def own_model(name: str) -> str | None:
    """Return the model of its own that a baseline would choose by now, as name@commit.

    None for a baseline that chooses by the backbone. Nothing is loaded; the hub is asked.

    Raises:
        BackboneError: If the commit is not known here.
    """
    return OWN_MODELS.find(name)() if name in OWN_MODELS.names() else None


@dataclass(frozen=True)
class ListedBaseline:
    """A registered baseline.

    Attributes:
        name: As recipes and lm-eval find it.
        side: ``prompt`` saves prefill and KV cache, ``cache`` saves KV cache alone.
        line: What it does, the first line of its function's docstring.
    """

    name: str
    side: Side
    line: str


def side_of(name: str) -> Side:
    """Return the side of a baseline; loads no model.

    Raises:
        ConfigError: If there is none of that name.
    """
    side: Side = get_type_hints(BASELINES.find(name))["return"].side
    return side


def listed_baselines() -> list[ListedBaseline]:
    """Return all baselines, those of the prompt first, each side by name; loads no model."""
    listed = []
    for name in BASELINES.names():
        line = (getdoc(BASELINES.find(name)) or "").partition("\n")[0]
        listed.append(ListedBaseline(name, side_of(name), line))
    return sorted(listed, key=lambda one: (one.side != "prompt", one.name))
