from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from support.reduced_texts import (
    WORDS,
    given,
    word_classifier,
    word_encoder,
)
from umim_core.backbone.backbone import Backbone
from umim_core.baselines.ehpc import EHPC, find_evaluator_heads
from umim_core.baselines.lexical_units import phrases, sentences
from umim_core.baselines.llmlingua import LLMLingua
from umim_core.baselines.llmlingua2 import LLMLingua2
from umim_core.baselines.methods import TokenReducer, reduce_tokens
from umim_core.baselines.registry import BASELINES
from umim_core.baselines.selective_context import SelectiveContext
from umim_core.baselines.sentence_cosine import BackboneEncoder, SentenceCosine
from umim_core.baselines.truncation import Truncation

METHODS: dict[str, Callable[[Backbone], TokenReducer]] = {
    "truncation": lambda backbone: Truncation(),
    "selective-context": SelectiveContext,
    "selective-context-phrase": lambda backbone: SelectiveContext(backbone, phrases),
    "selective-context-sentence": lambda backbone: SelectiveContext(backbone, sentences),
    "llmlingua": lambda backbone: LLMLingua(backbone, segment=25),
    "llmlingua-published": lambda backbone: LLMLingua(backbone, 10, form="published"),
    "llmlingua2": lambda backbone: LLMLingua2(
        word_classifier(), backbone.require_tokenizer(), forced=("what?",)
    ),
    "sentence-cosine": lambda backbone: SentenceCosine(
        BackboneEncoder(backbone), backbone.require_tokenizer()
    ),
    "cpc": lambda backbone: SentenceCosine(
        word_encoder(backbone.require_tokenizer()), backbone.require_tokenizer()
    ),
    "ehpc": lambda backbone: EHPC(backbone, find_evaluator_heads(backbone)),
}


@pytest.mark.parametrize("name", METHODS)
def test_budgets_are_exact_protected_tokens_stay_and_repeats_agree(
    name: str, backbone: Backbone, rng: np.random.Generator
) -> None:
    reducer = METHODS[name](backbone)
    for tokens in (1, 5, 90):  # the last is longer than the 64 positions
        ids = rng.integers(1, len(WORDS), tokens)
        for budget in sorted({1, tokens // 2 + 1}):
            protected = rng.permutation(tokens)[: rng.integers(0, 3)]
            text = given(ids, *protected, question="what? cat")
            found = reduce_tokens(reducer, text, budget)
            if reducer.exact:
                assert len(found.kept) == max(budget, len(protected))
            assert found.shortfall == len(found.kept) - budget
            assert set(protected.tolist()) <= set(found.kept.tolist())
            assert reduce_tokens(reducer, text, budget).kept.tolist() == found.kept.tolist()


def test_every_registered_reducer_is_in_the_matrix() -> None:
    merging = {name for name in BASELINES if name.endswith(("-embedding", "-spans", "-neighbours"))}
    prompt = {name for name, baseline in BASELINES.items() if baseline.side == "prompt"}
    assert prompt - merging == set(METHODS)
