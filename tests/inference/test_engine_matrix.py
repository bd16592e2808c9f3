"""The engine over a matrix of tiny random backbones: rollback, batches and empty rules."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

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
from support.merge_modules import give_rows
from support.pairwise import pairwise
from umim_core.inference.engine import Engine
from umim_core.inference.outputs import Forward
from umim_core.merging.merged_model import MergedModel
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet

# transformers computes some parts in float32 whatever the model: GPT-Neo's scores and the softmax
# of Llama-like eager attention.
MATRIX = [
    *((name, "sdpa", torch.float64, 1e-10) for name in CONFIGS if name != "gpt-neo"),
    ("gpt-neo", "eager", torch.float64, 1e-5),
    ("llama", "eager", torch.float64, 1e-5),
    ("gpt2", "eager", torch.float64, 1e-10),
    ("llama", "sdpa", torch.float32, 1e-5),
    ("gpt2", "sdpa", torch.float32, 1e-5),
]


@pairwise(
    case=MATRIX,
    rows=[1, 4],
    infix_free=[True, False],
    raw_tail=[0, 3],
    damage=[None, CHEAP],
    rule_rows=[False, True],
)
@torch.no_grad()
def test_every_step_equals_a_forward_from_scratch(
    case: tuple[str, str, torch.dtype, float],
    rows: int,
    infix_free: bool,
    raw_tail: int,
    damage: float | None,
    rule_rows: bool,
) -> None:
    name, attention, dtype, tolerance = case
    backbone = build(name, dtype, attention)
    module, matcher = module_for(backbone), priced_rules(3, infix_free)
    if rule_rows:
        give_rows(module, matcher.rules.ids_by_order[2][::2].tolist())
    decoding = matcher if damage is None else cheap_rules(matcher)
    prompts = random_prompts(5, rows)
    compared = 0

    def compare(forward: Forward) -> None:
        nonlocal compared
        for b, prompt in enumerate(prompts):
            if forward.running[b]:
                made = [list(forward.generated[b])]
                read = tail_apart(prompt, raw_tail)
                by = [matcher] * len(read) + [decoding] * len(made)
                expected, units = from_scratch(backbone, module, by, [*read, *made])
                assert forward.lengths[b] == units
                error = float((forward.logits[b] - expected).abs().max())
                assert error <= tolerance, (b, forward.generated[b], error)
                compared += 1

    output = Engine(MergedModel(backbone, module, matcher, "compact")).generate(
        prompts,
        settings(
            **SAMPLED,
            seed=0,
            raw_tail=raw_tail,
            decode_max_damage=damage,
            observer=compare,
        ),
    )
    assert compared == rows * 16
    assert any(row.gen_kv_reduction > 0 for row in output.rows)  # something was rolled back


@pytest.mark.parametrize("infix_free", [True, False], ids=["infix-free", "nested"])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_decode_spans_are_the_segmentation_of_the_generated_ids_alone(
    name: str, infix_free: bool
) -> None:
    backbone, seed = build(name), 1
    matcher = random_rules(seed, infix_free)
    output = merging_engine(backbone, matcher).generate(
        random_prompts(seed, 4), settings(**SAMPLED, seed=seed)
    )
    for row in output.rows:
        starts, lengths = matcher.segment(np.array(row.ids[:-1]))
        units = zip(starts.tolist(), lengths.tolist(), strict=True)
        assert row.generated_spans == tuple((s, n) for s, n in units if n > 1)
        assert row.cache_lengths[-1] - row.cache_lengths[0] == len(starts)


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
        theirs = backbone.model.generate(
            torch.tensor(prompt)[None],
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=12,
            do_sample=False,
            pad_token_id=0,
        )
        assert list(row.ids) == theirs[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", list(CONFIGS))
def test_merging_never_alters_the_ids_that_were_chosen(name: str) -> None:
    backbone = build(name)
    chosen: list[list[int]] = []

    def note(forward: Forward) -> None:
        chosen.append(forward.logits.argmax(dim=-1).tolist())

    prompts = random_prompts(4, 8)
    rows = (
        merging_engine(backbone, random_rules(4, infix_free=False))
        .generate(prompts, settings(observer=note))
        .rows
    )
    assert any(row.generated_spans for row in rows)
    assert [list(row.ids) for row in rows] == [list(ids) for ids in zip(*chosen, strict=True)]
    assert [list(row.prompt_ids) for row in rows] == [prompt.tolist() for prompt in prompts]
