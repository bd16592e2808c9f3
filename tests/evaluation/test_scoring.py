"""Scorers of requests, of baselines, too, against independent computations."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance

from support.engine_matrix import build, module_for
from support.merged_models import fresh_model, placed
from support.ngram_oracle import filtered
from support.tiny_models import random_backbone
from tests.evaluation.conftest import generation, likelihoods
from umim_core.backbone.backbone import Backbone
from umim_core.baselines.evicted_spans import FullCache
from umim_core.baselines.methods import EvictedColumns, Text, TokenReducer, highest
from umim_core.baselines.truncation import Truncation
from umim_core.config.form import Merge, UnitPositions
from umim_core.config.rule_options import Containment, Overlap
from umim_core.evaluation.generated_rows import GeneratedText
from umim_core.evaluation.harness import UmimLM
from umim_core.evaluation.scoring import EvictedScorer, ReducedScorer, Request, Scorer, _parts
from umim_core.inference.engine import Engine
from umim_core.inference.options import GenerateOptions
from umim_core.merging.likelihood import token_log_probs
from umim_core.merging.merged_model import MergedModel
from umim_core.mining.counting import count_ngrams
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet

LIMIT = 12


def scorer(scope: Merge, raw_tail: int = 0, positions: UnitPositions = "compact") -> Scorer:
    backbone = random_backbone("gpt2", vocab_size=20, hidden_size=8, max_position_embeddings=LIMIT)
    spans = [(1, 2), (3, 4, 5), (6, 7, 8, 9)]
    merged_model = fresh_model(backbone, spans, 0.2, unit_positions=positions)
    return Scorer(merged_model.reading(scope, raw_tail), LIMIT, scope)


def request(context: list[int], continuation: list[int]) -> Request:
    return Request(np.array(context, np.int64), np.array(continuation, np.int64))


def test_answers_to_one_context_of_the_same_parts_share_a_forward_in_their_order() -> None:
    model, forwards = scorer("prompt"), []
    shared = [1, 2, 11, 1, 2, 14, 15]
    requests = [request([1, 3], [4]), *(request(shared, [a, a + 1]) for a in (5, 6, 7))]
    requests += [replace(requests[1], parts=parts) for parts in ((), ((3, 5),))]
    together = model.score(requests, 8, forwards.append)
    assert forwards == [6]
    assert [score.sizes.context_units for score in together] == [2, 5, 5, 5, 7, 6]
    alone = [scorer("prompt").score([r], 1)[0].log_prob for r in requests]
    assert [s.log_prob for s in together] == pytest.approx(alone, abs=1e-5)
    [raw] = Scorer(model.merged_model.base(), LIMIT).score(requests[1:2], 1)
    assert together[4].log_prob == pytest.approx(raw.log_prob, abs=1e-5)  # nothing may merge
    assert abs(together[1].log_prob - raw.log_prob) > 1e-4


def test_continuations_share_a_row_where_that_costs_less(rng: np.random.Generator) -> None:
    def cost(columns: int) -> float:  # products of a block, and attention
        return 24 * width**2 * columns + 4 * width * columns**2

    joined = 0
    for _ in range(200):
        units, one, two = rng.integers(1, 200, 3).tolist()
        width = int(rng.integers(1, 32))
        together = cost(units + one + two) <= cost(units + one) + cost(units + two)
        assert (len(list(_parts([one, two], 8, units, width, 999))) == 1) == together
        joined += together
    assert 50 < joined < 150


@pytest.mark.parametrize("family", ["mistral", "gpt_neo"])
@pytest.mark.parametrize("wide", [False, True])  # whether an answer is beyond the window
def test_windows_and_positions_bound_what_shares_a_row(family: str, wide: bool) -> None:
    name = "window_size" if family == "gpt_neo" else "sliding_window"
    backbone = random_backbone(family, hidden_size=64, max_position_embeddings=40, **{name: 24})
    model = Scorer(MergedModel.without_merging(backbone), 40)
    context = list(range(1, 31 if wide else 13))
    requests = [request(context, [a, *range(1, 7)]) for a in range(9)]
    requests += [request([5, 6], [a, 7]) for a in range(3)]  # these share a row
    together = model.score(requests, 64)
    alone = [model.score([r], 1)[0].log_prob for r in requests]
    assert [s.log_prob for s in together] == pytest.approx(alone, abs=1e-4)


@pytest.mark.parametrize(
    ("scope", "positions"), [("prompt", "compact"), ("prompt", "preserved"), ("all", "preserved")]
)
@pytest.mark.parametrize("length", [LIMIT - 2, LIMIT - 1, LIMIT, 3 * LIMIT])
def test_inputs_at_the_limit_lose_leading_units(
    scope: Merge, length: int, positions: UnitPositions
) -> None:
    ids = np.array([6, 7, 8, 9, 10, 3, 4, 5] * 5)[:length]
    model = scorer(scope, positions=positions)
    starts, _ = model.merged_model.segment(ids)
    room = LIMIT - 1  # a continuation of two tokens feeds one
    taken = length - starts if positions == "preserved" else len(starts) - np.arange(len(starts))
    first = int(starts[taken <= room][0])
    [found] = model.score([Request(ids, np.array([10, 10]))], 1)
    [short] = model.score([Request(ids[first:], np.array([10, 10]))], 1)
    assert found == short
    assert model.total.tokens == 2 * (length - first + 2)
    plain = [10 + i % 9 for i in range(length)]  # no rule applies
    [found] = scorer(scope).score([request(plain, [3, 11])], 1)
    [cut] = scorer(scope).score([request(plain[-room:], [3, 11])], 1)
    assert found.log_prob == pytest.approx(cut.log_prob, abs=1e-6)


MATCHER = Matcher(RuleSet.from_spans([(1, 2), (3, 4, 5)]))
CONTEXT = np.array([1, 2, 9, 3, 4, 5, 7, 1, 2], dtype=np.int64)  # 9 tokens, 5 units
PROMPT = "the cat sat on the mat and the dog"
GREEDY = {"until": [], "max_gen_toks": 5, "do_sample": False}


@pytest.fixture(scope="module")
def umim(tiny_llama: Backbone) -> Scorer:
    return Scorer(fresh_model(tiny_llama, MATCHER.rules), 64)


def model_score(backbone: Backbone, context: list[int], ending: list[int]) -> float:
    """The backbone's own log-probability of an ending."""
    ids = torch.tensor([context + ending])
    with torch.no_grad():
        scores = backbone.model(input_ids=ids).logits[0, len(context) - 1 : -1].log_softmax(-1)
    return float(scores.gather(1, torch.tensor(ending)[:, None]).sum())


def test_a_budget_is_of_equal_saving_where_layers_below_the_depth_read_every_token(
    umim: Scorer, tiny_llama: Backbone
) -> None:
    inside = placed(umim.merged_model, "preserved", merge_depth=1)
    assert tiny_llama.num_layers == 2
    reduced = ReducedScorer(inside, 64, Truncation())
    assert reduced.fit(CONTEXT, 64)[1] == 7  # 9 tokens, 5 units: 4 saved by one layer of two
    assert reduced.fit(CONTEXT, 6)[1] <= 6
    evicted = EvictedScorer(inside, 64, EvictedColumns(lambda ids: FullCache()))
    assert evicted.budget(CONTEXT, 3) == 10


@dataclass(frozen=True)
class FirstTokens(TokenReducer):
    """Keeps the first tokens, and remembers the texts that it was given."""

    seen: list[Text] = field(default_factory=list)

    def keep(self, text: Text, budget: int) -> np.ndarray:
        self.seen.append(text)
        return highest(-np.arange(len(text.ids), dtype=float), text.protected, budget)


ASKED = [
    ("umim_arc_easy", "Question: {}\nAnswer:", "Answer:"),
    ("arc_easy", "Question: {}\nAnswer:", "Answer:"),
    ("umim_qmsum", "A meeting.\nQuery: {}\nAnswer:", "Answer:"),
    ("umim_ruler_1k", "Text. {} It is so as", "It is so as"),
]


@pytest.mark.parametrize(("task", "prompt", "cue"), ASKED, ids=[case[0] for case in ASKED])
def test_reducers_get_the_question_and_the_cue_stays(
    checkpoint_path: Path, task: str, prompt: str, cue: str
) -> None:
    question = "Why is the sky blue?"
    prefix = cue if task == "umim_ruler_1k" else ""
    document = {"question": question, "answer_prefix": prefix}
    model = UmimLM(checkpoint_path, method="truncation", dtype="float32", target_tr=0.5)
    reducer = FirstTokens()
    model.scorer.reducer = reducer
    context = prompt.format(question)
    for kind, argument in (("loglikelihood", " blue"), ("generate_until", GREEDY)):
        ask = getattr(model, kind)
        ask([Instance(kind, document, (context, argument), 0, (task, 0, 1))])
    assert len(reducer.seen) == 2
    for text in reducer.seen:
        assert model.backbone.decode(text.question.tolist()).strip() == question
        assert model.backbone.decode(text.ids[text.protected].tolist()).strip() == cue


@pytest.mark.parametrize("budget", [{}, {"target_tr": 0.4}])
def test_a_method_scores_and_generates_behind_what_stays(
    checkpoint_path: Path, budget: dict[str, Any]
) -> None:
    model = UmimLM(checkpoint_path, method="truncation", dtype="float32", **budget)
    context, answer = (model.backbone.encode(text) for text in (PROMPT, " mat"))
    stay = len(model.merged_model.segment(np.array(context))[0])
    if "target_tr" in budget:
        stay = len(context) - round(0.4 * len(context))
    assert stay < len(context)
    [(score, _)] = model.loglikelihood(likelihoods([(PROMPT, " mat")]))
    assert score == pytest.approx(model_score(model.backbone, context[-stay:], answer), abs=1e-4)
    [text] = model.generate_until(generation([PROMPT], **GREEDY))
    kept = torch.tensor([context[-stay:]])
    out = model.backbone.model.generate(kept, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert text == model.backbone.decode(out[0, stay:].tolist())
    assert isinstance(text, GeneratedText)
    assert text.reductions["prompt_tr"] == pytest.approx(1 - stay / len(context)) != 0.0
    info = model.get_model_info()["umim"]
    assert info["method"] == "truncation" and info.get("target_tr") == budget.get("target_tr")
    assert ("target_tr" in info) == ("target_tr" in budget)  # the key of a cache of answers
    assert info["context_token_reduction"] == pytest.approx(1 - stay / len(context))


def test_span_eviction_generates_as_the_engine_does(checkpoint_path: Path) -> None:
    model = UmimLM(checkpoint_path, method="span-eviction-0", dtype="float32")
    context = np.array(model.backbone.encode(PROMPT))
    [text] = model.generate_until(generation([PROMPT], **GREEDY))
    options = GenerateOptions(max_new_tokens=5, merge="none", span_eviction=0)
    [row] = Engine(model.merged_model).generate([context], options).rows
    assert text == model.backbone.decode(list(row.ids))
    found = model.realised
    assert found["cache_reduction"] == pytest.approx(1 - row.cache_lengths[0] / len(context))
    assert found["cache_reduction"] != 0.0 == found["token_reduction"]


VOCAB, LENGTH, POSITIONS = 3, 5, 16
POLICIES = list(product(get_args(Overlap), get_args(Containment), get_args(UnitPositions)))


@pytest.mark.parametrize(("overlap", "containment", "unit_positions"), POLICIES)
def test_scores_are_likelihoods_that_add_up_to_1(
    overlap: Overlap, containment: Containment, unit_positions: UnitPositions
) -> None:
    """Over all texts, and over all continuations of a context, cut or not."""
    ids = np.random.default_rng(1).choice(VOCAB, 400, p=[0.6, 0.3, 0.1]).astype(np.int32)
    counts = count_ngrams(ids, np.array([0, len(ids)]), 6, longest=5)
    rules = filtered(counts, overlap=overlap, containment=containment)  # cut down differently
    assert rules.infix_free is (containment == "drop") and len(rules) >= 3
    llama, gpt2 = (
        placed(MergedModel(backbone, module_for(backbone, 5), Matcher(rules)), unit_positions)
        for backbone in (
            build(name, vocab_size=VOCAB, max_position_embeddings=POSITIONS)
            for name in ("llama", "gpt2")
        )
    )
    texts = [np.array(each) for each in product(range(VOCAB), repeat=LENGTH)]
    mass = torch.stack([row.sum() for row in token_log_probs(texts, llama)]).exp().sum()
    assert float(mass) / VOCAB == pytest.approx(1.0, abs=1e-9)  # each first token is given
    context = np.random.default_rng(2).choice(VOCAB, 60, p=[0.6, 0.3, 0.1])
    continuations = [np.array(each) for each in product(range(VOCAB), repeat=3)]
    for scope, length in product(("prompt", "all"), (4, 19, 60)):
        requests = [Request(context[-length:], each) for each in continuations]
        found = [each.log_prob for each in Scorer(gpt2, POSITIONS, scope).score(requests, 9)]
        assert float(np.exp(found).sum()) == pytest.approx(1.0, abs=1e-9)
