"""The damage table: estimates, files, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from support.damage_tables import ORIGIN, SPANS, table_of
from umim_core.errors import ArtifactError, RuleSetError
from umim_core.rules.damage_table import DamageTable
from umim_core.rules.ruleset import RuleSet

TABLE = ([6, 0, 2, 0], [5, 0, 2, 0], [3.0, 0.0, 4.0, 0.0])


def test_rare_rules_are_drawn_to_their_length_and_that_to_all() -> None:
    found = table_of(*TABLE).mean_kl()
    overall = 7.0 / 8
    pairs, triples = (3.0 + 4 * overall) / (6 + 4), (4.0 + 4 * overall) / (2 + 4)
    wanted = [(3.0 + 4 * pairs) / (6 + 4), pairs, (4.0 + 4 * triples) / (2 + 4), overall]
    assert found == pytest.approx(wanted)


def test_saved_tokens_are_those_of_units_of_the_whole_text() -> None:
    assert table_of(*TABLE).saved_tokens.tolist() == [5, 0, 4, 0]


def test_a_table_comes_back_as_it_was_written(tmp_path: Path) -> None:
    made = table_of(*TABLE)
    made.save(tmp_path / "damage")
    found = DamageTable.load(tmp_path / "damage")
    assert found.rules.digest == made.rules.digest
    assert found.origin == ORIGIN
    for name in ("occurrences", "merges", "kl"):
        assert np.array_equal(getattr(found, name), getattr(made, name))


@pytest.mark.parametrize("name", ["kl.npy", "rules/rules.parquet", "manifest.json"])
def test_an_altered_file_is_refused(tmp_path: Path, name: str) -> None:
    table_of(*TABLE).save(tmp_path / "damage")
    path = tmp_path / "damage" / name
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)
    with pytest.raises(ArtifactError):
        DamageTable.load(tmp_path / "damage")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (([6, 0], [5, 0], [3.0, 0.0]), "must be 4 numbers, one a rule"),
        (([6, 0, 2, 0], [7, 0, 2, 0], TABLE[2]), "merges <= occurrences"),
        (([6, 0, 2, 0], TABLE[1], [3.0, 0.0, float("nan"), 0.0]), "a finite KL"),
        (([6.0, 0.0, 2.0, 0.0], TABLE[1], TABLE[2]), "float64"),
    ],
    ids=["shape", "merges", "nan", "type"],
)
def test_numbers_that_cannot_be_are_refused(
    values: tuple[list[int], list[int], list[float]], message: str
) -> None:
    with pytest.raises(ArtifactError, match=message):
        table_of(*values)


def test_places_of_spans_that_are_no_rules_are_refused() -> None:
    rules = RuleSet.from_spans([*SPANS, (0, 0), (1, 0), (0, 1)])
    for n in (2, 3, 4):
        own = rules.ids_by_order[n]
        before = sum(count for m, count in rules.counts_by_order.items() if m < n)
        assert rules.places(own).tolist() == [before + at for at in range(len(own))]
    with pytest.raises(RuleSetError, match=r"rules of the set; got \[1, 3\]"):
        rules.places(np.array([[1, 2], [1, 3]]))
