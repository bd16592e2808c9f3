"""The engine on a model whose answers are known: cache lengths by hand, switches and limits.

``chain`` is a real Llama whose blocks add nothing and whose head is a shift: after token i it
always chooses i + 1, and a surrogate that copies its last token keeps the chain going. So every
cache length below can be checked by hand.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from support.engine_matrix import settings
from support.tiny_models import random_model, tiny_config
from umim_core.backbone.backbone import Backbone, wrap_backbone
from umim_core.config.form import Merge
from umim_core.errors import GenerationError
from umim_core.inference.engine import Engine
from umim_core.inference.rows import Row
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


def test_a_merge_replaces_its_units_by_one(chain: Backbone) -> None:
    row = follow(chain, [(3, 4)], [0, 1], 5)
    assert row.ids == (2, 3, 4, 5, 6)
    #                       prompt, 2, 3, (3 4), 5; the last token is not fed
    assert row.cache_lengths == (2, 3, 4, 4, 5)
    assert row.generated_spans == ((1, 2),)
    assert row.stop_reason == "length"


def test_a_merge_right_after_the_prompt_leaves_the_prompt_alone(chain: Backbone) -> None:
    assert follow(chain, [(2, 3, 4)], [0, 1], 4).cache_lengths == (2, 3, 4, 3)


def test_a_rule_of_four_single_tokens_takes_three_units_back(chain: Backbone) -> None:
    row = follow(chain, [(2, 3, 4, 5)], [0, 1], 6)
    #                       prompt, 2, 3, 4, (2 3 4 5), 6; the last token is not fed
    assert row.cache_lengths == (2, 3, 4, 5, 3, 4)
    assert row.generated_spans == ((0, 4),)


def test_nested_rules_merge_in_successive_steps(chain: Backbone) -> None:
    row = follow(chain, [(2, 3), (2, 3, 4), (2, 3, 4, 5)], [1], 6)
    assert row.cache_lengths == (1, 2, 2, 2, 2, 3)
    assert row.generated_spans == ((0, 4),)


def test_rules_never_cross_from_the_prompt_into_generated_tokens(chain: Backbone) -> None:
    row = follow(chain, [(1, 2)], [0, 1], 3)
    assert (row.prompt_spans, row.generated_spans) == ((), ())
    assert row.cache_lengths == (2, 3, 4)


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
