"""EHPC: the tokens that a few probed heads of an early layer look at the least are deleted.

A worked example, with 2 last queries, a kernel of 2 and a budget of 4 of 6::

    attention of the heads    .4  .1  .0  .2          of the last queries, summed over heads
    pooled                    .2  .25 .05 .1          with the token before; 0 before the text
    stay before all others                    4  5    the last queries' own tokens
    kept                      0   1           4  5

Source: Fei et al., "Efficient Prompt Compression with Evaluator Heads for Long-Context Transformer
Inference" (NeurIPS 2025). Differences: docs/baselines-differences.md.

Shapes: T tokens, n of them scored, W last queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import avg_pool1d
from transformers.cache_utils import DynamicCache

from umim_core.backbone.attention_masks import eager_attention
from umim_core.backbone.backbone import Backbone
from umim_core.backbone.split import layer_range
from umim_core.baselines.methods import Text, TokenReducer, highest, read_behind
from umim_core.errors import BackboneError, require
from umim_core.task_sets.prompt_filling import ADJECTIVES, NOUNS, inserted, sentences
from umim_core.text.token_ids import Ints

KERNEL: Final = 32
_KERNELS: Final = 8  # that fit into the scored tokens, at least
QUERIES: Final = 16
DEPTHS: Final = tuple(tenth / 10 for tenth in range(1, 10))
PROBE_TOKENS: Final = 512
EARLY: Final = 0.6  # of the layers; the paper's three models have theirs within the first 0.57
HEADS: Final = 4  # one of so many is taken; the paper takes 8 of 32
_NEEDLE: Final = "The {key} locker opens with the code {value}."  # of no task that is measured
_QUESTION: Final = (
    "\nWhich code opens the {key} locker that the text above speaks of? "
    "The {key} locker opens with the code"
)


@dataclass(frozen=True)
class EvaluatorHeads:
    layer: int  # from 0
    heads: tuple[int, ...]  # rising


@torch.no_grad()
def last_weights(layers: Backbone, ids: Ints, queries: int) -> Tensor:
    """Return the attention weights of the last queries W, 1 .. T, in every layer [L, A, W, T].

    ``layers`` are the first ones of a backbone. What stands before the queries is read without
    weights, by the backbone's own attention.
    """
    layers.check_window(len(ids))
    tokens, cache = torch.from_numpy(ids).to(layers.device), DynamicCache()
    if queries < len(ids):
        read_behind(layers, tokens[:-queries], cache)
    with eager_attention(layers.model):
        _, weights = read_behind(layers, tokens[-queries:], cache, attention=True)
    return torch.stack(weights)


# Of the backbones of this process: a table asks for every shard of its questions.
_FOUND: Final[dict[tuple[str, str, torch.dtype], EvaluatorHeads]] = {}


def find_evaluator_heads(backbone: Backbone) -> EvaluatorHeads:
    key = backbone.fingerprint, backbone.tokenizer_fingerprint, backbone.dtype
    if key not in _FOUND:
        layers = layer_range(backbone, 0, max(1, round(EARLY * backbone.num_layers)))
        _FOUND[key] = best_heads(needle_mass(layers, probes(backbone)))
    return _FOUND[key]


def best_heads(mass: NDArray[np.float64]) -> EvaluatorHeads:
    """Return the layer with the most mass, and the quarter of its heads that has the most of it.

    The mass is the attention on needles, per layer and head [L, A].
    """
    layer = int(mass.sum(axis=1).argmax())
    best = np.argsort(-mass[layer], kind="stable")[: max(1, mass.shape[1] // HEADS)]
    return EvaluatorHeads(layer, tuple(sorted(best.tolist())))


@dataclass(frozen=True)
class Probe:
    ids: Ints  # of a text with a question about a needle [T]
    needle: slice  # its tokens


def needle_mass(layers: Backbone, texts: Iterator[Probe]) -> NDArray[np.float64]:
    """Return the attention of the last queries on needles, per layer and head [L, A].

    It is the sum over the needle's tokens, averaged over queries and texts.
    """
    masses = []
    for text in texts:
        weights = last_weights(layers, text.ids, min(QUERIES, len(text.ids)))
        masses.append(weights[..., text.needle].double().sum(dim=-1).mean(dim=-1).cpu().numpy())
    mean: NDArray[np.float64] = np.mean(masses, axis=0)
    return mean


def probes(backbone: Backbone) -> Iterator[Probe]:
    """Yield one text per depth, of as many tokens as the backbone has positions, 512 at most."""
    room = min(PROBE_TOKENS, backbone.max_positions or PROBE_TOKENS)
    for number, depth in enumerate(DEPTHS):
        rng = Random(f"evaluator heads/{number}")
        key = f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"
        needle = f" {_NEEDLE.format(key=key, value=rng.randrange(10**6, 10**7))}"
        question = backbone.encode(_QUESTION.format(key=key))
        least = len(question) + len(backbone.encode(needle))
        rule = "a probe of evaluator heads must have room for a needle and its question"
        value = f"{least} tokens, {backbone.name} has {room} positions"
        require(least <= room, BackboneError, rule, value, "Use another backbone or baseline.")
        filler, used = list[str](), least
        for sentence in sentences(rng):
            used += len(backbone.encode(f" {sentence}"))
            if used > room:
                break
            filler.append(f" {sentence}")
        texts = inserted(filler, [needle], [depth])
        parts = [backbone.encode(text) for text in texts] + [question]
        place = texts.index(needle)
        start = sum(map(len, parts[:place]))
        ids = np.array([token for part in parts for token in part], dtype=np.int64)
        yield Probe(ids, slice(start, start + len(parts[place])))


@dataclass(frozen=True)
class EHPC(TokenReducer):
    """Keep the tokens that evaluator heads look at from the end of the text."""

    scorer: Backbone
    heads: EvaluatorHeads
    queries: int = QUERIES
    kernel: int = KERNEL

    @cached_property
    def layers(self) -> Backbone:
        return layer_range(self.scorer, 0, self.heads.layer + 1)

    def keep(self, text: Text, budget: int) -> Ints:
        return highest(self.scores(text), text.protected, budget)

    def scores(self, text: Text) -> NDArray[np.float64]:
        """Return a score per token [T]; those of the last queries are above all, and rise.

        Last queries are at most half of the text. A text that does not fit the model's positions is
        read in parts, the last queries behind each.
        """
        queries = min(self.queries, len(text.ids) // 2)
        seen, last = text.ids[:-queries], text.ids[-queries:]
        room = max(1, (self.scorer.max_positions or len(text.ids)) - queries)
        parts = [self._mass(seen[i : i + room], last) for i in range(0, len(seen), room)]
        pooled = pool(np.concatenate(parts), min(self.kernel, max(1, len(seen) // _KERNELS)))
        above = len(self.heads.heads) + np.arange(1.0, queries + 1)
        return np.concatenate([pooled, above])

    def _mass(self, seen: Ints, last: Ints) -> NDArray[np.float64]:
        """Return the attention of last queries [W] on what stands before [n], heads summed."""
        weights = last_weights(self.layers, np.concatenate([seen, last]), len(last))
        mine = weights[self.heads.layer, list(self.heads.heads), :, : len(seen)].double()
        return mine.mean(dim=1).sum(dim=0).cpu().numpy()


def pool(scores: NDArray[np.float64], kernel: int) -> NDArray[np.float64]:
    """Average scores [n] over a kernel around each; beyond both ends they count as 0.

    A kernel of k takes k // 2 tokens before, the token itself and those behind up to k.
    """
    row = torch.from_numpy(scores)[None]
    pooled = avg_pool1d(row, kernel, stride=1, padding=kernel // 2)[0, : len(scores)]
    return pooled.numpy()
