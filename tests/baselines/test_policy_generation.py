"""Generation under a cache policy: base model at a full budget, exact lengths, dropped columns."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from support.tiny_models import random_backbone
from umim_core.backbone.backbone import Backbone
from umim_core.backbone.key_rotation import key_rotation
from umim_core.baselines.eviction import generate_evicted
from umim_core.baselines.methods import EvictedColumns, Ints
from umim_core.baselines.registry import find_baseline
from umim_core.baselines.streaming_llm import SinksAndNewest
from umim_core.errors import GenerationError
from umim_core.inference.engine import Engine
from umim_core.inference.options import GenerateOptions
from umim_core.inference.outputs import RowOutput
from umim_core.merging.merged_model import MergedModel
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet

PROMPTS = [np.array(ids, dtype=np.int64) for ids in ([3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [2, 7, 1])]
NEW = 8
PLAIN = GenerateOptions(max_new_tokens=NEW, merge="none", logprobs=0)
CASES = (
    ("full-cache", "llama"),
    ("h2o", "llama"),
    ("h2o", "gpt2"),
    ("streaming-llm", "llama"),
    ("streaming-llm-kept-positions", "gpt2"),
)


@dataclass(frozen=True)
class Case:
    """A method on a backbone."""

    name: str
    backbone: Backbone
    method: EvictedColumns

    def rows(self, share: float, options: GenerateOptions = PLAIN) -> list[RowOutput]:
        """Rows under a budget of a share of all tokens, rounded up."""

        def budget(prompt: Ints, generated: int) -> int:
            return int(np.ceil(share * (len(prompt) + generated)))

        return generate_evicted(PROMPTS, options, self.backbone, self.method.new_policy, budget)


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest) -> Case:
    name, family = request.param
    backbone = random_backbone(family, torch.float64)
    method = find_baseline(name).make(backbone, Matcher(RuleSet.from_spans([(1, 2)])))
    assert isinstance(method, EvictedColumns)
    return Case(name, backbone, method)


@pytest.mark.parametrize("settings", [{}, {"do_sample": True, "n": 2}])
def test_a_budget_of_all_tokens_generates_as_the_engine_does(
    case: Case, settings: dict[str, object]
) -> None:
    options = replace(PLAIN, seed=7, **settings)
    found = case.rows(1.0, options)
    base = Engine(MergedModel(case.backbone, None, None, "compact"))
    for row, plain in zip(found, base.generate(PROMPTS, options).rows, strict=True):
        assert (row.ids, row.cache_lengths) == (plain.ids, plain.cache_lengths)
        assert (row.prompt_ids, row.prompt_units) == (plain.prompt_ids, plain.prompt_units)
        assert row.stop_reason == plain.stop_reason == "length"
        assert row.logprobs == pytest.approx(plain.logprobs, abs=1e-6)


def test_the_cache_has_the_budget_after_every_token(case: Case) -> None:
    if case.name == "full-cache":
        expected = [tuple(range(len(ids), len(ids) + NEW)) for ids in PROMPTS]
    else:
        expected = [tuple(-(-(len(ids) + fed) // 2) for fed in range(NEW)) for ids in PROMPTS]
    assert [row.cache_lengths for row in case.rows(0.5)] == expected


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

    def write(budget: int) -> list[RowOutput]:
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
