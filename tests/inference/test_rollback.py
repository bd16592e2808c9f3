"""Each kind of rollback by name, against a forward from scratch after every step (reliability 10).

The model is made to choose given tokens, so that what merges, and when, can be written down::

    rules (1 2 3 4), chosen 1 2 3 4 5      units in the cache behind the prompt
        1  2  3                            1  2  3
        4 completes the rule               1  2  3 taken back, one surrogate fed:  1
        5                                  2
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as budget
from hypothesis import strategies as st
from torch import Tensor

from support.engine_matrix import build, from_scratch, module_for, settings
from support.merged_models import placed
from support.pairwise import pairwise
from umim_core.config.form import UnitPositions
from umim_core.inference.engine import Engine
from umim_core.inference.outputs import Forward, Generation, merged_spans
from umim_core.merging.merged_model import MergedModel
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet

TOLERANCES = [(torch.float64, 1e-10), (torch.float32, 1e-5)]
LONG = (1, 2, 3, 4, 5, 6, 7)
NESTED = ((1, 2), (1, 2, 3), (1, 2, 3, 4))


class Case(NamedTuple):
    """Tokens that are chosen under some rules, and the cache lengths that follow by hand."""

    rules: tuple[tuple[int, ...], ...]
    prompt: tuple[int, ...]
    chosen: tuple[int, ...]  # the last one is never fed
    lengths: tuple[int, ...]  # units in the cache after the prompt and after every fed token
    end: int | None = None  # the token that ends the row, if any


CASES = {
    "two single tokens": Case(((1, 2),), (9, 8), (7, 1, 2, 5, 6), (2, 3, 4, 4, 5)),
    "three single tokens": Case(((1, 2, 3),), (9, 8), (1, 2, 3, 5, 6), (2, 3, 4, 3, 4)),
    "four single tokens": Case(((1, 2, 3, 4),), (9, 8), (1, 2, 3, 4, 5, 6), (2, 3, 4, 5, 3, 4)),
    "a merged unit and a single token": Case(
        ((1, 2), (1, 2, 3, 4)), (9,), (1, 2, 3, 4, 5, 6), (1, 2, 2, 3, 2, 3)
    ),
    "merges in successive steps": Case(NESTED, (9,), (1, 2, 3, 4, 5, 6), (1, 2, 2, 2, 2, 3)),
    "two merges side by side": Case(((1, 2), (3, 4)), (9,), (1, 2, 3, 4, 5), (1, 2, 2, 3, 3)),
    "seven single tokens": Case((LONG,), (9,), (*LONG, 8, 9), (1, 2, 3, 4, 5, 6, 7, 2, 3)),
    "a long rule over merged units": Case(
        ((1, 2), (4, 5, 6), LONG), (9,), (*LONG, 8, 9), (1, 2, 2, 3, 4, 5, 4, 2, 3)
    ),
    "sixteen tokens of one": Case(
        ((1,) * 16, (1, 1)), (9,), (1,) * 18, (1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8, 9, 2, 3)
    ),
    "a merge right after the prompt": Case(((1, 2),), (9, 8, 7), (1, 2, 5), (3, 4, 4)),
    "a prompt that ends in the rule's first token": Case(((1, 2),), (9, 1), (2, 5, 6), (2, 3, 4)),
    "an end that completes a rule": Case(((1, 2),), (9,), (7, 1, 2), (1, 2, 3), end=2),
}


def compared(
    cases: list[Case],
    name: str,
    dtype: torch.dtype,
    tolerance: float,
    unit_positions: UnitPositions = "compact",
) -> Generation:
    """Generate what the cases (of one rule set) plan, and compare every step of every row."""
    [rules] = {case.rules for case in cases}
    [end] = {case.end for case in cases}
    plans = {case.prompt: case.chosen for case in cases}
    backbone = build(name, dtype)
    matcher = Matcher(RuleSet.from_spans(rules))
    module = module_for(backbone, matcher.rules.longest)
    seen = 0

    def planned(input_ids: Tensor, scores: Tensor) -> Tensor:
        """Let a row choose what was planned for its prompt, whatever the scores say."""
        ids = tuple(input_ids[0].tolist())
        made = {prompt: ids[len(prompt) :] for prompt in plans if ids[: len(prompt)] == prompt}
        [token] = {plans[p][len(m)] for p, m in made.items() if plans[p][: len(m)] == m}
        forced = torch.full_like(scores, -torch.inf)
        forced[:, token] = 0.0
        return forced

    def compare(forward: Forward) -> None:
        nonlocal seen
        for b, case in enumerate(cases):
            if not forward.running[b]:
                continue
            made = forward.generated[b]
            prompt = (matcher, [case.prompt, made])
            ((expected, units),) = from_scratch(backbone, module, [prompt], unit_positions)
            assert int(forward.lengths[b]) == units == case.lengths[len(made)]
            assert float((forward.logits[b] - expected).abs().max()) <= tolerance, made
            seen += 1

    output = Engine(placed(MergedModel(backbone, module, matcher), unit_positions)).generate(
        [case.prompt for case in cases],
        settings(
            max(len(case.chosen) for case in cases),
            eos_token_id=end,
            logits_processor=[planned],
            observer=compare,
        ),
    )
    assert [row.ids for row in output.rows] == [case.chosen for case in cases]
    assert [tuple(row.cache_lengths) for row in output.rows] == [case.lengths for case in cases]
    cuts = [matcher.segment(np.array(case.chosen[:-1], dtype=np.int64)) for case in cases]
    assert [row.generated_spans for row in output.rows] == [merged_spans(cut) for cut in cuts]
    assert seen == sum(len(case.chosen) for case in cases)
    return output


@pairwise(
    planned=list(CASES),
    name=["llama", "gpt2"],
    precision=TOLERANCES,
    unit_positions=["compact", "preserved"],
)
@torch.no_grad()
def test_every_step_equals_a_forward_from_scratch(
    planned: str, name: str, precision: tuple[torch.dtype, float], unit_positions: UnitPositions
) -> None:
    case = CASES[planned]
    [row] = compared([case], name, *precision, unit_positions).rows
    if case.end is not None:
        assert (row.stop_reason, row.generated_spans) == ("eos", ())


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@torch.no_grad()
def test_rows_that_roll_back_different_numbers_of_units_in_one_step_stay_apart(name: str) -> None:
    rules = ((1, 2), (3, 4, 5), (6, 7, 8, 9))
    rows = [
        Case(rules, (10,), (6, 7, 8, 9, 0, 0), (1, 2, 3, 4, 2, 3)),
        Case(rules, (0, 10), (0, 3, 4, 5, 0, 0), (2, 3, 4, 5, 4, 5)),
        Case(rules, (0, 0, 10), (0, 0, 1, 2, 0, 0), (3, 4, 5, 6, 6, 7)),
        Case(rules, (0, 0, 0, 10), (0, 0, 0, 0, 0, 0), (4, 5, 6, 7, 8, 9)),
    ]
    output = compared(rows, name, torch.float64, 1e-10)
    assert [row.cache_lengths[4] - row.cache_lengths[3] for row in output.rows] == [-2, -1, 0, 1]


# Rules over few tokens, so that most chosen tokens complete one, of any number of units.
TOKENS = st.integers(0, 3)
SPANS = st.lists(TOKENS, min_size=2, max_size=7).map(tuple)


@given(
    rules=st.sets(SPANS, min_size=1, max_size=12).map(sorted),
    prompt=st.lists(TOKENS, min_size=1, max_size=5),
    chosen=st.lists(TOKENS, min_size=2, max_size=14),
    whole=st.integers(0, 7),
)
@budget(max_examples=25)
@torch.no_grad()
def test_any_rules_and_any_tokens(
    rules: list[tuple[int, ...]], prompt: list[int], chosen: list[int], whole: int
) -> None:
    if whole > 1:  # a long rule seldom matches by chance
        rules = sorted({*rules, tuple(chosen[:whole])} - {tuple(chosen[:1])})
    matcher = Matcher(RuleSet.from_spans(rules))

    def units(ids: list[int]) -> int:
        return len(matcher.segment(np.array(ids, dtype=np.int64))[0])

    lengths = tuple(units(prompt) + units(chosen[:fed]) for fed in range(len(chosen)))
    case = Case(tuple(rules), tuple(prompt), tuple(chosen), lengths)
    [row] = compared([case], "llama", torch.float64, 1e-10).rows
    assert tuple(row.cache_lengths) == lengths
