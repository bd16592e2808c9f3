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
from umim_core.inference.engine import Engine
from umim_core.inference.rows import Row
from umim_core.merging.merged_model import MergedModel
from umim_core.rules.matcher import Matcher

SAMPLING = settings(**SAMPLED, seed=0)


def model(matcher: Matcher, bound: float | None = None) -> MergedModel:
    backbone = build("llama")
    return MergedModel(backbone, module_for(backbone), matcher, "compact", decode_max_damage=bound)


def rows_of(merged_model: MergedModel, **options: object) -> tuple[Row, ...]:
    chosen = replace(SAMPLING, **options)
    return Engine(merged_model).generate(random_prompts(5, 4), chosen).rows


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
        engine.generate(prompts, replace(SAMPLING, decode_max_damage=bound)).rows
        for bound in bounds
    ]
    assert found == [rows_of(model(matcher), decode_max_damage=bound) for bound in bounds]
