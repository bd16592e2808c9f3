"""Span eviction as a mask of one forward, against a cache whose columns are really removed."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from support.engine_matrix import VOCAB as RULE_IDS
from support.engine_matrix import random_rules
from support.family_configs import EXACT, random_model
from umim_core.backbone.backbone import Backbone, wrap_backbone
from umim_core.errors import ConfigError
from umim_core.merging.compressed import Compressed
from umim_core.merging.likelihood import token_log_probs
from umim_core.merging.packing import pack_rows
from umim_core.merging.span_eviction import EvictedStates, last_queries
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet

QUICK = {("llama", 0), ("gpt2", 1), ("gpt_neox", 5)}
NEVER = np.iinfo(np.int64).max


def segmented(matcher: Matcher) -> Compressed:
    """A model that cuts rows and merges nothing; only its backbone and matcher are used."""
    backbone = wrap_backbone(random_model(EXACT["llama"], torch.float32), None)
    return Compressed(backbone, lambda spans, lengths: spans[:, 0], matcher, "compact")


def test_the_worked_example() -> None:
    cut = np.array([0, 1, 3, 6]), np.array([1, 2, 3, 1])
    assert last_queries(cut, 1).tolist() == [NEVER, 4, NEVER, 6, 6, NEVER, NEVER]
    assert last_queries(cut, 1, certain=0).tolist() == [NEVER, 3, NEVER, 6, 6, NEVER, NEVER]


def test_the_first_token_of_a_text_keeps_its_column() -> None:
    cut = np.array([0, 3]), np.array([3, 2])
    assert last_queries(cut, 0, certain=0).tolist() == [NEVER, 2, NEVER, 4, NEVER]


def test_a_mask_hides_old_columns_of_spans_alone() -> None:
    matcher = Matcher(RuleSet.from_spans([(1, 2), (3, 4, 5)]))
    rows = [np.arange(8), np.array([1, 2])]
    packed = pack_rows(rows, [matcher.segment(row) for row in rows])
    layout = EvictedStates(1).layout(packed, segmented(matcher))
    seen = layout.mask(torch.float32)[:, 0] == 0
    expected = torch.ones(8, 8).tril().bool()
    expected[5:, 1] = expected[7:, 3] = expected[7:, 4] = False
    assert torch.equal(seen[0], expected)
    assert torch.equal(seen[1, :2, :2], torch.ones(2, 2).tril().bool())
    assert EvictedStates(1).columns(packed).tolist() == [5, 2]


@torch.no_grad()
def read_step_by_step(
    ids: np.ndarray, matcher: Matcher, age: int, backbone: Backbone
) -> tuple[Tensor, int]:
    """Log-probabilities of ids[1:], token by token, columns removed by what was read so far."""
    cache, held, scores = DynamicCache(), [], []
    for t, token in enumerate(ids.tolist()):
        held.append(t)
        logits = backbone.model(
            inputs_embeds=backbone.embed(torch.tensor([[token]])),
            position_ids=torch.tensor([[t]]),
            attention_mask=torch.ones(1, len(held), dtype=torch.int64),
            past_key_values=cache,
        ).logits[0, -1]
        scores.append(logits.double().log_softmax(-1)[ids[min(t + 1, len(ids) - 1)]])
        gone = {
            j
            for s, n in zip(*matcher.segment(ids[: t + 1]), strict=True)
            if t - (s + n - 1) >= age and t - s >= 3
            for j in range(max(s, 1), s + n - 1)
        }
        kept = [column for column, j in enumerate(held) if j not in gone]
        held = [held[column] for column in kept]
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]
    return torch.stack(scores[:-1]), len(held)


@pytest.mark.parametrize(
    ("family", "age"),
    [
        pytest.param(*pair, marks=[] if pair in QUICK else [pytest.mark.full])
        for pair in product(EXACT, (0, 1, 5))
    ],
)
def test_one_masked_forward_equals_removing_the_columns_step_by_step(family: str, age: int) -> None:
    dtype = torch.float32 if family == "xglm" else torch.float64
    backbone = wrap_backbone(random_model(EXACT[family], dtype), None)
    matcher = random_rules(3, infix_free=False)
    rng = np.random.default_rng(age)
    rows = [rng.integers(0, RULE_IDS, length) for length in (21, 6)]
    compressed = Compressed(backbone, segmented(matcher).module, matcher, "compact")
    states = EvictedStates(age)
    found = token_log_probs(rows, compressed, states)
    whole = token_log_probs(rows, compressed.base())
    columns = states.columns(compressed.pack(rows)).tolist()
    for row, ours, raw, held in zip(rows, found, whole, columns, strict=True):
        expected, left = read_step_by_step(row, matcher, age, backbone)
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
        assert held == left
        if len(row) > 20:
            assert left < len(row)
            assert float((ours - raw).abs().max()) > 1e-4


@pytest.mark.parametrize("age", [-1, True, 1.5])
def test_an_age_that_is_none_is_refused(age: int) -> None:
    with pytest.raises(ConfigError, match="spans are evicted must be an integer of at least 0"):
        EvictedStates(age)
