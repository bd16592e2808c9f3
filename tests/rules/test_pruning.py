"""Pruning to a token reduction: prices, exact budgets, protected tokens, the damage table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from support.damage_tables import ORIGIN, table_of
from support.ngram_oracle import grams_of
from support.tiny_models import word_tokenizer
from umim_core.errors import ArtifactError, ConfigError, RuleSetError
from umim_core.rules.damage_table import DamageTable
from umim_core.rules.matcher import Matcher
from umim_core.rules.pruning import check_target, cut_to_reduction, prices, prune_by_damage
from umim_core.rules.ruleset import RuleSet
from umim_core.text.token_ids import flat


def test_a_rule_pays_for_what_it_adds_to_the_rules_inside_it() -> None:
    """Means are exact here: so many occurrences leave the prior no weight."""
    spans = [(1, 2), (5, 6), (7, 8), (1, 2, 3), (4, 5, 6), (5, 6, 7, 8), (1, 2, 3, 0, 7, 8)]
    means = [0.2, 2.0, 0.1, 1.4, 1.4, 2.7, 1.9]
    seen = [10**9] * len(means)
    kl = [mean * 10**9 for mean in means]
    wanted = [
        0.2,
        2.0,
        0.1,
        1.4 - 0.2,  # instead of 0.7: (1, 2) would stay
        1.4 / 2,  # (5, 6) is dearer, so it goes first
        max(2.7 / 3, (2.7 - 2.1) / (3 - 2)),  # two pairs inside
        max(1.9 / 5, (1.9 - 1.5) / (5 - 3)),  # a triple and a pair
    ]
    assert prices(table_of(seen, seen, kl, spans)) == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("target", [0.05, 0.15, 0.25])
def test_the_reduction_is_met_within_one_rule(seed: int, target: float) -> None:
    rng = np.random.default_rng(seed)
    spans = {tuple(rng.integers(0, 8, rng.integers(2, 5)).tolist()) for _ in range(80)}
    rules = RuleSet.from_spans(spans)
    text = flat([rng.integers(0, 8, 64) for _ in range(6)])
    price = rng.random(len(rules))
    cut = cut_to_reduction(rules, price, text, target)
    assert cut.dearest == price[cut.kept].max() < price[~cut.kept].min()
    assert list(grams_of(cut.rules)) == [
        s for s, kept in zip(grams_of(rules), cut.kept, strict=True) if kept
    ]
    assert cut.token_reduction == Matcher(cut.rules).token_reduction(*text) >= target
    less = cut.kept & (price < cut.dearest)
    assert Matcher(rules.take(less)).token_reduction(*text) < target


def test_tokens_that_a_dropped_rule_frees_count_for_the_others() -> None:
    """Without (1, 2, 3) its text is saved by (3, 4), which never matched before."""
    rules = RuleSet.from_spans([(3, 4), (5, 6), (1, 2, 3)])
    text = flat([[1, 2, 3, 4, 0, 5, 6, 0, 0, 0]])
    assert Matcher(rules).token_reduction(*text) == 0.3
    cut = cut_to_reduction(rules, np.array([1.0, 2.0, 3.0]), text, 0.2)
    assert (list(grams_of(cut.rules)), cut.token_reduction) == ([(3, 4), (5, 6)], 0.2)


def test_rules_with_protected_tokens_go_first() -> None:
    numbered = word_tokenizer(["<eos>", "in", "1990", "of", "the", "a", "B2", "c", "d"])
    table = table_of([9, 9, 9, 9], [9, 9, 9, 9], [0.1, 5.0, 0.1, 5.0])
    text = flat([[1, 2, 3, 4, 5, 6, 7, 8]])
    assert list(grams_of(prune_by_damage(table, text, 0.1, numbered).rules)) == [(1, 2, 3)]
    cut = prune_by_damage(table, text, 0.1, numbered, ("digits",))
    assert list(grams_of(cut.rules)) == [(3, 4)]
    assert cut.rules.options.protect == ("digits",)
    price = prices(table).astype(np.float32)
    assert cut.rules.origin.max_damage == cut.dearest == price[1]
    assert cut.rules.require_prices().tolist() == price[cut.kept].tolist()


@pytest.mark.parametrize("target", [0.0, -0.1, 0.9375, float("nan")])
def test_a_target_that_no_rules_can_have_is_refused(target: float) -> None:
    with pytest.raises(ConfigError, match="must lie above 0 and below"):
        check_target(target)


def test_a_target_that_these_rules_do_not_reach_is_refused() -> None:
    rules, text = RuleSet.from_spans([(1, 2), (3, 4)]), flat([[1, 2, 0, 0]])
    assert cut_to_reduction(rules, np.zeros(2), text, 0.25).token_reduction == 0.25
    with pytest.raises(RuleSetError, match=r"reduction of 0.5 .*; got 0.25 with all 2 "):
        cut_to_reduction(rules, np.zeros(2), text, 0.5)


TABLE = ([6, 0, 2, 0], [5, 0, 2, 0], [3.0, 0.0, 4.0, 0.0])


def test_rare_rules_are_drawn_to_their_length_and_that_to_all() -> None:
    found = table_of(*TABLE).mean_kl()
    overall = 7.0 / 8
    pairs, triples = (3.0 + 4 * overall) / (6 + 4), (4.0 + 4 * overall) / (2 + 4)
    wanted = [(3.0 + 4 * pairs) / (6 + 4), pairs, (4.0 + 4 * triples) / (2 + 4), overall]
    assert found == pytest.approx(wanted)


def test_a_table_comes_back_as_it_was_written(tmp_path: Path) -> None:
    made = table_of(*TABLE)
    made.save(tmp_path / "damage")
    found = DamageTable.load(tmp_path / "damage")
    assert found.rules.digest == made.rules.digest
    assert found.origin == ORIGIN
    assert found.saved_tokens.tolist() == [5, 0, 4, 0]  # of units of the whole text
    for name in ("occurrences", "merges", "kl"):
        assert np.array_equal(getattr(found, name), getattr(made, name))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (([6, 0], [5, 0], [3.0, 0.0]), "must be 4 numbers, one a rule"),
        (([6, 0, 2, 0], [7, 0, 2, 0], TABLE[2]), "merges <= occurrences"),
        (([6, 0, 2, 0], [-1, 0, 2, 0], TABLE[2]), "0 <= merges"),
        (([6, 0, 2, 0], TABLE[1], [3.0, 0.0, float("nan"), 0.0]), "a finite KL"),
        (([6.0, 0.0, 2.0, 0.0], TABLE[1], TABLE[2]), "float64"),
    ],
    ids=["shape", "merges", "negative", "nan", "type"],
)
def test_numbers_that_cannot_be_are_refused(
    values: tuple[list[int], list[int], list[float]], message: str
) -> None:
    with pytest.raises(ArtifactError, match=message):
        table_of(*values)
