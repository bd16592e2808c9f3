"""Cache policies: the full cache is the base model, dropped columns are really gone.

H2O on cases computed by hand, and on a model against an account of its attention in lists; keys
that are turned to other positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from support.tiny_models import random_backbone
from umim_core.backbone.attention_masks import eager_attention
from umim_core.backbone.backbone import Backbone
from umim_core.backbone.key_rotation import key_rotation
from umim_core.baselines.evicted_spans import FullCache, OldSpansGone, evicted_spans
from umim_core.baselines.eviction import PolicyCache, generate_evicted, score_evicted
from umim_core.baselines.h2o import HeavyHitters, heavy_hitter_mask
from umim_core.baselines.methods import EvictedColumns, HeldColumns, Ints
from umim_core.baselines.registry import BASELINES, find_baseline
from umim_core.baselines.streaming_llm import SinksAndNewest
from umim_core.errors import BackboneError, EvaluationError, GenerationError
from umim_core.inference.engine import Engine
from umim_core.inference.options import GenerateOptions
from umim_core.inference.outputs import Row
from umim_core.merging.merged_model import MergedModel
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet

MATCHER = Matcher(RuleSet.from_spans([(1, 2), (3, 4, 5)]))


def row(*ids: int) -> Ints:
    return np.array(ids, dtype=np.int64)


CONTEXT = row(3, 1, 4, 1, 5, 9, 2, 6)
ENDINGS = [row(5, 3, 5), row(8), row(9, 7)]
LONGER = row(3, 1, 4, 1, 5, 9, 2, 6, 5, 3)
LONGER_ENDINGS = [row(5, 8, 9, 7), row(9, 3)]
PROMPTS = [LONGER, row(2, 7, 1)]
NEW = 8
PLAIN = GenerateOptions(max_new_tokens=NEW, merge="none", logprobs=0)


@torch.no_grad()
def masked_log_probs(
    backbone: Backbone, ids: list[int], prompt: int, seen_by: Callable[[int], Iterable[int]]
) -> Tensor:
    """Log-probabilities of the ids behind a prompt, in one forward under a mask.

    ``seen_by`` names the columns that a query behind the prompt sees, its own among them.
    """
    read = len(ids) - 1
    seen = torch.ones(read, read).tril().bool()
    for query in range(prompt, read):
        seen[query, :query] = False
        seen[query, list(seen_by(query))] = True
    lowest = torch.finfo(backbone.dtype).min
    mask = torch.zeros(seen.shape, dtype=backbone.dtype).masked_fill(~seen, lowest)[None, None]
    states = backbone.hidden(backbone.embed(torch.tensor([ids[:-1]])), mask)
    scores = backbone.head(states)[0, prompt - 1 :].log_softmax(dim=-1)
    return scores.gather(1, torch.tensor(ids[prompt:])[:, None])[:, 0]


def method_of(name: str, backbone: Backbone) -> EvictedColumns:
    method = find_baseline(name).make(backbone, MATCHER)
    assert isinstance(method, EvictedColumns)
    return method


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


MERGING = row(1, 2, 9, 3, 4, 5, 7, 1, 2)  # 9 tokens, 5 units


@pytest.mark.parametrize(
    ("name", "context", "hidden"),
    [
        ("given columns", CONTEXT, [1, 2, 3, 4, 6]),
        ("span-eviction-0", MERGING, [3, 4, 7]),
        ("span-eviction-3", MERGING, [3, 4]),
        ("span-eviction-4", MERGING, []),
    ],
)
def test_dropped_columns_are_those_that_a_mask_would_hide(
    name: str, context: Ints, hidden: list[int], tiny_backbone: Backbone
) -> None:
    kept = sorted({*range(len(context))}.difference(hidden))
    if name == "given columns":
        policy = OldSpansGone(row(*kept))
        found = score_evicted(context, ENDINGS[:1], tiny_backbone, lambda ids: policy, 3)
    else:
        method = evicted_spans(tiny_backbone, MATCHER, age=int(name.rpartition("-")[2]))
        found = score_evicted(context, ENDINGS[:1], tiny_backbone, method.new_policy, 3)
    [scores], columns = found
    assert columns == len(kept)
    ids = [*context.tolist(), *ENDINGS[0].tolist()]
    expected = masked_log_probs(
        tiny_backbone, ids, len(context), lambda query: [*kept, *range(len(context), query + 1)]
    )
    torch.testing.assert_close(scores.log_probs, expected, atol=1e-5, rtol=1e-5)
    [full], _ = score_evicted(context, ENDINGS[:1], tiny_backbone, lambda ids: FullCache(), 3)
    assert torch.equal(scores.log_probs[0], full.log_probs[0])
    assert not hidden or (scores.log_probs[1:] - full.log_probs[1:]).abs().min() > 1e-4


CASES = (
    ("h2o", "llama"),
    ("h2o", "gpt2"),
    ("h2o-masked-prompt", "llama"),  # generates as h2o does
    ("h2o-masked-prompt", "gpt2"),
    ("streaming-llm", "llama"),  # learned positions are refused
    ("streaming-llm-kept-positions", "llama"),
    ("streaming-llm-kept-positions", "gpt2"),
)


@dataclass(frozen=True)
class Case:
    """A method on a backbone."""

    backbone: Backbone
    method: EvictedColumns

    def rows(self, share: float, options: GenerateOptions = PLAIN) -> list[Row]:
        """Rows under a budget of a share of all tokens, rounded up."""

        def budget(tokens: int, generated: int) -> int:
            return int(np.ceil(share * (tokens + generated)))

        budgets = [partial(budget, len(ids)) for ids in PROMPTS]
        return generate_evicted(PROMPTS, options, self.backbone, self.method.new_policy, budgets)


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest) -> Case:
    name, family = request.param
    backbone = random_backbone(family, torch.float64)
    return Case(backbone, method_of(name, backbone))


@torch.no_grad()
def test_the_cache_has_the_budget_after_every_forward(case: Case) -> None:
    for budget in (1, 2, 5, 9, 10, 12):
        cache = PolicyCache(case.backbone, case.method.new_policy(LONGER))
        cache.read(torch.from_numpy(LONGER), budget)
        assert (cache.columns, cache.tokens) == (min(budget, 10), 10)
        for step, token in enumerate(LONGER_ENDINGS[0], 1):  # a budget that grows by half a column
            held, allowed = cache.columns, budget + step // 2
            cache.read(torch.tensor([token]), allowed)
            assert (cache.columns, cache.tokens) == (min(allowed, held + 1), 10 + step)
    expected = [tuple(-(-(len(ids) + fed) // 2) for fed in range(NEW)) for ids in PROMPTS]
    assert [tuple(found.cache_lengths) for found in case.rows(0.5)] == expected


def test_a_budget_of_the_whole_context_is_the_base_model(case: Case) -> None:
    """Bit for bit where no attention weights are read: those come from eager attention."""
    given, new_policy = (LONGER, LONGER_ENDINGS, case.backbone), case.method.new_policy
    most = 1e-6 if new_policy(LONGER).reads_attention else 0.0
    base, _ = score_evicted(*given, lambda ids: FullCache(), 1)
    for budget in (len(LONGER), 99):
        found, columns = score_evicted(*given, new_policy, budget)
        assert columns == len(LONGER)
        for score, expected in zip(found, base, strict=True):
            torch.testing.assert_close(score.log_probs, expected.log_probs, atol=most, rtol=0)


@pytest.mark.parametrize("settings", [{}, {"do_sample": True, "n": 2}])
def test_a_budget_of_all_tokens_generates_as_the_engine_does(
    case: Case, settings: dict[str, object]
) -> None:
    options = replace(PLAIN, seed=7, **settings)
    base = Engine(MergedModel(case.backbone, None, None)).generate(PROMPTS, options)
    full = Case(case.backbone, method_of("full-cache", case.backbone))
    for method in (case, full):
        for found, plain in zip(method.rows(1.0, options), base.rows, strict=True):
            assert (found.ids, found.cache_lengths) == (plain.ids, plain.cache_lengths)
            assert (found.prompt_ids, found.prompt_units) == (plain.prompt_ids, plain.prompt_units)
            assert found.stop_reason == plain.stop_reason == "length"
            assert found.logprobs == pytest.approx(plain.logprobs, abs=1e-6)


def test_every_policy_with_a_budget_is_in_the_matrix_and_the_others_keep_theirs(
    tiny_llama: Backbone,
) -> None:
    policies = {name for name, baseline in BASELINES.items() if baseline.side == "cache"}
    unbound = {"full-cache", *(f"span-eviction-{age}" for age in (0, 16, 64))}
    assert policies - unbound == {name for name, _ in CASES}
    assert [method_of(f"span-eviction-{age}", tiny_llama).age for age in (0, 16, 64)] == [0, 16, 64]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_columns_that_went_are_those_that_a_mask_hides_step_by_step(family: str) -> None:
    backbone, budget = random_backbone(family, torch.float64), 6
    for found in generate_evicted(
        PROMPTS, PLAIN, backbone, lambda ids: SinksAndNewest(None), [lambda _: budget] * 2
    ):
        assert found.cache_lengths[-1] == budget
        ids = [*found.prompt_ids, *found.ids]
        expected = masked_log_probs(
            backbone,
            ids,
            found.prompt_length,
            lambda query: (
                [*range(4), *range(query - budget + 4, query + 1)]
                if query > budget
                else range(query + 1)
            ),
        )
        assert found.logprobs == pytest.approx(expected.tolist(), abs=1e-6)


def test_text_goes_on_beyond_the_positions_where_they_restart() -> None:
    """12 columns of a backbone of 64 positions: 100 tokens are read, and none of them further."""
    backbone, options = random_backbone("llama"), replace(PLAIN, max_new_tokens=100)
    places: list[int] = []

    def write(budget: int, *, restart: bool) -> list[Row]:
        policy = SinksAndNewest(key_rotation(backbone) if restart else None)
        budgets = [lambda _: budget] * len(PROMPTS)
        return generate_evicted(PROMPTS, options, backbone, lambda _: policy, budgets)

    def note(module: nn.Module, args: tuple[object, ...], given: dict[str, Tensor]) -> None:
        places.append(int(given["position_ids"].max()))

    with pytest.raises(EvaluationError, match="64 positions"):
        score_evicted(np.ones(64, np.int64), ENDINGS[:1], backbone, lambda ids: FullCache(), 1)
    for budget, restart in ((12, False), (64, True)):  # and one that is read behind the 64
        with pytest.raises(GenerationError, match="must fit the backbone's 64 positions"):
            write(budget, restart=restart)
    backbone.trunk.register_forward_pre_hook(note, with_kwargs=True)
    rows = write(12, restart=True)
    assert [len(found.ids) for found in rows] == [100, 100]
    assert {found.cache_lengths[-1] for found in rows} == {max(places)} == {12}


IDS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 8, 7])


SINKS = {1: [9], 2: [0, 9], 4: [0, 1, 2, 9], 7: [0, 1, 2, 3, 7, 8, 9], 10: [*range(10)]}


@pytest.mark.parametrize("budget", [*SINKS, 99])
def test_four_sinks_and_the_newest_columns_stay(budget: int) -> None:
    kept, held = SINKS[min(budget, 10)], HeldColumns(0, torch.zeros(2, 10, 4), None)
    assert SinksAndNewest(None).survivors(held, budget).tolist() == [kept, kept]


class Watched(SinksAndNewest):
    """StreamingLLM that remembers the first layer's keys as a forward found them."""

    keys: Tensor

    def survivors(self, held: HeldColumns, budget: int) -> Tensor:
        if held.layer == 0:
            self.keys = held.keys[:, :-1]
        return super().survivors(held, budget)


@torch.no_grad()
def first_keys(backbone: Backbone, ids: Tensor, positions: Tensor) -> Tensor:
    """Keys of the first layer [H, L, D] in a forward of its own."""
    cache = DynamicCache()
    backbone.model(ids[None], position_ids=positions[None], past_key_values=cache)
    keys = cache.layers[0].keys
    assert keys is not None
    return keys[0]


@torch.no_grad()
def test_what_stays_has_the_keys_of_its_positions_after_every_step() -> None:
    llama = random_backbone("llama", torch.float64)
    policy = Watched(key_rotation(llama))
    cache = PolicyCache(llama, policy)
    cache.read(IDS[:9], 6)
    for read in range(9, len(IDS)):
        cache.read(IDS[read : read + 1], 6)
        numbers = torch.tensor([0, 1, 2, 3, read - 2, read - 1])
        expected = first_keys(llama, IDS[numbers], torch.arange(6))
        torch.testing.assert_close(policy.keys, expected, atol=1e-6, rtol=1e-6)


# The weights of one head over the tokens a b c d, as in the docstring of ``baselines.h2o``.
WEIGHTS = [[1, 0, 0, 0], [0.6, 0.4, 0, 0], [0.1, 0.5, 0.4, 0], [0.1, 0.2, 0.3, 0.4]]


@pytest.mark.parametrize(
    ("budget", "kept"),
    [(1, [3]), (2, [0, 3]), (3, [0, 2, 3]), (4, [0, 1, 2, 3]), (9, [0, 1, 2, 3])],
)
def test_half_are_heavy_hitters_and_half_are_new(budget: int, kept: list[int]) -> None:
    held = HeldColumns(0, torch.zeros(1, 4, 2), torch.tensor([WEIGHTS]))
    assert HeavyHitters().survivors(held, budget).tolist() == [kept]


class Recorded(HeavyHitters):
    """H2O that writes down the tokens whose columns stay in the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stayed: list[list[int]] = []
        self.read = 0  # tokens, by the first layer

    def survivors(self, held: HeldColumns, budget: int) -> Tensor:
        kept = super().survivors(held, budget)
        if held.layer == 0:
            before = self.stayed or [[]] * len(kept)
            new = range(self.read, self.read + held.keys.shape[1] - len(before[0]))
            tokens = torch.tensor([[*row, *new] for row in before])
            self.stayed, self.read = tokens.gather(1, kept).tolist(), new.stop
        return kept


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@torch.no_grad()
def test_the_first_layer_keeps_what_an_account_in_lists_keeps(family: str) -> None:
    """The first layer's queries and keys do not depend on what was dropped elsewhere."""
    backbone, context = random_backbone(family, torch.float64), torch.from_numpy(LONGER)
    budget, prompt = 5, 6
    with eager_attention(backbone.model):
        weights = backbone.model(context[None], output_attentions=True).attentions[0][0].numpy()
    policy = Recorded()
    cache = PolicyCache(backbone, policy)
    cache.read(context[:prompt], budget)
    heads = len(policy.stayed)
    group = len(weights) // heads
    accounts: list[dict[int, float]] = [{} for _ in range(heads)]
    for end in range(prompt, len(context) + 1):
        for head, scores in enumerate(accounts):
            for query in range(prompt) if end == prompt else [end - 1]:
                scores[query] = 0.0
                for of_query in weights[head * group : (head + 1) * group]:
                    total = sum(of_query[query][column] for column in scores)
                    for column in scores:  # what is left of the softmax without dropped columns
                        scores[column] += of_query[query][column] / total
            recent = sorted(scores)[-3:]
            older = sorted(set(scores) - set(recent), key=lambda column: -scores[column])
            accounts[head] = {c: scores[c] for c in sorted([*older[:2], *recent])}
        assert policy.stayed == [list(scores) for scores in accounts]
        if end < len(context):
            cache.read(context[end : end + 1], budget)
    assert any(held != list(range(5, 10)) for held in policy.stayed)


def seen_by(weights: list[list[float]], heavy: int, newest: int) -> list[set[int]]:
    """Columns that each query of one head sees, as H2O's code for lm-eval has it, in lists."""
    tokens = len(weights)
    scores, found = [0.0] * tokens, []
    for query in range(tokens):
        if query < heavy:
            hitters = set(range(query + 1))
        else:
            best = sorted(range(tokens), key=lambda column: -scores[column])[: heavy - 1]
            hitters = {*best, query}
        scores = [score + weight for score, weight in zip(scores, weights[query], strict=True)]
        if query >= heavy:
            scores = [score if column in hitters else 0.0 for column, score in enumerate(scores)]
        found.append(
            {c for c in hitters if c <= query} | {*range(max(0, query - newest), query + 1)}
        )
    return found


@pytest.mark.parametrize(("heavy", "newest"), [(0, 2), (1, 1), (3, 0), (4, 2)])
def test_masked_queries_see_hitters_and_the_newest(heavy: int, newest: int) -> None:
    torch.manual_seed(5)
    logits = torch.randn(2, 12, 12).masked_fill(torch.ones(12, 12).triu(1).bool(), -torch.inf)
    weights = logits.softmax(-1)
    mask = heavy_hitter_mask(weights, heavy, newest)
    for head in range(2):
        if heavy:
            expected = seen_by(weights[head].tolist(), heavy, newest)
        else:
            expected = [set(range(max(0, query - newest), query + 1)) for query in range(12)]
        assert [set(row.nonzero().view(-1).tolist()) for row in mask[head]] == expected


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"rope_parameters": LLAMA3}),
        ("llama", {"rope_parameters": YARN}),
        ("qwen3", {}),
        ("gpt_neox", {"hidden_size": 64}),  # turns a quarter of a head's dimensions
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_turned_keys_are_those_of_the_new_positions(
    family: str, changes: dict[str, Any], dtype: torch.dtype
) -> None:
    backbone = random_backbone(family, dtype, **changes)
    old, new = torch.tensor([0, 1, 2, 7, 30, 31]), torch.tensor([0, 1, 2, 3, 4, 60])
    written, expected = (first_keys(backbone, IDS[:6], at) for at in (old, new))
    rotation = key_rotation(backbone)
    found = rotation.turn(written, (new - old).expand(len(written), -1))
    scale = 1e-5 if dtype is torch.float64 else 0.03
    torch.testing.assert_close(found, expected, atol=scale * float(expected.abs().max()), rtol=0)
    assert torch.equal(found[:, :3], written[:, :3])  # they stayed where they were
    assert not torch.allclose(found[:, 3:], written[:, 3:], atol=0.01)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("gpt2", {}, "no rotation of all layers"),
        ("helium", {"head_dim": 4, "num_key_value_heads": 4}, "layer 0 are turned in another way"),
        ("llama", {"rope_parameters": YARN | {"rope_type": "dynamic"}}, "change with the length"),
    ],
)
def test_other_positions_are_refused_by_name(
    family: str, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(BackboneError, match=reason):
        key_rotation(random_backbone(family, **changes))
