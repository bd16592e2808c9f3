"""Several samples of one prompt, and turns that go on from a cache, against fresh forwards."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from support.engine_matrix import (
    CHEAP,
    CONFIGS,
    SAMPLED,
    build,
    cheap_rules,
    from_scratch,
    merging_engine,
    module_for,
    priced_rules,
    random_prompts,
    random_rules,
    settings,
    tail_apart,
)
from support.pairwise import pairwise
from umim_core.backbone.backbone import Backbone
from umim_core.config.form import UnitPositions
from umim_core.errors import GenerationError
from umim_core.inference.engine import Engine
from umim_core.inference.outputs import Forward, Generation
from umim_core.merging.merged_model import MergedModel
from umim_core.rules.matcher import Matcher

POLICIES = ("compact", "preserved")


def widths_of(backbone: Backbone, seen: list[int]) -> torch.utils.hooks.RemovableHandle:
    """Record how many units per row each forward of the trunk reads."""

    def note(_: object, __: object, inputs: dict[str, torch.Tensor]) -> None:
        seen.append(inputs["inputs_embeds"].shape[1])

    return backbone.model.base_model.register_forward_pre_hook(note, with_kwargs=True)


@pairwise(
    name=list(CONFIGS),
    rows=[1, 4],
    unit_positions=POLICIES,
    infix_free=[True, False],
    raw_tail=[0, 3],
    damage=[None, CHEAP],
)
@torch.no_grad()
def test_every_step_of_three_turns_equals_a_forward_from_scratch(
    name: str,
    rows: int,
    unit_positions: UnitPositions,
    infix_free: bool,
    raw_tail: int,
    damage: float | None,
) -> None:
    backbone = build(name)
    module, matcher = module_for(backbone), priced_rules(3, infix_free)
    decoding = matcher if damage is None else cheap_rules(matcher)
    engine = Engine(MergedModel(backbone, module, matcher, unit_positions))
    turns = [random_prompts(turn, rows) for turn in (5, 6, 7)]
    parts: list[list[list[int]]] = [[] for _ in range(rows)]
    by: list[list[Matcher]] = [[] for _ in range(rows)]
    compared = 0

    def compare(forward: Forward) -> None:
        nonlocal compared
        for b in range(rows):
            made = [list(forward.generated[b])]
            matchers = [*by[b], *[decoding] * len(made)]
            expected, units = from_scratch(
                backbone, module, matchers, [*parts[b], *made], unit_positions
            )
            assert forward.lengths[b] == units
            assert float((forward.logits[b] - expected).abs().max()) <= 1e-5
            compared += 1

    output: Generation | None = None
    for seed, prompts in enumerate(turns):
        for b, prompt in enumerate(prompts):
            if output is not None:  # it was not fed; no rule crosses into the new turn
                parts[b].append([output.rows[b].ids[-1]])
            parts[b] += tail_apart(prompt, raw_tail)
            by[b] += [matcher] * (len(parts[b]) - len(by[b]))
        output = engine.generate(
            prompts,
            settings(
                6,
                **SAMPLED,
                seed=seed,
                raw_tail=raw_tail,
                decode_max_damage=damage,
                observer=compare,
            ),
            past=None if output is None else output.state,
        )
        for b, row in enumerate(output.rows):
            parts[b].append(list(row.ids[:-1]))
            by[b] += [decoding] * (len(parts[b]) - len(by[b]))
    assert compared == 3 * 6 * rows
    assert output is not None and any(row.cache_lengths[0] > 14 for row in output.rows)


def test_another_turn_does_not_read_the_past_again() -> None:
    backbone = build("llama")
    engine = Engine(MergedModel.without_merging(backbone))
    first = engine.generate([[1, 2, 3, 4, 5, 6, 7, 8]], settings(4))
    seen: list[int] = []
    handle = widths_of(backbone, seen)
    engine.generate([[9, 10]], settings(3), past=first.state)
    handle.remove()
    assert seen == [3, 1, 1]  # the token that was never fed, the two new ones; then one a step


def test_turns_without_rules_equal_one_text() -> None:
    engine = Engine(MergedModel.without_merging(build("gpt2")))
    first = engine.generate([[1, 2, 3]], settings(5))
    second = engine.generate([[4, 5]], settings(5), past=first.state)
    whole = [1, 2, 3, *first.rows[0].ids, 4, 5]
    assert second.rows[0].ids == engine.generate([whole], settings(5)).rows[0].ids
    assert second.rows[0].prompt_ids == (first.rows[0].ids[-1], 4, 5)
    assert second.state.raw_ids == ((*whole, *second.rows[0].ids),)


def test_a_state_is_continued_once() -> None:
    engine = Engine(MergedModel.without_merging(build("gpt2")))
    first = engine.generate([[1, 2, 3]], settings(2))
    engine.generate([[4]], settings(2), past=first.state)
    with pytest.raises(GenerationError, match="continued once"):
        engine.generate([[4]], settings(2), past=first.state)


def test_a_refused_turn_leaves_its_state_alone() -> None:
    engine = Engine(MergedModel.without_merging(build("gpt2")))
    first = engine.generate([[1, 2, 3]], settings(2))
    with pytest.raises(GenerationError, match="96 positions"):
        engine.generate([[4]], settings(200), past=first.state)
    with pytest.raises(GenerationError, match="one prompt per row"):
        engine.generate([[4], [5]], settings(2), past=first.state)
    assert len(engine.generate([[4]], settings(2), past=first.state).rows[0].ids) == 2


def test_preserved_positions_count_against_the_limit() -> None:
    backbone = build("llama")  # 96 positions
    module, matcher = module_for(backbone), random_rules(3, infix_free=False)
    prompt = random_prompts(1, 1)[0].tolist() * 12
    assert len(matcher.segment(np.array(prompt))[0]) + 20 < 96 < len(prompt) + 20
    Engine(MergedModel(backbone, module, matcher, "compact")).generate([prompt], settings(20))
    with pytest.raises(GenerationError, match="96 positions"):
        Engine(MergedModel(backbone, module, matcher, "preserved")).generate([prompt], settings(20))


@pytest.mark.parametrize("name", list(CONFIGS))
def test_samples_of_a_prompt_equal_rows_of_their_own(name: str) -> None:
    backbone = build(name)
    engine = merging_engine(backbone, random_rules(2, infix_free=False))
    prompts = random_prompts(3, 3)
    seen: list[int] = []
    handle = widths_of(backbone, seen)
    shared = engine.generate(prompts, settings(**SAMPLED, num_return_sequences=4, seed=0))
    handle.remove()
    apart = engine.generate([p for p in prompts for _ in range(4)], settings(**SAMPLED, seed=0))
    assert shared.rows == apart.rows
    assert len({row.ids for row in shared.rows}) > 3
    assert len(seen) == 16  # one prefill, then one forward per token but the last


def test_samples_can_be_continued_each_on_its_own() -> None:
    engine = Engine(MergedModel.without_merging(build("llama")))
    first = engine.generate([[1, 2]], settings(3, **SAMPLED, num_return_sequences=2, seed=0))
    second = engine.generate([[4], [5, 6]], settings(3), past=first.state)
    for b, extra in enumerate(([4], [5, 6])):
        whole = [1, 2, *first.rows[b].ids, *extra]
        assert second.rows[b].ids == engine.generate([whole], settings(3)).rows[0].ids


@pytest.mark.parametrize("unit_positions", POLICIES)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_rows_of_very_different_lengths_are_continued_together(
    name: str, unit_positions: UnitPositions
) -> None:
    backbone = build(name)  # 96 positions
    engine = merging_engine(backbone, random_rules(2, False), unit_positions)
    long, short = [1, 2, 3, 4] * 12, [5]
    ends = settings(4, eos_token_id=[1, 3, 7, 9], repetition_penalty=1.5)
    first = engine.generate([long, short], ends)
    second = engine.generate([short, long], ends, past=first.state)
    for b, prompts in enumerate(((long, short), (short, long))):
        alone = engine.generate([prompts[0]], ends)
        assert alone.rows[0] == first.rows[b]
        assert engine.generate([prompts[1]], ends, past=alone.state).rows[0] == second.rows[b]


@pytest.mark.parametrize("samples", [1, 3])
def test_a_failed_or_abandoned_turn_gives_its_state_back(samples: int) -> None:
    backbone = build("llama")
    engine = merging_engine(backbone, random_rules(2, infix_free=False))
    first = engine.generate([[1, 2, 3]], settings(4))
    config = settings(8, **SAMPLED, num_return_sequences=samples, seed=0)
    expected = engine.generate(
        [[4, 5]],
        config,
        past=engine.generate([[1, 2, 3]], settings(4)).state,
    )

    def fail(forward: Forward) -> None:
        if len(forward.generated[0]) == 3:
            raise RuntimeError("an observer's own")

    with pytest.raises(RuntimeError, match="own"):
        engine.generate([[4, 5]], replace(config, observer=fail), past=first.state)
    steps = engine.steps([[4, 5]], config, first.state)
    for _ in range(4):
        next(steps)
    steps.close()
    assert engine.generate([[4, 5]], config, past=first.state).rows == expected.rows


def test_a_state_belongs_to_its_backbone_and_unit_positions() -> None:
    backbone = build("llama")
    state = Engine(MergedModel.without_merging(backbone)).generate([[1, 2, 3]], settings(4)).state
    for other in (
        Engine(MergedModel.without_merging(build("mistral"))),
        Engine(MergedModel(backbone, None, None, "preserved")),
    ):
        with pytest.raises(GenerationError, match="merge depth that made it"):
            other.generate([[4]], settings(2), past=state)
    Engine(MergedModel.without_merging(backbone)).generate([[4]], settings(2), past=state)
