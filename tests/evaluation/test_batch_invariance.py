"""Scores independent of the batch size, contexts and whole texts read once, by family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from lm_eval.api.instance import Instance

from support.engine_matrix import module_for
from support.tiny_models import random_model, tiny_config
from tests.evaluation.conftest import TEXT, byte_tokenizer
from umim_core.backbone.backbone import Backbone, wrap_backbone
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.config.form import UnitPositions
from umim_core.evaluation.harness import UmimLM
from umim_core.merging.merged_model import MergedModel
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet

QUESTIONS = ["the cat sat on the", "by the sea the old cat house", "", TEXT]
ANSWERS = [" mat", " log near the sea", " dog", " house by the old"]
TOLERANCE = 2e-5  # nats of a sum over an answer, float32
Load = Callable[..., UmimLM]
"""Makes the model: batch size, what is merged, unit positions, a baseline and its budget."""


@pytest.fixture(params=["llama", "gpt2"])
def load(request: pytest.FixtureRequest) -> Load:
    fast = byte_tokenizer()
    config = tiny_config(request.param, vocab_size=len(fast), max_position_embeddings=64)
    backbone: Backbone = wrap_backbone(random_model(config), fast, name="tiny")
    ids = backbone.encode(TEXT)
    spans = {tuple(ids[i : i + n]) for n, i in ((2, 1), (3, 4), (2, 8), (4, 12), (2, 0))}
    rules = RuleSet.from_spans(spans, tokenizer_fingerprint=backbone.tokenizer_fingerprint)

    def make(
        batch_size: int, merge: str, positions: UnitPositions = "compact", **method: Any
    ) -> UmimLM:
        model = MergedModel(backbone, module_for(backbone), Matcher(rules), positions)
        return UmimLM(Checkpoint.of(model), merge, backbone, batch_size=batch_size, **method)

    return make


def likelihoods() -> list[Instance]:
    pairs = [(question, answer) for question in QUESTIONS for answer in ANSWERS]
    return [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]


@pytest.mark.parametrize("positions", ["compact", "preserved"])
@pytest.mark.parametrize("merge", ["prompt", "all"])
def test_likelihoods_of_batches_of_one_three_and_eight_are_the_same(
    load: Load, merge: str, positions: UnitPositions
) -> None:
    one, *others = (load(n, merge, positions).loglikelihood(likelihoods()) for n in (1, 3, 8))
    for other in others:
        assert [x for x, _ in other] == pytest.approx([x for x, _ in one], abs=TOLERANCE)
        assert [greedy for _, greedy in other] == [greedy for _, greedy in one]


@pytest.mark.parametrize("merge", ["prompt", "all"])
def test_whole_texts_and_generated_ones_do_not_depend_on_the_batch(load: Load, merge: str) -> None:
    texts = [TEXT * 2, "the cat", TEXT]
    rolling = [Instance("loglikelihood_rolling", {}, (text,), i) for i, text in enumerate(texts)]
    settings = {"until": ["."], "max_gen_toks": 6, "do_sample": False}
    prompts = [
        Instance("generate_until", {}, (text, settings), i) for i, text in enumerate(QUESTIONS[:3])
    ]
    one, eight = load(1, merge), load(8, merge)
    expected = one.loglikelihood_rolling(rolling)
    assert eight.loglikelihood_rolling(rolling) == pytest.approx(expected, abs=1e-4)
    assert eight.generate_until(prompts) == one.generate_until(prompts)


@pytest.mark.parametrize(
    "method",
    [
        {"method": "selective-context", "target_tr": 0.3},
        {"method": "truncation", "raw_tail": 2},
        {"method": "span-eviction-0"},
    ],
    ids=lambda method: str(method["method"]),
)
def test_answers_and_texts_of_a_baseline_do_not_depend_on_the_batch(
    load: Load, method: dict[str, Any]
) -> None:
    settings = {"until": ["."], "max_gen_toks": 4, "do_sample": False}
    prompts = [
        Instance("generate_until", {}, (text, settings), i) for i, text in enumerate(QUESTIONS)
    ]
    one, eight = (load(size, "prompt", **method) for size in (1, 8))
    expected = [score for score, _ in one.loglikelihood(likelihoods())]
    found = [score for score, _ in eight.loglikelihood(likelihoods())]
    assert found == pytest.approx(expected, abs=TOLERANCE)
    assert eight.generate_until(prompts) == one.generate_until(prompts)
    assert one.realised == eight.realised
