"""Rules of decoding under a bound of damage; the matrix tests hold their logits to an oracle."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from support.engine_matrix import (
    CHEAP,
    SAMPLED,
    build,
    cheap_rules,
    module_for,
    priced_rules,
    random_prompts,
    settings,
)
from umim_core.errors import RuleSetError
from umim_core.inference.engine import Engine
from umim_core.inference.outputs import RowOutput
from umim_core.inference.request import Request
from umim_core.merging.merged_model import MergedModel
from umim_core.rules.matcher import Matcher

SAMPLING = settings(**SAMPLED)


def model(matcher: Matcher, bound: float | None = None) -> MergedModel:
    backbone = build("llama")
    return MergedModel(backbone, module_for(backbone), matcher, "compact", decode_max_damage=bound)


def rows_of(merged_model: MergedModel, **options: object) -> tuple[RowOutput, ...]:
    request = Request(seed=0, **options)
    return Engine(merged_model).generate(random_prompts(5, 4), SAMPLING, request).rows


@pytest.fixture(params=[True, False], ids=["infix-free", "nested"])
def matcher(request: pytest.FixtureRequest) -> Matcher:
    return priced_rules(3, request.param)


@pytest.mark.parametrize("bound", [-math.inf, -0.5])
def test_a_bound_below_all_prices_merges_prompts_alone(matcher: Matcher, bound: float) -> None:
    assert rows_of(model(matcher), decode_max_damage=bound) == rows_of(
        model(matcher), merge="prompt"
    )


def test_raw_prompts_are_gone_on_with_as_by_a_model_of_the_cheap_rules(matcher: Matcher) -> None:
    raw = {"raw_tail": 99}
    bounded = rows_of(model(matcher), decode_max_damage=CHEAP, **raw)
    assert bounded == rows_of(model(cheap_rules(matcher)), **raw)
    assert bounded != rows_of(model(matcher), **raw)


def test_a_request_overrides_the_bound_of_the_model(matcher: Matcher) -> None:
    every, cheap = rows_of(model(matcher)), rows_of(model(matcher), decode_max_damage=CHEAP)
    bounded = model(matcher, CHEAP)
    assert every != cheap == rows_of(bounded)
    assert rows_of(bounded, decode_max_damage=math.inf) == every
    assert rows_of(bounded, merge="prompt") == rows_of(model(matcher), merge="prompt")


def test_bounds_of_several_requests_do_not_mix(matcher: Matcher) -> None:
    engine, prompts = Engine(model(matcher)), random_prompts(5, 4)
    bounds = (CHEAP, None, -1.0, CHEAP)
    found = [
        engine.generate(prompts, SAMPLING, Request(seed=0, decode_max_damage=bound)).rows
        for bound in bounds
    ]
    assert found == [rows_of(model(matcher), decode_max_damage=bound) for bound in bounds]


def test_across_the_border_cheap_rules_take_units_of_the_prompt_back(matcher: Matcher) -> None:
    cheap, prompts = cheap_rules(matcher), random_prompts(8, 12)
    request = Request(seed=0, match_border=True, decode_max_damage=CHEAP)
    rows = Engine(model(matcher)).generate(prompts, SAMPLING, request).rows
    for prompt, row in zip(prompts, rows, strict=True):
        ids = prompt.tolist()
        starts = matcher.segment(prompt)[0].tolist()  # of the prompt's units, by all rules
        for length, token in zip(row.cache_lengths[1:], row.ids, strict=False):
            ids.append(token)
            last = len(ids) - 1
            ending = [s for s in starts if last - 3 <= s and cheap.contains(ids[s:])]
            begin = ending[0] if ending else last
            starts = [*(s for s in starts if s < begin), begin]
            assert length == len(starts)
    assert any(start < 0 for row in rows for start, _ in row.generated_spans)


def test_a_bound_needs_prices(matcher: Matcher) -> None:
    unpriced = Matcher(replace(matcher.rules, prices=None))
    with pytest.raises(RuleSetError, match=r"rules without prices\. Measure them: umim prune"):
        rows_of(model(unpriced), decode_max_damage=CHEAP)
