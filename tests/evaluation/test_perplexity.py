"""Perplexity against a forward per token; windows of documents, each token scored once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.engine_matrix import (
    EXACT,
    FAMILIES,
    ROUNDED,
    VOCAB,
    from_scratch,
    log_probs_from_scratch,
    module_for,
    random_rules,
)
from support.engine_matrix import build as any_backbone
from support.merged_models import placed
from support.pairwise import pairwise
from support.tiny_models import word_tokenizer
from umim_core.config.form import UnitPositions
from umim_core.errors import ConfigError, EvaluationError
from umim_core.evaluation.perplexity import perplexity
from umim_core.evaluation.windows import Window, document_windows, scored_bytes, second_halves
from umim_core.merging.likelihood import token_log_probs
from umim_core.merging.merged_model import MergedModel
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet

NESTED = random_rules(0, infix_free=False)
build = partial(any_backbone, max_position_embeddings=64)


def random_rows(tokens: int = VOCAB) -> list[np.ndarray]:
    """Rows of 1 to 30 tokens; one starts with a merged span, one is a merged span."""
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, tokens, length) for length in (30, 1, 2, 17, 24)]
    return [*rows, np.array([1, 0, 1, *rng.integers(0, tokens, 9)]), np.array([1, 0, 1])]


@pairwise(
    case=[*EXACT, *ROUNDED],
    positions=["compact", "preserved"],
    infix_free=[False, True],
    longest=[4, 9, 16],
)
def test_every_target_equals_a_forward_over_its_prefix(
    case: tuple[str, str, torch.dtype, float],
    positions: UnitPositions,
    infix_free: bool,
    longest: int,
) -> None:
    name, attention, dtype, tolerance = case
    backbone, matcher = build(name, dtype, attention), random_rules(0, infix_free, longest)
    module, rows = module_for(backbone, longest), random_rows(tokens=VOCAB if longest == 4 else 2)
    scored = token_log_probs(rows, placed(MergedModel(backbone, module, matcher), positions))
    assert sum(int(matcher.segment(row)[1].max() > 1) for row in rows) >= 3
    for row, ours in zip(rows, scored, strict=True):
        theirs = log_probs_from_scratch(backbone, module, matcher, row, positions)
        assert ours.shape == theirs.shape and ours.dtype == torch.float64
        assert torch.allclose(ours, theirs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", FAMILIES)
def test_without_rules_the_base_model_scores_plain_text(name: str) -> None:
    backbone, rows = build(name, attention="eager"), random_rows()
    base = token_log_probs(rows, MergedModel.without_merging(backbone))
    for row, ours in zip(rows, base, strict=True):
        logits = backbone.model(input_ids=torch.tensor(row)[None]).logits[0, :-1].double()
        theirs = logits.log_softmax(-1).gather(1, torch.tensor(row[1:])[:, None])[:, 0]
        assert torch.allclose(ours, theirs, atol=1e-5)
    empty = MergedModel(backbone, None, Matcher(RuleSet.from_spans([])))
    assert all(map(torch.equal, base, token_log_probs(rows, empty)))


def test_given_tokens_are_context_and_no_targets() -> None:
    backbone, rows = build("llama"), random_rows()[3:5]
    umim = MergedModel(backbone, module_for(backbone), NESTED)
    whole = [scores.tolist() for scores in token_log_probs(rows, umim)]
    found = perplexity(rows, umim, given=[4, 9])
    assert found.row_targets == (13, 15)
    assert found.nll_sum == pytest.approx(-sum(whole[0][3:]) - sum(whole[1][8:]))
    assert found.bits_per_byte(50) == pytest.approx(found.nll_sum / math.log(2) / 50)


@torch.no_grad()
def test_with_nested_rules_units_of_the_finished_row_are_another_layout() -> None:
    backbone, row = build("llama"), random_rows()[0]
    module = module_for(backbone)
    (ours,) = token_log_probs([row], MergedModel(backbone, module, NESTED))
    units = list(zip(*NESTED.segment(row), strict=True))
    prompts = []
    for target in range(1, len(row)):
        ended = [row[s : s + n].tolist() for s, n in units if s + n <= target]
        begun = row[sum(map(len, ended)) : target].tolist()
        prompts.append((NESTED, [*ended, *([token] for token in begun)]))
    logits = torch.stack([found for found, _ in from_scratch(backbone, module, prompts)])
    theirs = logits.log_softmax(-1).gather(1, torch.tensor(row[1:])[:, None])[:, 0]
    assert float((ours - theirs).abs().max()) > 1e-4


def test_rows_that_cannot_be_scored_are_refused() -> None:
    backbone = build("gpt2")
    base = MergedModel.without_merging(backbone)
    (scores,) = token_log_probs([np.array([1])], base)
    assert scores.shape == (0,)
    with pytest.raises(EvaluationError, match="at least one target"):
        perplexity([np.array([1])], base)
    row = [np.ones(66, dtype=np.int64)]
    module, matcher = module_for(backbone), Matcher(RuleSet.from_spans([(1, 1, 1, 1)]))
    assert len(token_log_probs(row, MergedModel(backbone, module, matcher))[0]) == 65
    long = placed(MergedModel(backbone, module, matcher), "preserved")
    for model in (base, long):
        with pytest.raises(EvaluationError, match="64 positions; got 65"):
            token_log_probs(row, model)


def pieces(documents: list[list[int]], size: int = 3) -> Iterator[tuple[np.ndarray, bool]]:
    for ids in documents:
        parts = [ids[i : i + size] for i in range(0, len(ids), size)] or [[]]
        for part in parts:
            yield np.array(part, np.int32), part is parts[-1]


def cut(documents: list[list[int]], *options: object) -> list[Window]:
    return list(document_windows(pieces(documents), *options))


def test_the_worked_example() -> None:
    found = cut([[*range(9)]], 5, 2)
    assert [(w.ids.tolist(), w.given) for w in found] == [
        ([0, 1, 2, 3, 4], 1),
        ([3, 4, 5, 6, 7], 2),
        ([6, 7, 8], 2),
    ]


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    length=st.integers(4, 12),
    context=st.integers(0, 2),
    lead=st.sampled_from([(), (99,)]),
)
def test_every_token_is_scored_once_after_its_context(
    lengths: list[int], length: int, context: int, lead: tuple[int, ...]
) -> None:
    documents = [[100 * d + i for i in range(n)] for d, n in enumerate(lengths, 1)]
    scored: list[int] = []
    for window in cut(documents, length, context, lead):
        ids = window.ids.tolist()
        assert ids[: len(lead)] == list(lead) and len(ids) <= length
        assert len({i // 100 for i in ids[len(lead) :]}) == 1
        new = ids[window.given :]
        scored += new
        before = window.given - len(lead)
        assert before >= min(context, new[0] % 100)
    first = 0 if lead else 1
    assert scored == [i for ids in documents for i in ids[first:]]
    wide = second_halves(cut(documents, length, context, lead))
    halves = [i for window in wide for i in window.ids[window.given :].tolist()]
    assert len(halves) == len(set(halves))


def test_windows_are_cut_while_a_document_is_read() -> None:
    def endless() -> Iterator[tuple[np.ndarray, bool]]:
        while True:
            yield np.arange(4, dtype=np.int32), False

    found = document_windows(endless(), 6, 1)
    assert [len(next(found).ids) for _ in range(5)] == [6] * 5


@pytest.mark.parametrize(("length", "context", "lead"), [(1, 0, ()), (8, 8, ()), (8, 7, (1,))])
def test_a_window_without_room_is_refused(length: int, context: int, lead: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="window"):
        cut([[1, 2, 3]], length, context, lead)


@pytest.mark.parametrize(("context", "lead"), [(0, ()), (2, ()), (1, (0,))])
def test_bytes_are_those_of_the_scored_text(context: int, lead: tuple[int, ...]) -> None:
    words = ["on", "mañana", "to", "été"]
    tokenizer = word_tokenizer(words)
    known = tokenizer.convert_tokens_to_ids(words)
    documents = [[known[i % 4] for i in range(n)] for n in (9, 4)]
    windows = cut(documents, 5, context, [tokenizer.convert_tokens_to_ids("on")] if lead else [])
    texts = [" ".join(words[i % 4] for i in range(n)) for n in (9, 4)]
    expected = sum(len(text.encode()) - (0 if lead else len("on")) for text in texts)
    assert scored_bytes(windows, lead, tokenizer) == expected
