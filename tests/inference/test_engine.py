"""The engine reads, feeds and gives back the right things, by hand and as transformers does."""

from __future__ import annotations

from dataclasses import replace

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
from support.pairwise import pairwise
from support.tiny_models import random_model, tiny_config, written_by_transformers
from umim_core.backbone.backbone import Backbone, wrap_backbone
from umim_core.config.form import Merge, UnitPositions
from umim_core.errors import GenerationError
from umim_core.inference.engine import Engine
from umim_core.inference.outputs import Forward, Row
from umim_core.merging.merged_model import MergedModel
from umim_core.rules.matcher import Matcher
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


def follow(
    chain: Backbone, rules: list[tuple[int, ...]], prompt: list[int], new: int, **options: object
) -> Row:
    engine = Engine(MergedModel(chain, LastToken(), Matcher(RuleSet.from_spans(rules)), "compact"))
    return engine.generate([prompt], settings(new, **options)).rows[0]


def test_prompt_spans_shorten_the_prefill(chain: Backbone) -> None:
    row = follow(chain, [(0, 1), (4, 5, 6)], [0, 1, 9, 4, 5, 6], 2)
    assert row.prompt_spans == ((0, 2), (3, 3))
    assert row.cache_lengths[0] == 3
    assert row.ids == (7, 8)


def test_an_eos_that_would_complete_a_rule_ends_the_row_unmerged(chain: Backbone) -> None:
    row = follow(chain, [(3, 4)], [0, 1], 9, eos_token_id=4)
    assert row.ids == (2, 3, 4)
    assert row.generated_spans == ()
    assert row.cache_lengths == (2, 3, 4)
    assert row.stop_reason == "eos"


@pytest.mark.parametrize(
    ("merge", "lengths"), [("all", (1, 2, 2)), ("prompt", (1, 2, 3)), ("none", (2, 3, 4))]
)
def test_what_is_merged_is_what_was_asked_for(
    chain: Backbone, merge: Merge, lengths: tuple[int, ...]
) -> None:
    engine = Engine(
        MergedModel(chain, LastToken(), Matcher(RuleSet.from_spans([(0, 1), (2, 3)])), "compact")
    )
    output = engine.generate([[0, 1]], settings(3, merge=merge))
    assert output.rows[0].cache_lengths == lengths
    assert output.rows[0].ids == (2, 3, 4)


def test_reductions_are_the_realised_ones(chain: Backbone) -> None:
    engine = Engine(
        MergedModel(chain, LastToken(), Matcher(RuleSet.from_spans([(0, 1), (3, 4)])), "compact")
    )
    output = engine.generate([[0, 1], [9, 0, 1, 2]], settings(4))
    assert [row.token_reduction for row in output.rows] == [1 / 2, 1 / 4]
    # row 0 feeds 2 3 4 and keeps 2 (3 4); row 1 feeds 3 4 5 and keeps (3 4) 5
    assert [row.gen_kv_reduction for row in output.rows] == pytest.approx([1 / 3, 1 / 3])


def test_a_row_that_has_ended_gains_nothing(chain: Backbone) -> None:
    lengths: list[list[int]] = []
    Engine(MergedModel.without_merging(chain)).generate(
        [[0], [5]],
        settings(
            5, eos_token_id=2, observer=lambda forward: lengths.append(forward.lengths.tolist())
        ),
    )
    # row 0 chooses 1 and 2 (the end); row 1 goes on alone
    assert lengths == [[1, 1], [2, 2], [2, 3], [2, 4], [2, 5]]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "at least one prompt"),
        ([[1], []], "prompt 1"),
        ([[1, 16]], "between 0 and 15; got prompt 0: 1 .. 16"),
        ([[-1]], "between 0 and 15"),
        ([np.zeros((1, 2), dtype=np.int64)], "1-D"),
        ([np.array([0.5])], "1-D array of at least one token id"),
    ],
)
def test_bad_prompts_are_refused(chain: Backbone, prompts: list[object], message: str) -> None:
    with pytest.raises(GenerationError, match=message):
        Engine(MergedModel.without_merging(chain)).generate(prompts, settings(2))


@pairwise(name=list(CONFIGS), dtype=[torch.float32, torch.float64], infix_free=[True, False])
def test_a_row_alone_equals_the_row_in_a_batch(
    name: str, dtype: torch.dtype, infix_free: bool
) -> None:
    backbone = build(name, dtype)
    engine = merging_engine(backbone, random_rules(1, infix_free))
    prompts = random_prompts(2, 8)
    ends = settings(
        eos_token_id=[1, 3, 7, 9], repetition_penalty=1.5
    )  # rows end at different steps
    together = engine.generate(prompts, ends)
    assert len({len(row.ids) for row in together.rows}) > 1
    for prompt, row in zip(prompts, together.rows, strict=True):
        assert engine.generate([prompt], ends).rows == (row,)


@pytest.mark.parametrize("name", list(CONFIGS))
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_empty_rules_give_the_base_models_bits_at_batch_one(name: str, attention: str) -> None:
    backbone = build(name, torch.float32, attention)
    engine = Engine(MergedModel(backbone, None, Matcher(RuleSet.from_spans([])), "compact"))
    for prompt in random_prompts(9, 3):
        ours: list[Tensor] = []
        output = engine.generate(
            [prompt],
            settings(observer=lambda forward, ours=ours: ours.append(forward.logits)),
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


POLICIES = ("compact", "preserved")


def widths_of(backbone: Backbone, seen: list[int]) -> torch.utils.hooks.RemovableHandle:
    """Record how many units per row each forward of the trunk reads."""

    def note(_: object, __: object, inputs: dict[str, torch.Tensor]) -> None:
        seen.append(inputs["inputs_embeds"].shape[1])

    return backbone.model.base_model.register_forward_pre_hook(note, with_kwargs=True)


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
