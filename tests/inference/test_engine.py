"""The engine reads, feeds and gives back the right things, by hand and as transformers does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from support.engine_matrix import (
    CONFIGS,
    SAMPLED,
    build,
    merging_engine,
    module_for,
    random_prompts,
    random_rules,
    settings,
)
from support.merged_models import placed, random_merged_model
from support.pairwise import pairwise
from support.tiny_models import forwards_of, random_model, tiny_config, written_by_transformers
from umim_core.backbone.backbone import Backbone, wrap_backbone
from umim_core.config.form import UnitPositions
from umim_core.errors import GenerationError
from umim_core.inference.batch import Batch, exhaust
from umim_core.inference.engine import Engine
from umim_core.inference.outputs import Forward
from umim_core.inference.unit_cache import UnitCache
from umim_core.merging.merged_model import MergedModel
from umim_core.rules.matcher import Matcher, Parts, PromptIds
from umim_core.rules.ruleset import RuleSet


class LastToken:
    """A span merger that copies the last token's embedding."""

    def __call__(self, spans: Tensor, lengths: Tensor) -> Tensor:
        return spans[torch.arange(len(spans)), lengths - 1]


@pytest.fixture(scope="module")
def chain() -> Backbone:
    model = random_model(
        tiny_config(vocab_size=16, num_hidden_layers=1, max_position_embeddings=32)
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(16))
        model.lm_head.weight.copy_(torch.eye(16).roll(1, dims=0))  # token i raises i + 1
    return wrap_backbone(model, None)


def chained(chain: Backbone, rules: list[tuple[int, ...]]) -> Engine:
    return Engine(MergedModel(chain, LastToken(), Matcher(RuleSet.from_spans(rules))))


# Rules, prompts and options; of each row the ids, merged spans, units after each step, and the end.
FOLLOWED = {
    "prompt spans shorten the prefill": (
        [(0, 1), (4, 5, 6)], [[0, 1, 9, 4, 5, 6]], {"max_new_tokens": 2},
        [((7, 8), ((0, 2), (3, 3)), (), (3, 4), "length")],
    ),
    "an end that would complete a rule stays unmerged": (
        [(3, 4)], [[0, 1]], {"eos_token_id": 4},
        [((2, 3, 4), (), (), (2, 3, 4), "eos")],
    ),
    "all": (
        [(0, 1), (2, 3)], [[0, 1]], {"max_new_tokens": 3},
        [((2, 3, 4), ((0, 2),), ((0, 2),), (1, 2, 2), "length")],
    ),
    "prompt": (
        [(0, 1), (2, 3)], [[0, 1]], {"max_new_tokens": 3, "merge": "prompt"},
        [((2, 3, 4), ((0, 2),), (), (1, 2, 3), "length")],
    ),
    "none": (
        [(0, 1), (2, 3)], [[0, 1]], {"max_new_tokens": 3, "merge": "none"},
        [((2, 3, 4), (), (), (2, 3, 4), "length")],
    ),
    "a row that has ended gains nothing": (
        [(2, 9)], [[0], [5]], {"max_new_tokens": 5, "eos_token_id": 2},
        [((1, 2), (), (), (1, 2), "eos"), ((6, 7, 8, 9, 10), (), (), (1, 2, 3, 4, 5), "length")],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("rules", "prompts", "options", "rows"), FOLLOWED.values(), ids=FOLLOWED)
def test_what_merges_and_when_is_as_written_by_hand(
    chain: Backbone, rules: Any, prompts: Any, options: dict[str, Any], rows: Any
) -> None:
    output = chained(chain, rules).generate(prompts, settings(**options))
    assert rows == [
        (row.ids, row.prompt_spans, row.generated_spans, tuple(row.cache_lengths), row.stop_reason)
        for row in output.rows
    ]


def test_reductions_are_the_realised_ones(chain: Backbone) -> None:
    engine, prompts = chained(chain, [(0, 1), (3, 4)]), [[0, 1], [9, 0, 1, 2]]
    for row in Batch(engine).join(prompts, settings(4)):  # before its first token
        assert (row.gen_kv_reduction, row.cumulative_kv_reduction) == (0, 0)
    rows = engine.generate(prompts, settings(4)).rows
    assert [row.token_reduction for row in rows] == [1 / 2, 1 / 4]
    # row 0 feeds 2 3 4 and keeps 2 (3 4); row 1 feeds 3 4 5 and keeps (3 4) 5
    assert [row.gen_kv_reduction for row in rows] == pytest.approx([1 / 3, 1 / 3])
    # units of generated tokens after each: 1 2 2 and 1 1 2, of 1 2 3
    assert [row.cumulative_kv_reduction for row in rows] == pytest.approx([1 / 6, 1 / 3])


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "at least one prompt"),
        ([[1], []], "prompt 1"),
        ([[1, 16]], "between 0 and 15; got prompt 0: 16"),
        ([[-1]], "between 0 and 15"),
        ([np.zeros((1, 2), dtype=np.int64)], "1-D"),
        ([np.array([0.5])], "1-D array of token ids"),
        ([[1, [2]]], "1-D array of token ids"),
        ([[1] * 32], "32 positions; got 32 prompt positions . 2 new tokens"),
    ],
)
def test_bad_prompts_are_refused(chain: Backbone, prompts: list[object], message: str) -> None:
    with pytest.raises(GenerationError, match=message):
        Engine(MergedModel.without_merging(chain)).generate(prompts, settings(2))


@pytest.mark.parametrize(
    "parts",
    [((2, 3), (0, 1)), ((0, 2), (1, 3)), ((3, 2),), ((-1, 2),), ((0, 4),), ((0, 1), (4, 4))],
)
def test_parts_of_a_prompt_that_are_not_apart_are_refused(parts: Parts) -> None:
    with pytest.raises(GenerationError, match="in the 3 tokens, in order and apart; got"):
        PromptIds(np.array([1, 2, 3]), parts)


@pairwise(
    name=list(CONFIGS),
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


@pytest.mark.parametrize("name", list(CONFIGS))
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


@pytest.mark.parametrize("name", list(CONFIGS))
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


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_turns_without_rules_equal_one_text_that_is_read_once(name: str) -> None:
    backbone = build(name)
    engine = Engine(MergedModel.without_merging(backbone))
    first = engine.generate([[1, 2]], settings(3, **SAMPLED, num_return_sequences=2, seed=0))
    with forwards_of(backbone.trunk) as seen:
        second = engine.generate([[4], [5, 6]], settings(3), past=first.state)
    assert seen == [(2, 3), (2, 1), (2, 1)]  # the unfed token and the new ones; one a step
    for b, added in enumerate(([4], [5, 6])):
        whole, row = [1, 2, *first.rows[b].ids, *added], second.rows[b]
        assert row.ids == engine.generate([whole], settings(3)).rows[0].ids
        assert row.prompt_ids == (first.rows[b].ids[-1], *added)
        assert second.state.raw_ids[b] == (*whole, *row.ids)


def test_what_cannot_continue_a_state_is_refused_and_leaves_it_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backbone = build("gpt2")
    engine = Engine(MergedModel.without_merging(backbone))
    state = engine.generate([[1, 2, 3]], settings(2)).state
    for other, prompts, new, message in (
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
    running = engine.steps([[4, 5]], config, state)
    next(running)
    both = engine.generate([[4, 5], [6]], settings(4), past=state)  # a row for several prompts
    assert both.rows[1] == engine.generate([[6]], settings(4), past=state).rows[0]
    assert exhaust(running).rows == expected
    with pytest.raises(GenerationError, match="one prompt per row; got 1 prompts, 2 rows"):
        engine.generate([[4]], settings(4), past=both.state)
