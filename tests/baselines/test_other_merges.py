"""Baselines of embeddings: pooled spans, random spans and similar neighbours, an oracle each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from support.merged_models import fresh_model
from support.reduced_texts import FAMILIES, word_backbone
from umim_core.backbone.backbone import Backbone
from umim_core.baselines.methods import Ints, MergedSpans
from umim_core.baselines.registry import find_baseline
from umim_core.evaluation.scoring import Request, method_scorer
from umim_core.merging.merged_model import MergedModel
from umim_core.merging.module import MergeModule
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet

RULES = Matcher(RuleSet.from_spans([(1, 2), (3, 4, 5), (6, 7, 8, 9)]))
NAMES = ("random-spans", "similar-neighbours")
BOS = 0  # the tokenizer's special token


@dataclass(frozen=True)
class Case:
    """A method in the place of a checkpoint."""

    name: str
    given: MergedModel
    method: MergedSpans

    def lengths(self, ids: Ints) -> list[int]:
        """Lengths of the units of a text; they cover it in order."""
        starts, lengths = self.method.segmenter.segment(ids)
        assert starts.tolist() == [sum(lengths[:unit]) for unit in range(len(lengths))]
        assert sum(lengths) == len(ids)
        return [int(length) for length in lengths]


def case_of(name: str, family: str) -> Case:
    backbone = word_backbone(family)
    method = find_baseline(name).make(backbone, RULES)
    assert isinstance(method, MergedSpans)
    return Case(name, fresh_model(backbone, RULES.rules), method)


@pytest.fixture(scope="module", params=[(name, family) for name in NAMES for family in FAMILIES])
def case(request: pytest.FixtureRequest) -> Case:
    return case_of(*request.param)


def texts() -> list[Ints]:
    """Texts with rules in them, of 0 to 40 tokens; every other one begins with a BOS."""
    rng = np.random.default_rng(5)
    spans = [[1, 2], [3, 4, 5], [6, 7, 8, 9], *[[word] for word in range(10, 32)]]
    found = [np.zeros(0, dtype=np.int64), np.array([11])]
    for number in range(20):
        text = np.concatenate([spans[i] for i in rng.integers(0, len(spans), 14)])
        found.append(np.concatenate([[BOS], text]) if number % 2 else text)
    return found


def test_as_many_units_are_left_as_rules_leave_and_a_bos_is_one_of_them(case: Case) -> None:
    moved = 0
    for ids in texts():
        of_rules, own = RULES.segment(ids)[1].tolist(), case.lengths(ids)
        assert len(own) == len(of_rules) and max(own, default=1) <= 4
        assert not len(ids) or ids[0] != BOS or own[0] == 1
        assert own == case.lengths(ids.copy())
        moved += own != of_rules
    assert moved > 15


def test_random_spans_are_as_long_as_those_of_the_rules_and_anywhere() -> None:
    case = case_of("random-spans", "llama")
    for ids in texts():
        assert Counter(case.lengths(ids)) == Counter(RULES.segment(ids)[1].tolist())
    text = np.array([1, 2, 11, 12, 13, 14], dtype=np.int64)
    assert {case.lengths(np.append(text, word)).index(2) for word in range(10, 32)} == set(range(6))


def test_nothing_is_joined_across_a_special_token(case: Case) -> None:
    """Turns of equal words, which would all be joined: each has the units of the rules."""
    turn, moved = [11, 1, 2, 11, 11, 1, 2], 0
    ids = np.array([*turn, BOS, *turn, BOS, BOS, *turn, BOS], dtype=np.int64)
    lengths = case.lengths(ids)
    assert len(lengths) == len(RULES.segment(ids)[1])
    ends = np.cumsum(lengths)
    for place in np.flatnonzero(ids == BOS):
        assert place + 1 in ends and (place == 0 or place in ends)
    stretches = np.split(ids, np.flatnonzero(ids == BOS))
    for stretch in stretches:
        of_rules, own = RULES.segment(stretch)[1].tolist(), case.lengths(stretch)
        assert len(own) == len(of_rules)
        moved += own != of_rules
    assert moved and lengths == [unit for one in stretches for unit in case.lengths(one)]


def oracle(ids: list[int], units: int, embeddings: torch.Tensor) -> list[int]:
    """Lengths of units: the most similar pair whose units fit together is joined, one by one."""
    found = [[place] for place in range(len(ids))]
    while len(found) > units:
        best: tuple[float, int] | None = None
        for place, (left, right) in enumerate(pairwise(found)):
            if len(left) + len(right) <= 4:
                ends = embeddings[ids[left[-1]]], embeddings[ids[right[0]]]
                likeness = float(cosine_similarity(*(end.double() for end in ends), dim=0))
                if best is None or likeness > best[0] + 1e-12:
                    best = likeness, place
        if best is None:
            break
        found[best[1] : best[1] + 2] = [found[best[1]] + found[best[1] + 1]]
    return [len(unit) for unit in found]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_most_similar_neighbours_are_joined(family: str) -> None:
    case = case_of("similar-neighbours", family)
    embeddings = case.given.backbone.embedding_weight
    for ids in texts():
        bos = int(len(ids) > 0 and ids[0] == BOS)
        units = len(RULES.segment(ids)[0]) - bos
        assert case.lengths(ids) == [1] * bos + oracle(ids[bos:].tolist(), units, embeddings)


@torch.no_grad()
def test_continuations_are_scored_behind_the_merged_embeddings(case: Case) -> None:
    given, backbone, answer = case.given, case.given.backbone, np.array([4, 2, 9], dtype=np.int64)
    assert isinstance(given.module, MergeModule)
    for ids in texts()[2:6]:
        spans = torch.from_numpy(ids).split(case.lengths(ids))
        raw = [backbone.embed(span) for span in spans]
        if case.name == "random-spans":
            sizes = [torch.tensor([len(span)]) for span in raw]
            pooled = [
                given.module(span[None], size)[0] for span, size in zip(raw, sizes, strict=True)
            ]
        else:
            pooled = [span.mean(dim=0) for span in raw]
        units = [one[0] if len(one) == 1 else two for one, two in zip(raw, pooled, strict=True)]
        row = torch.stack([*units, *backbone.embed(torch.from_numpy(answer[:-1]))])[None]
        scores = backbone.head(backbone.hidden(row))[0, len(units) - 1 :].log_softmax(dim=-1)
        expected = scores.gather(1, torch.from_numpy(answer)[:, None]).sum().item()
        scorer = method_scorer(case.method, given, 64)
        [found] = scorer.score([Request(ids, answer)], 1)
        assert found.log_prob == pytest.approx(expected, abs=1e-4)
        assert scorer.total.context_units == len(RULES.segment(ids)[0])


def test_a_context_that_is_cut_fits_with_the_units_that_are_left(case: Case) -> None:
    """Cut in the middle, a text has other units than it had there."""
    ids, answer = np.concatenate(texts()[2:]), np.array([4, 2], dtype=np.int64)
    [found] = method_scorer(case.method, case.given, 20).score([Request(ids, answer)], 1)
    assert found.sizes is not None and found.sizes.units <= 20 + 1


POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean-embedding": lambda span: torch.stack(list(span)).mean(dim=0),
    "last-embedding": lambda span: span[-1],
    "sum-embedding": lambda span: torch.stack(list(span)).sum(dim=0),
}


@pytest.mark.parametrize("name", POOLS)
def test_pooled_spans_equal_an_independent_computation(name: str, tiny_backbone: Backbone) -> None:
    method = find_baseline(name).make(tiny_backbone, RULES)
    assert isinstance(method, MergedSpans) and method.segmenter is RULES
    ids, lengths = torch.tensor([[3, 4, 5, 6], [7, 7, 9, 9], [1, 2, 0, 0]]), [4, 3, 2]
    found = method.merger(tiny_backbone.embed(ids), torch.tensor(lengths), ids)
    for row, length, value in zip(ids, lengths, found, strict=True):
        torch.testing.assert_close(value, POOLS[name](tiny_backbone.embedding_weight[row[:length]]))
