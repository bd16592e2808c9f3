"""All baselines by name: what each saves, a line for people, and how it is made.

A new one is a file of this package with a reducer, a segmenter or a policy, and an entry here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

from umim_core.backbone.backbone import Backbone
from umim_core.baselines.ehpc import EHPC, find_evaluator_heads
from umim_core.baselines.evicted_spans import FullCache, evicted_spans
from umim_core.baselines.h2o import HeavyHitters, score_masked
from umim_core.baselines.lexical_units import phrases, sentences
from umim_core.baselines.llmlingua import LLMLingua
from umim_core.baselines.llmlingua2 import llmlingua2, published_classifier
from umim_core.baselines.methods import EvictedColumns, MergedSpans, Method
from umim_core.baselines.other_merges import (
    RandomSpans,
    SimilarNeighbours,
    mean_embedding,
    sum_embedding,
)
from umim_core.baselines.selective_context import SelectiveContext
from umim_core.baselines.sentence_cosine import cpc, sentence_cosine, trained_encoder
from umim_core.baselines.streaming_llm import streaming_llm
from umim_core.baselines.truncation import Truncation
from umim_core.errors import look_up
from umim_core.merging.module import Pooling, last_embedding
from umim_core.rules.matcher import Matcher


@dataclass(frozen=True)
class Baseline:
    side: Literal["prompt", "cache"]  # saves prefill and KV cache, or the KV cache alone
    line: str  # what it does
    make: Callable[[Backbone, Matcher], Method]
    # Names the model of its own that it would choose by now, as name@commit, and loads nothing.
    own_model: Callable[[], str] | None = None


_of_prompt = partial(Baseline, "prompt")
_of_cache = partial(Baseline, "cache")
BASELINES: Final[dict[str, Baseline]] = {
    "cpc": _of_prompt(
        "Delete the sentences least like the question by the encoder UMIM_CPC_ENCODER names.",
        lambda backbone, matcher: cpc(backbone),
        trained_encoder,
    ),
    "ehpc": _of_prompt(
        "Delete the tokens that a few probed heads of an early layer look at the least.",
        lambda backbone, matcher: EHPC(backbone, find_evaluator_heads(backbone)),
    ),
    "last-embedding": _of_prompt(
        "Replace each span that the rules match by its last token embedding.",
        lambda backbone, matcher: MergedSpans(matcher, Pooling(last_embedding)),
    ),
    "llmlingua": _of_prompt(
        "Delete passages, then tokens, that the backbone finds unsurprising after what was kept.",
        lambda backbone, matcher: LLMLingua(backbone),
    ),
    "llmlingua-published": _of_prompt(
        "Delete tokens as package llmlingua does, about as many as the budget asks for.",
        lambda backbone, matcher: LLMLingua(backbone, form="published"),
    ),
    "llmlingua2": _of_prompt(
        "Delete the words that the published token classifier would not preserve.",
        lambda backbone, matcher: llmlingua2(backbone),
        published_classifier,
    ),
    "mean-embedding": _of_prompt(
        "Replace each span that the rules match by the mean of its token embeddings.",
        lambda backbone, matcher: MergedSpans(matcher, Pooling(mean_embedding)),
    ),
    "random-spans": _of_prompt(
        "Merge random spans, as many and as long as the rules' own, by the checkpoint's module.",
        lambda backbone, matcher: MergedSpans(RandomSpans(backbone, matcher), None),
    ),
    "selective-context": _of_prompt(
        "Delete the tokens with the least self-information under the backbone.",
        lambda backbone, matcher: SelectiveContext(backbone),
    ),
    "selective-context-phrase": _of_prompt(
        "Delete the phrases with the least self-information under the backbone.",
        lambda backbone, matcher: SelectiveContext(backbone, phrases),
    ),
    "selective-context-sentence": _of_prompt(
        "Delete the sentences with the least self-information under the backbone.",
        lambda backbone, matcher: SelectiveContext(backbone, sentences),
    ),
    "sentence-cosine": _of_prompt(
        "Delete the sentences whose embeddings by the backbone are the least like the question's.",
        lambda backbone, matcher: sentence_cosine(backbone),
    ),
    "similar-neighbours": _of_prompt(
        "Replace neighbouring tokens of the most similar embeddings by their mean.",
        lambda backbone, matcher: MergedSpans(
            SimilarNeighbours(backbone, matcher), Pooling(mean_embedding)
        ),
    ),
    "sum-embedding": _of_prompt(
        "Replace each span that the rules match by the sum of its token embeddings.",
        lambda backbone, matcher: MergedSpans(matcher, Pooling(sum_embedding)),
    ),
    "truncation": _of_prompt(
        "Keep the end of the text and what is protected; asks neither backbone nor rules.",
        lambda backbone, matcher: Truncation(),
    ),
    "full-cache": _of_cache(
        "Keep every column of the KV cache: the base model itself.",
        lambda backbone, matcher: EvictedColumns(lambda ids: FullCache()),
    ),
    "h2o": _of_cache(
        "Drop the columns that queries attended to the least, but for the newest ones.",
        lambda backbone, matcher: EvictedColumns(lambda ids: HeavyHitters()),
    ),
    "h2o-masked-prompt": _of_cache(
        "Drop columns as h2o, in likelihoods while the prompt is read, as its code for lm-eval.",
        lambda backbone, matcher: EvictedColumns(lambda ids: HeavyHitters(), score=score_masked),
    ),
    **{
        f"span-eviction-{age}": _of_cache(
            "Drop the columns of spans that are old enough, but for their last ones.",
            partial(evicted_spans, age=age),
        )
        for age in (0, 16, 64)
    },
    "streaming-llm": _of_cache(
        "Keep four attention sinks and the newest columns, turned to positions inside the cache.",
        partial(streaming_llm, restart=True),
    ),
    "streaming-llm-kept-positions": _of_cache(
        "Keep four attention sinks and the newest columns at the positions of their tokens.",
        partial(streaming_llm, restart=False),
    ),
}


def find_baseline(name: str) -> Baseline:
    return look_up(BASELINES, name, "a baseline", "A new one is an entry of umim_core/baselines.")


def own_model(name: str) -> str | None:
    """Return the model of its own that a baseline would choose by now; the hub is asked."""
    baseline = BASELINES.get(name)  # unknown names are refused where recipes are read
    return None if baseline is None or baseline.own_model is None else baseline.own_model()
