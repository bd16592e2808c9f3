"""The engine against transformers, against a forward from scratch at every step, and by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from support.engine_matrix import (
    CHEAP,
    EXACT,
    FAMILIES,
    ROUNDED,
    SAMPLED,
    VOCAB,
    Prompt,
    build,
    cheap_rules,
    finished_row,
    from_scratch,
    merging_engine,
    module_for,
    priced_rules,
    random_prompts,
    random_rules,
    settings,
    tail_apart,
)
from support.merge_modules import give_rows
from support.merged_models import cuts_of, oracle_states, placed, random_merged_model
from support.pairwise import pairwise
from support.tiny_models import forwards_of, written_by_transformers
from umim_core.backbone.backbone import Backbone
from umim_core.config.form import UnitPositions
from umim_core.errors import GenerationError
from umim_core.inference.batch import Batch, exhaust
from umim_core.inference.engine import Engine
from umim_core.inference.outputs import Forward, Generation, merged_spans
from umim_core.inference.unit_cache import UnitCache
from umim_core.merging.merged_model import MergedModel
from umim_core.rules.matcher import Matcher, Parts, PromptIds
from umim_core.rules.ruleset import RuleSet


def test_reductions_are_the_realised_ones() -> None:
    # row 0 feeds 2 3 4 and keeps 2 (3 4); row 1 feeds 3 4 5 and keeps (3 4) 5
    rows = [
        finished_row((0, 1), (2, 3, 4, 5), (1, 2, 3, 3), [(0, 2)]),
        finished_row((9, 0, 1, 2), (3, 4, 5, 6), (3, 4, 4, 5), [(1, 2)]),
        finished_row((0, 1), (2,), (2,)),
        finished_row((0, 1, 2), (3, 4), (3, 2)),  # two columns of old spans were dropped
    ]
    assert [row.token_reduction for row in rows] == [1 / 2, 1 / 4, 0, 0]
    assert [row.gen_kv_reduction for row in rows] == pytest.approx([1 / 3, 1 / 3, 0, 2])
    # units of generated tokens after each: 1 2 2 and 1 1 2, of 1 2 3
    assert [row.cumulative_kv_reduction for row in rows] == pytest.approx([1 / 6, 1 / 3, 0, 2])


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "at least one prompt"),
        ([[1], []], "prompt 1"),
        ([[1, 11]], "between 0 and 10; got prompt 0: 11"),
        ([np.zeros((1, 2), dtype=np.int64)], "1-D"),
        ([[1] * 96], "96 positions; got 96 prompt positions . 2 new tokens"),
    ],
)
def test_bad_prompts_are_refused(prompts: list[object], message: str) -> None:
    with pytest.raises(GenerationError, match=message):
        Engine(MergedModel.without_merging(build("llama"))).generate(prompts, settings(2))


@pytest.mark.parametrize(
    "parts",
    [((2, 3), (0, 1)), ((0, 2), (1, 3)), ((3, 2),), ((-1, 2),), ((0, 4),), ((0, 1), (4, 4))],
)
def test_parts_of_a_prompt_that_are_not_apart_are_refused(parts: Parts) -> None:
    with pytest.raises(GenerationError, match="in the 3 tokens, in order and apart; got"):
        PromptIds(np.array([1, 2, 3]), parts)


@pairwise(
    name=FAMILIES,
    dtype=[torch.float32, torch.float64],
    infix_free=[True, False],
    unit_positions=["compact", "preserved"],
)
def test_a_row_alone_equals_the_row_in_a_batch_and_its_samples(
    name: str, dtype: torch.dtype, infix_free: bool, unit_positions: UnitPositions
) -> None:
    """In a first turn and in one that goes on from it, rows of all lengths, ending at all steps."""
    engine = merging_engine(build(name, dtype), random_rules(1, infix_free), unit_positions)
    first, second = random_prompts(2, 4), [np.array([1, 2, 3, 4] * 10), *random_prompts(3, 3)]
    ends = settings(eos_token_id=[1, 3, 7, 9], repetition_penalty=1.5)
    together = engine.generate(first, ends)
    more = engine.generate(second, ends, past=together.state)
    assert len({len(row.ids) for row in (*together.rows, *more.rows)}) > 1
    for b, prompts in enumerate(zip(first, second, strict=True)):
        alone = engine.generate([prompts[0]], ends)
        assert alone.rows == (together.rows[b],)
        assert engine.generate([prompts[1]], ends, past=alone.state).rows == (more.rows[b],)
    with forwards_of(engine.backbone.trunk) as seen:
        shared = engine.generate(first, settings(**SAMPLED, num_return_sequences=3, seed=0))
    assert len(seen) == 16  # one prefill, then one forward per token but the last
    apart = engine.generate([p for p in first for _ in range(3)], settings(**SAMPLED, seed=0))
    assert shared.rows == apart.rows and len({row.ids for row in shared.rows}) > 3


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_empty_rules_give_the_base_models_bits_at_batch_one(name: str, attention: str) -> None:
    backbone = build(name, torch.float32, attention)
    engine = Engine(MergedModel(backbone, None, Matcher(RuleSet.from_spans([]))))
    for prompt in random_prompts(9, 3):
        ours: list[Tensor] = []
        output = engine.generate(
            [prompt], settings(observer=lambda forward, ours=ours: ours.append(forward.logits))
        )
        theirs = backbone.model.generate(
            torch.tensor(prompt)[None],
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=16,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        assert list(output.rows[0].ids) == theirs.sequences[0, len(prompt) :].tolist()
        assert torch.equal(torch.cat(ours), torch.cat(theirs.logits))


@pytest.mark.parametrize("name", FAMILIES)
def test_empty_rules_give_the_base_models_ids_in_batches(name: str) -> None:
    backbone = build(name)
    prompts = random_prompts(11, 12)
    output = Engine(MergedModel.without_merging(backbone)).generate(prompts, settings(12))
    for prompt, row in zip(prompts, output.rows, strict=True):
        theirs = written_by_transformers(backbone.model, prompt, 12, do_sample=False)
        assert list(row.ids) == theirs


@pytest.mark.parametrize("top", [0, 3])
def test_log_probabilities_are_the_models_own(top: int) -> None:
    backbone = build("llama")
    engine = merging_engine(backbone, random_rules(2, infix_free=False))
    seen: list[torch.Tensor] = []
    output = engine.generate(
        random_prompts(4, 3),
        settings(
            **SAMPLED,
            top_k=2,
            seed=0,
            logprobs=top,
            observer=lambda forward: seen.append(forward.logits),
        ),
    )
    for b, row in enumerate(output.rows):
        table = torch.stack([logits[b] for logits in seen]).log_softmax(dim=-1)
        chosen = table[torch.arange(len(row.ids)), torch.tensor(row.ids)]
        assert row.logprobs == pytest.approx(chosen.tolist(), abs=1e-12)
        assert row.top_logprobs is not None
        best = [[token for token, _ in step] for step in row.top_logprobs]
        assert best == table.argsort(dim=-1, descending=True)[:, :top].tolist()
        values = [[value for _, value in step] for step in row.top_logprobs]
        assert torch.allclose(torch.tensor(values), table.float().sort(descending=True)[0][:, :top])


def test_what_cannot_continue_a_state_is_refused_and_leaves_it_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backbone = build("gpt2")
    engine = Engine(MergedModel.without_merging(backbone))
    state = engine.generate([[1, 2, 3]], settings(2)).state
    for other, prompts, new, message in (
        (engine, [], 2, "one prompt per row; got 0"),
        (engine, [[4]], 200, "96 positions"),
        (Engine(MergedModel.without_merging(build("mistral"))), [[4]], 2, "depth that made it"),
        (merging_engine(backbone, random_rules(1, True), "preserved"), [[4]], 2, "depth that made"),
    ):
        with pytest.raises(GenerationError, match=message), monkeypatch.context() as patch:
            patch.setattr(UnitCache, "of_rows", None)  # nothing is copied before it is refused
            other.generate(prompts, settings(new), past=state)
    first, second = (engine.generate([[4]], settings(2), past=state).rows for _ in range(2))
    assert first == second and len(first[0].ids) == 2
    state.release()
    with pytest.raises(GenerationError, match="it was released, or spans were evicted"):
        engine.generate([[4]], settings(2), past=state)


def test_preserved_positions_count_against_the_limit() -> None:
    backbone = build("llama")  # 96 positions
    module, matcher = module_for(backbone), random_rules(3, infix_free=False)
    prompt = random_prompts(1, 1)[0].tolist() * 12
    assert len(matcher.segment(np.array(prompt))[0]) + 20 < 96 < len(prompt) + 20
    Engine(MergedModel(backbone, module, matcher)).generate([prompt], settings(20))
    with pytest.raises(GenerationError, match="96 positions"):
        Engine(placed(MergedModel(backbone, module, matcher), "preserved")).generate(
            [prompt], settings(20)
        )


@pytest.mark.parametrize(("depth", "samples"), [(0, 1), (0, 3), (1, 1)])
def test_turns_that_fail_end_early_or_run_at_once_change_no_state(depth: int, samples: int) -> None:
    engine = Engine(random_merged_model(build("llama"), random_rules(2, False), depth, 3))
    state = engine.generate([[1, 2, 3]], settings(4)).state
    config = settings(8, **SAMPLED, num_return_sequences=samples, seed=0)
    expected = engine.generate([[4, 5]], config, past=state).rows

    def fail(forward: Forward) -> None:
        if len(forward.generated[0]) == 3:
            raise RuntimeError("an observer's own")

    with pytest.raises(RuntimeError, match="own"):
        engine.generate([[4, 5]], replace(config, observer=fail), past=state)
    running = Batch(engine).run([[4, 5]], config, state)
    next(running)
    both = engine.generate([[4, 5], [6]], settings(4), past=state)  # a row for several prompts
    assert both.rows[1] == engine.generate([[6]], settings(4), past=state).rows[0]
    assert exhaust(running).rows == expected
    with pytest.raises(GenerationError, match="one prompt per row; got 1 prompts, 2 rows"):
        engine.generate([[4]], settings(4), past=both.state)


# Those of ``engine_matrix``, and where spans merge.
CASES = [
    *((*case, form) for case in (*EXACT, *ROUNDED) for form in ("compact", "preserved")),
    *((*EXACT[0], form) for form in ("depth", "depth-adapters")),
    *((name, "sdpa", torch.float64, 1e-10, "depth-adapters") for name in ("qwen2", "gpt2")),
    ("mistral", "sdpa", torch.float64, 1e-10, "depth"),
]
Case = tuple[str, str, torch.dtype, float, str]


def merged_model(backbone: Backbone, matcher: Matcher, form: str, rule_rows: bool) -> MergedModel:
    if form.startswith("depth"):
        rank = 3 if form == "depth-adapters" else 0
        return random_merged_model(backbone, matcher, 1, rank, rows=20 * rule_rows)
    module = module_for(backbone, matcher.rules.longest)
    if rule_rows:
        orders = matcher.rules.ids_by_order.values()
        give_rows(module, [ids for rows in orders for ids in rows[::2].tolist()])
    return placed(MergedModel(backbone, module, matcher), form)


def recomputed(model: MergedModel, prompts: list[Prompt]) -> list[tuple[torch.Tensor, int]]:
    """Logits behind each prompt's parts, which are matched apart, and the units they make."""
    backbone = model.backbone
    if not model.merge_depth:
        return from_scratch(backbone, model.require_module(), prompts, model.unit_positions)
    found = []
    for matchers, parts in prompts:
        units, ids = [], list[int]()
        assert not isinstance(matchers, Matcher)
        for matcher, part in zip(matchers, parts, strict=True):
            units += [(len(ids) + start, tokens) for start, tokens in cuts_of(matcher, part)]
            ids += part
        found.append((backbone.head(oracle_states(model, ids, units)[-1]), len(units)))
    return found


@pairwise(
    case=CASES,
    rows=[1, 4],
    turns=[1, 3],
    infix_free=[True, False],
    rule_rows=[False, True],
    reading=[(0, None), (3, None), (0, CHEAP)],
    longest=[4, 9],
)
@torch.no_grad()
def test_engine_equals_recompute(
    case: Case,
    rows: int,
    turns: int,
    infix_free: bool,
    rule_rows: bool,
    reading: tuple[int, float | None],
    longest: int,
) -> None:
    name, attention, dtype, tolerance, form = case
    (raw_tail, damage), new = reading, 12 if turns == 1 else 6
    matcher = priced_rules(3, infix_free, longest)
    few = {} if longest == 4 else {"suppress_tokens": list(range(2, VOCAB))}
    decoding = matcher if damage is None else cheap_rules(matcher)
    model = merged_model(build(name, dtype, attention), matcher, form, rule_rows)
    parts: list[list[list[int]]] = [[] for _ in range(rows)]
    by: list[list[Matcher]] = [[] for _ in range(rows)]
    prompts, steps = list[Prompt](), list[tuple[torch.Tensor, int]]()
    chosen = dict[int, list[int]]()

    def keep(forward: Forward) -> None:
        for b in range(rows):
            assert forward.running[b]
            chosen[b] = list(forward.generated[b])
            prompts.append(([*by[b], decoding], [*parts[b], chosen[b]]))
            steps.append((forward.logits[b].clone(), forward.lengths[b]))

    output: Generation | None = None
    for turn in range(turns):
        asked = random_prompts(5 + turn, rows, 2 if few else VOCAB)
        for b, prompt in enumerate(asked):
            if output is not None:  # it was not fed; no rule crosses into the new turn
                parts[b].append([output.rows[b].ids[-1]])
            parts[b] += tail_apart(prompt, raw_tail)
            by[b] += [matcher] * (len(parts[b]) - len(by[b]))
        options = settings(
            new,
            **SAMPLED,
            **few,
            seed=turn,
            raw_tail=raw_tail,
            decode_max_damage=damage,
            observer=keep,
        )
        past = None if output is None else output.state
        output = Engine(model).generate(asked, options, past=past)
        for b, row in enumerate(output.rows):
            assert row.ids[:-1] == tuple(chosen[b])  # no merge altered what was chosen
            assert row.generated_spans == merged_spans(decoding.segment(np.array(chosen[b])))
            parts[b].append(list(row.ids[:-1]))
            by[b].append(decoding)
    assert output is not None and len(steps) == turns * new * rows
    for (_, said), step, found in zip(prompts, steps, recomputed(model, prompts), strict=True):
        assert step[1] == found[1]
        error = float((step[0] - found[0]).abs().max())
        assert error <= max(tolerance, 1e-5 if turns > 1 else 0), (said, error)
    rolled_back = any(row.gen_kv_reduction > 0 for row in output.rows)
    assert rolled_back == any(row.generated_spans for row in output.rows)
    if turns == 1 and not (few and infix_free):  # of its long spans 12 tokens may hold none
        assert rolled_back
