"""Cache policies: the full cache is the base model, dropped columns are really gone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from support.tiny_models import random_backbone
from umim_core.backbone.backbone import Backbone
from umim_core.backbone.key_rotation import key_rotation
from umim_core.baselines.evicted_spans import evicted_spans
from umim_core.baselines.eviction import PolicyCache, generate_evicted, score_evicted
from umim_core.baselines.full_cache import FullCache
from umim_core.baselines.methods import CachePolicy, EvictedColumns, HeldColumns, Ints
from umim_core.baselines.registry import BASELINES, find_baseline
from umim_core.baselines.streaming_llm import SinksAndNewest
from umim_core.errors import BackboneError, EvaluationError, GenerationError
from umim_core.inference.engine import Engine
from umim_core.inference.options import GenerateOptions
from umim_core.inference.outputs import Row
from umim_core.merging.likelihood import TokenScores
from umim_core.merging.merged_model import MergedModel
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet

CONTEXT = np.array([3, 1, 4, 1, 5, 9, 2, 6], dtype=np.int64)
ENDINGS = [np.array(ids, dtype=np.int64) for ids in ([5, 3, 5], [8], [9, 7])]


class Keeping:
    """Keep given columns of every head."""

    reads_attention: ClassVar[bool] = False
    rotation: ClassVar[None] = None

    def __init__(self, *columns: int) -> None:
        self.columns = columns

    def survivors(self, held: HeldColumns, budget: int) -> Tensor:
        return torch.tensor(self.columns).expand(held.keys.shape[0], -1)


@torch.no_grad()
def test_the_full_cache_equals_the_base_model_bit_for_bit(tiny_backbone: Backbone) -> None:
    scores, columns = score_evicted(CONTEXT, ENDINGS, tiny_backbone, lambda ids: FullCache(), 1)
    assert columns == len(CONTEXT)
    for ending, score in zip(ENDINGS, scores, strict=True):
        cache = DynamicCache()
        context = torch.from_numpy(CONTEXT)[None]
        first = tiny_backbone.model(context, past_key_values=cache, logits_to_keep=1)
        parts = [first.logits[0]]
        if len(ending) > 1:
            rest = tiny_backbone.model(torch.from_numpy(ending[:-1])[None], past_key_values=cache)
            parts.append(rest.logits[0])
        log_probs = torch.cat(parts).log_softmax(dim=-1)
        expected = log_probs.gather(1, torch.from_numpy(ending)[:, None])[:, 0]
        assert torch.equal(score.log_probs, expected)


@torch.no_grad()
def test_dropped_columns_are_those_that_a_mask_would_hide(tiny_backbone: Backbone) -> None:
    kept, ending = (0, 5, 7), ENDINGS[0]
    scores, columns = score_evicted(CONTEXT, [ending], tiny_backbone, lambda ids: Keeping(*kept), 3)
    assert columns == len(kept)
    ids = torch.from_numpy(np.concatenate([CONTEXT, ending[:-1]]))[None]
    seen = torch.ones(ids.shape[1], ids.shape[1]).tril().bool()
    hidden = sorted(set(range(len(CONTEXT))) - set(kept))
    seen[len(CONTEXT) :, hidden] = False
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
    states = tiny_backbone.hidden(tiny_backbone.embed(ids), mask)
    logits = tiny_backbone.head(states)[0, len(CONTEXT) - 1 :]
    expected = logits.log_softmax(dim=-1).gather(1, torch.from_numpy(ending)[:, None])[:, 0]
    torch.testing.assert_close(scores[0].log_probs, expected, atol=1e-5, rtol=1e-5)
    full, _ = score_evicted(CONTEXT, [ending], tiny_backbone, lambda ids: FullCache(), 3)
    assert torch.equal(scores[0].log_probs[0], full[0].log_probs[0])
    assert (scores[0].log_probs[1:] - full[0].log_probs[1:]).abs().min() > 1e-4


def test_a_policy_that_reads_attention_gets_the_weights_of_the_prefill(
    tiny_backbone: Backbone,
) -> None:
    shapes: list[tuple[int, ...]] = []

    class HeaviestHalf:
        """Keep half of the columns of every head: those that were looked at most."""

        reads_attention: ClassVar[bool] = True
        rotation: ClassVar[None] = None

        def survivors(self, held: HeldColumns, budget: int) -> Tensor:
            assert held.attention is not None
            torch.testing.assert_close(
                held.attention.sum(dim=-1), torch.ones(held.attention.shape[:2])
            )
            shapes.append(tuple(held.attention.shape))
            heads, columns = held.keys.shape[:2]
            looked_at = held.attention.sum(dim=1).view(heads, -1, columns).sum(dim=1)
            return looked_at.topk(budget, dim=-1).indices.sort(dim=-1).values

    before = tiny_backbone.model.config._attn_implementation
    _, columns = score_evicted(CONTEXT, ENDINGS, tiny_backbone, lambda ids: HeaviestHalf(), 4)
    assert columns == 4
    assert shapes == [(4, len(CONTEXT), len(CONTEXT))] * 2
    assert tiny_backbone.model.config._attn_implementation == before


@pytest.mark.parametrize("columns", [(), (2, 1), (0, 0), (-1, 2), (0, 8)])
def test_a_policy_that_breaks_its_protocol_is_refused(
    columns: tuple[int, ...], tiny_llama: Backbone
) -> None:
    with pytest.raises(EvaluationError, match="a cache policy must keep columns below 8"):
        score_evicted(CONTEXT, ENDINGS, tiny_llama, lambda ids: Keeping(*columns), 2)


def test_a_text_beyond_the_backbones_positions_is_refused(tiny_llama: Backbone) -> None:
    context = np.ones(64, dtype=np.int64)
    with pytest.raises(EvaluationError, match="64 positions"):
        score_evicted(context, [np.array([1, 2])], tiny_llama, lambda ids: FullCache(), 1)


MATCHER = Matcher(RuleSet.from_spans([(1, 2), (3, 4, 5)]))
LONGER = np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3], dtype=np.int64)
LONGER_ENDINGS = [np.array(ids, dtype=np.int64) for ids in ([5, 8, 9, 7], [9, 3])]
CASES = (
    ("h2o", "llama"),
    ("h2o", "gpt2"),
    ("h2o-masked-prompt", "llama"),  # generates as h2o does
    ("h2o-masked-prompt", "gpt2"),
    ("streaming-llm", "llama"),  # learned positions are refused: test_streaming_llm.py
    ("streaming-llm-kept-positions", "llama"),
    ("streaming-llm-kept-positions", "gpt2"),
)


@dataclass(frozen=True)
class Case:
    """A method on a backbone."""

    backbone: Backbone
    new_policy: Callable[[Ints], CachePolicy]

    def scores(self, budget: int) -> tuple[list[TokenScores], int]:
        return score_evicted(LONGER, LONGER_ENDINGS, self.backbone, self.new_policy, budget)


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest) -> Case:
    name, family = request.param
    backbone = random_backbone(family, torch.float64)
    method = find_baseline(name).make(backbone, MATCHER)
    assert isinstance(method, EvictedColumns)
    return Case(backbone, method.new_policy)


@torch.no_grad()
def test_the_cache_has_the_budget_after_every_forward(case: Case) -> None:
    for budget in (1, 2, 5, 9, 10, 12):
        cache = PolicyCache(case.backbone, case.new_policy(LONGER))
        cache.read(torch.from_numpy(LONGER), budget)
        assert (cache.columns, cache.tokens) == (min(budget, 10), 10)
        for step, token in enumerate(LONGER_ENDINGS[0], 1):  # a budget that grows by half a column
            held, allowed = cache.columns, budget + step // 2
            cache.read(torch.tensor([token]), allowed)
            assert (cache.columns, cache.tokens) == (min(allowed, held + 1), 10 + step)


def test_a_budget_of_the_whole_context_is_the_base_model(case: Case) -> None:
    """Bit for bit where no attention weights are read: those come from eager attention."""
    most = 1e-6 if case.new_policy(LONGER).reads_attention else 0.0
    base, _ = score_evicted(LONGER, LONGER_ENDINGS, case.backbone, lambda ids: FullCache(), 1)
    for budget in (len(LONGER), 99):
        found, columns = case.scores(budget)
        assert columns == len(LONGER)
        for score, expected in zip(found, base, strict=True):
            torch.testing.assert_close(score.log_probs, expected.log_probs, atol=most, rtol=0)


def test_every_policy_with_a_budget_is_in_the_matrix() -> None:
    policies = {name for name, baseline in BASELINES.items() if baseline.side == "cache"}
    unbound = {name for name in policies if name == "full-cache" or "span-eviction" in name}
    assert policies - unbound == {name for name, _ in CASES}


MERGING = np.array([1, 2, 9, 3, 4, 5, 7, 1, 2], dtype=np.int64)  # 9 tokens, 5 units


ENDING = np.array([6, 8, 3], dtype=np.int64)


@pytest.mark.parametrize(("age", "hidden"), [(0, [3, 4, 7]), (3, [3, 4]), (4, [])])
@torch.no_grad()
def test_columns_of_old_spans_are_gone_after_the_context(
    age: int, hidden: list[int], tiny_llama: Backbone
) -> None:
    new_policy = evicted_spans(tiny_llama, MATCHER, age=age).new_policy
    [scores], columns = score_evicted(MERGING, [ENDING], tiny_llama, new_policy, 5)
    assert columns == len(MERGING) - len(hidden)
    ids = torch.from_numpy(np.concatenate([MERGING, ENDING[:-1]]))[None]
    seen = torch.ones(ids.shape[1], ids.shape[1]).tril().bool()
    seen[len(MERGING) :, hidden] = False
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
    logits = tiny_llama.head(tiny_llama.hidden(tiny_llama.embed(ids), mask))
    log_probs = logits[0, len(MERGING) - 1 :].log_softmax(dim=-1)
    expected = log_probs.gather(1, torch.from_numpy(ENDING)[:, None])[:, 0]
    torch.testing.assert_close(scores.log_probs, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("age", [0, 16, 64])
def test_every_age_has_a_name(age: int, tiny_llama: Backbone) -> None:
    method = find_baseline(f"span-eviction-{age}").make(tiny_llama, MATCHER)
    assert isinstance(method, EvictedColumns)
    assert method.age == age


PROMPTS = [np.array(ids, dtype=np.int64) for ids in ([3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [2, 7, 1])]
NEW = 8
PLAIN = GenerateOptions(max_new_tokens=NEW, merge="none", logprobs=0)
WRITTEN = (
    ("full-cache", "llama"),
    ("h2o", "llama"),
    ("h2o", "gpt2"),
    ("streaming-llm", "llama"),
    ("streaming-llm-kept-positions", "gpt2"),
)


@dataclass(frozen=True)
class WritingCase:
    """A method on a backbone."""

    name: str
    backbone: Backbone
    method: EvictedColumns

    def rows(self, share: float, options: GenerateOptions = PLAIN) -> list[Row]:
        """Rows under a budget of a share of all tokens, rounded up."""

        def budget(prompt: Ints, generated: int) -> int:
            return int(np.ceil(share * (len(prompt) + generated)))

        return generate_evicted(PROMPTS, options, self.backbone, self.method.new_policy, budget)


@pytest.fixture(scope="module", params=WRITTEN, ids="-".join)
def writing(request: pytest.FixtureRequest) -> WritingCase:
    name, family = request.param
    backbone = random_backbone(family, torch.float64)
    method = find_baseline(name).make(backbone, Matcher(RuleSet.from_spans([(1, 2)])))
    assert isinstance(method, EvictedColumns)
    return WritingCase(name, backbone, method)


@pytest.mark.parametrize("settings", [{}, {"do_sample": True, "n": 2}])
def test_a_budget_of_all_tokens_generates_as_the_engine_does(
    writing: WritingCase, settings: dict[str, object]
) -> None:
    options = replace(PLAIN, seed=7, **settings)
    found = writing.rows(1.0, options)
    base = Engine(MergedModel(writing.backbone, None, None, "compact"))
    for row, plain in zip(found, base.generate(PROMPTS, options).rows, strict=True):
        assert (row.ids, row.cache_lengths) == (plain.ids, plain.cache_lengths)
        assert (row.prompt_ids, row.prompt_units) == (plain.prompt_ids, plain.prompt_units)
        assert row.stop_reason == plain.stop_reason == "length"
        assert row.logprobs == pytest.approx(plain.logprobs, abs=1e-6)


def test_the_cache_has_the_budget_after_every_token(
    writing: WritingCase,
) -> None:
    if writing.name == "full-cache":
        expected = [tuple(range(len(ids), len(ids) + NEW)) for ids in PROMPTS]
    else:
        expected = [tuple(-(-(len(ids) + fed) // 2) for fed in range(NEW)) for ids in PROMPTS]
    assert [row.cache_lengths for row in writing.rows(0.5)] == expected


def masked_log_probs(backbone: Backbone, ids: list[int], prompt: int, budget: int) -> list[float]:
    """Log-probabilities of generated ids, columns hidden by a mask that sinks and newest leave."""
    read = len(ids) - 1
    seen = torch.ones(read, read).tril().bool()
    for query in range(prompt, read):  # what stayed of the tokens before it
        kept = [*range(4), *range(query - budget + 4, query)] if query > budget else range(query)
        seen[query, :query] = False
        seen[query, list(kept)] = True
    lowest = torch.finfo(torch.float64).min
    mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, lowest)[None, None]
    with torch.no_grad():
        states = backbone.hidden(backbone.embed(torch.tensor([ids[:-1]])), mask)
        scores = backbone.head(states)[0, prompt - 1 :].log_softmax(dim=-1)
    return scores.gather(1, torch.tensor(ids[prompt:])[:, None])[:, 0].tolist()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_columns_that_went_are_those_that_a_mask_hides_step_by_step(family: str) -> None:
    backbone = random_backbone(family, torch.float64)
    rows = generate_evicted(
        PROMPTS, PLAIN, backbone, lambda ids: SinksAndNewest(None), lambda *_: 6
    )
    assert [row.cache_lengths[-1] for row in rows] == [6, 6]
    for row in rows:
        expected = masked_log_probs(backbone, [*row.prompt_ids, *row.ids], row.prompt_length, 6)
        assert row.logprobs == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("kept_positions", [False, True])
def test_text_goes_on_beyond_the_positions_where_they_restart(kept_positions: bool) -> None:
    """12 columns of a backbone of 64 positions: 100 tokens are read, and none of them further."""
    backbone, options = random_backbone("llama"), replace(PLAIN, max_new_tokens=100)
    rotation = None if kept_positions else key_rotation(backbone)
    places: list[int] = []

    def write(budget: int) -> list[Row]:
        given = PROMPTS, options, backbone, lambda ids: SinksAndNewest(rotation)
        return generate_evicted(*given, lambda *_: budget)

    def note(module: nn.Module, args: tuple[object, ...], given: dict[str, Tensor]) -> None:
        places.append(int(given["position_ids"].max()))

    if kept_positions:
        with pytest.raises(GenerationError, match="must fit the backbone's 64 positions"):
            write(12)
        return
    with pytest.raises(GenerationError, match="must fit the backbone's 64 positions"):
        write(64)  # and one that is read behind them
    hook = backbone.trunk.register_forward_pre_hook(note, with_kwargs=True)
    try:
        rows = write(12)
    finally:
        hook.remove()
    assert [len(row.ids) for row in rows] == [100, 100]
    assert {row.cache_lengths[-1] for row in rows} == {max(places)} == {12}


IDS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 8, 7])


@pytest.fixture(scope="module")
def llama() -> Backbone:
    return random_backbone("llama", torch.float64)


@pytest.mark.parametrize(
    ("budget", "kept"),
    [
        (1, [9]),
        (2, [0, 9]),
        (4, [0, 1, 2, 9]),
        (7, [0, 1, 2, 3, 7, 8, 9]),
        (9, [0, 1, 2, 3, 5, 6, 7, 8, 9]),
        (10, list(range(10))),
        (99, list(range(10))),
    ],
)
def test_four_sinks_and_the_newest_columns_stay(budget: int, kept: list[int]) -> None:
    states = torch.zeros(2, 10, 4)
    held = HeldColumns(0, states, states, None)
    assert SinksAndNewest(None).survivors(held, budget).tolist() == [kept, kept]


class Watched(SinksAndNewest):
    """StreamingLLM that remembers the first layer's keys as a forward found them."""

    keys: Tensor

    def survivors(self, held: HeldColumns, budget: int) -> Tensor:
        if held.layer == 0:
            self.keys = held.keys[:, :-1]
        return super().survivors(held, budget)


def first_keys(backbone: Backbone, ids: Tensor, positions: Tensor) -> Tensor:
    """Keys of the first layer [H, L, D] in a forward of its own."""
    cache = DynamicCache()
    backbone.model(ids[None], position_ids=positions[None], past_key_values=cache)
    keys = cache.layers[0].keys
    assert keys is not None
    return keys[0]


@pytest.mark.parametrize("rotates", [True, False])
@torch.no_grad()
def test_what_stays_has_the_keys_of_its_positions_after_every_step(
    rotates: bool, llama: Backbone
) -> None:
    policy = Watched(key_rotation(llama) if rotates else None)
    cache = PolicyCache(llama, policy)
    cache.read(IDS[:9], 6)
    for read in range(9, len(IDS)):
        cache.read(IDS[read : read + 1], 6)
        numbers = torch.tensor([0, 1, 2, 3, read - 2, read - 1])
        positions = torch.arange(6) if rotates else numbers
        expected = first_keys(llama, IDS[numbers], positions)
        torch.testing.assert_close(policy.keys, expected, atol=1e-6, rtol=1e-6)


def test_learned_positions_cannot_be_moved_and_may_be_kept() -> None:
    gpt2, matcher = random_backbone("gpt2"), Matcher(RuleSet.from_spans([(1, 2)]))
    with pytest.raises(BackboneError, match="leaves columns at their positions"):
        find_baseline("streaming-llm").make(gpt2, matcher)
    assert isinstance(
        find_baseline("streaming-llm-kept-positions").make(gpt2, matcher), EvictedColumns
    )
