"""Following the end of growing texts: worked examples, barriers, and the segmentation law."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from support.span_texts import Spans, spans_and_texts
from support.unit_counts import units_of
from umim_core.errors import ConfigError
from umim_core.rules.matcher import Matcher, SuffixMatcher
from umim_core.rules.ruleset import RuleSet
from umim_core.text.token_ids import MAX_TOKEN_ID

Step = tuple[int, tuple[int, ...]]  # units taken back, ids of the new unit


def step(suffixes: SuffixMatcher, tokens: list[int | None]) -> list[Step | None]:
    """Add one token per row; None for a row that gets none."""
    running = np.array([token is not None for token in tokens])
    made = suffixes.advance(np.array([token or 0 for token in tokens], dtype=np.int64), running)
    steps: list[Step | None] = []
    for row, length in enumerate(made.lengths.tolist()):
        assert not made.spans[row, length:].any()
        span = tuple(made.spans[row, :length].tolist())
        steps.append((int(made.rollback[row]), span) if length else None)
        assert length or not made.rollback[row]
    return steps


def followed(rules: Spans, tokens: list[int]) -> list[Step | None]:
    suffixes = Matcher(RuleSet.from_spans(rules)).suffixes(1)
    return [step(suffixes, [token])[0] for token in tokens]


def test_worked_example_of_the_docstring() -> None:
    a, b, c = 0, 1, 2
    assert followed({(b, c)}, [a, b, c]) == [(0, (a,)), (0, (b,)), (1, (b, c))]


def test_a_token_that_ends_a_row_merges_nothing() -> None:
    suffixes = Matcher(RuleSet.from_spans([(3, 4)])).suffixes(2)
    assert step(suffixes, [3, 3]) == [(0, (3,)), (0, (3,))]
    assert step(suffixes, [None, 4]) == [None, (1, (3, 4))]  # row 0 chose 4 and ended


def test_a_row_that_rests_goes_on_where_it_was() -> None:
    suffixes = Matcher(RuleSet.from_spans([(3, 4, 5)])).suffixes(2)
    for tokens in ([3, 3], [None, 4], [4, None]):
        step(suffixes, tokens)
    assert step(suffixes, [5, 5]) == [(2, (3, 4, 5)), (2, (3, 4, 5))]


@pytest.mark.parametrize("odd", [MAX_TOKEN_ID + 1, (1 << 18) + 2, 1 << 40, -1])
def test_a_token_that_cannot_be_in_a_rule_is_a_barrier(odd: int) -> None:
    # 0 << 18 | (1 << 18 | 2) would be the key of (1, 2)
    steps = followed({(0, 1), (1, 2), (0, 2), (2, 2), (0, 0)}, [0, odd, 2, 2])
    assert steps == [(0, (0,)), (0, (odd,)), (0, (2,)), (1, (2, 2))]


def check_law(rules: Spans, rows: list[list[int]]) -> None:
    """After every token the units are those of the ids so far."""
    suffixes = Matcher(RuleSet.from_spans(rules)).suffixes(len(rows))
    units: list[list[tuple[int, int]]] = [[] for _ in rows]
    for at in range(max(map(len, rows))):
        steps = step(suffixes, [row[at] if at < len(row) else None for row in rows])
        for row, held, made in zip(rows, units, steps, strict=True):
            if made is not None:
                rollback, span = made
                del held[len(held) - rollback :]
                held.append((at + 1 - len(span), len(span)))
                assert span == tuple(row[at + 1 - len(span) : at + 1])
            seen = min(at + 1, len(row))
            assert held == units_of(row[:seen], rules)


@given(case=spans_and_texts(texts=4, most_tokens=40))
def test_units_are_the_segmentation_of_the_ids_whatever_the_rules(
    case: tuple[Spans, list[list[int]]],
) -> None:
    check_law(*case)


@settings(max_examples=100)
@given(case=spans_and_texts(texts=4, most_tokens=40))
def test_units_are_the_segmentation_of_the_ids_for_infix_free_rules(
    case: tuple[Spans, list[list[int]]],
) -> None:
    rules, rows = case
    free = {s for s in rules if not any(s in parts(other) for other in rules)}
    assert RuleSet.from_spans(free).infix_free
    check_law(free, rows)


def parts(span: tuple[int, ...]) -> set[tuple[int, ...]]:
    """All shorter spans inside a span."""
    size = len(span)
    return {span[i:j] for i in range(size) for j in range(i + 2, size + 1) if j - i < size}


@pytest.mark.parametrize(
    ("tokens", "running"), [(3, 3), (3, 2), (2, 3), (1, 1), (2, 1)], ids=lambda rows: str(rows)
)
def test_another_number_of_rows_is_refused_and_changes_nothing(tokens: int, running: int) -> None:
    suffixes = Matcher(RuleSet.from_spans({(1, 2)})).suffixes(2)
    step(suffixes, [1, 1])
    with pytest.raises(ConfigError, match="tokens and running must have 2 rows; got shapes"):
        suffixes.advance(np.full(tokens, 2), np.ones(running, dtype=np.bool_))
    assert step(suffixes, [2, 2]) == [(1, (1, 2))] * 2


def test_tokens_in_rows_and_columns_are_refused() -> None:
    suffixes = Matcher(RuleSet.from_spans({(1, 2)})).suffixes(1)
    with pytest.raises(ConfigError, match=r"got shapes \(1, 1\) and \(1,\)"):
        suffixes.advance(np.ones((1, 1), dtype=np.int64), np.ones(1, dtype=np.bool_))
