"""Prices in a rule directory: kept with their rules, checked when they are read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from umim_core.errors import ArtifactError, RuleSetError
from umim_core.rules.ruleset import RuleSet

SPANS = [(1, 2), (3, 4), (1, 2, 3), (5, 6, 7, 8)]
PRICES = np.array([0.5, 0.0, 1.25, 0.1], np.float32)


@pytest.fixture
def rules() -> RuleSet:
    return replace(RuleSet.from_spans(SPANS), prices=PRICES)


def test_prices_come_back_with_their_rules_and_leave_the_digest(
    rules: RuleSet, tmp_path: Path
) -> None:
    rules.save(tmp_path / "rules")
    back = RuleSet.load(tmp_path / "rules")
    assert back.require_prices().dtype == np.float32
    assert np.array_equal(back.require_prices(), PRICES)
    assert back.digest == rules.digest == RuleSet.from_spans(SPANS).digest


def test_rules_that_are_taken_keep_their_prices(rules: RuleSet) -> None:
    taken = rules.take(np.array([False, True, False, True]))
    assert taken.require_prices().tolist() == PRICES[[1, 3]].tolist()


def test_an_altered_price_is_refused(rules: RuleSet, tmp_path: Path) -> None:
    rules.save(tmp_path / "rules")
    path = tmp_path / "rules" / "prices.npy"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(ArtifactError, match="SHA-256"):
        RuleSet.load(tmp_path / "rules")


@pytest.mark.parametrize(
    ("prices", "found"),
    [
        (PRICES[:3], r"float32 \(3,\)"),
        (PRICES.astype(np.float64), r"float64 \(4,\)"),
        (np.array([0, 0, np.nan, 0], np.float32), "not finite"),
    ],
)
def test_what_is_no_price_of_every_rule_is_refused(prices: np.ndarray, found: str) -> None:
    with pytest.raises(RuleSetError, match=f"must be 4 finite float32 numbers.*{found}"):
        replace(RuleSet.from_spans(SPANS), prices=prices)


def test_rules_without_prices_name_the_remedy() -> None:
    with pytest.raises(RuleSetError, match=r"4 rules without prices\. Measure them: umim prune"):
        RuleSet.from_spans(SPANS).require_prices()
