"""``umim prune``: from a checkpoint and text to a checkpoint with fewer rules."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from string import ascii_lowercase

import numpy as np
import pytest

from support.command_line import LETTERS, Result, Umim, document
from support.merged_models import fresh_model
from support.ngram_oracle import grams_of
from umim_core.backbone.backbone import load_backbone
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.rules.damage_table import DamageTable
from umim_core.rules.matcher import Matcher
from umim_core.rules.pruning import priced, rules_under
from umim_core.rules.ruleset import RuleSet
from umim_core.text.token_ids import flat, segment_rows

SPANS = ["a b", "c d e", "f g h i", "7 7", "j 7", "k l", "m n o"]
LENGTH = 16
ROWS = 20


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, letters: Path) -> Path:
    """Two checkpoints of the same rules, and text full of their spans; left alone."""
    folder = tmp_path_factory.mktemp("prune")
    backbone = load_backbone(str(letters))
    spans = [tuple(LETTERS.index(word) for word in span.split()) for span in SPANS]
    rules = RuleSet.from_spans(spans, tokenizer_fingerprint=backbone.tokenizer_fingerprint)
    origin = rules.origin.with_options({"segment_length": LENGTH})
    for seed, name in enumerate(("start", "other")):
        merged_model = fresh_model(backbone, replace(rules, origin=origin), seed=seed)
        Checkpoint.of(merged_model).save(folder / name)
    rng = np.random.default_rng(0)
    choices = [*SPANS, *ascii_lowercase]
    words = " ".join(choices[i] for i in rng.integers(0, len(choices), LENGTH * ROWS))
    (folder / "text.txt").write_text(words)
    return folder


@pytest.fixture
def given(made: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Path, Path]:
    """Checkpoint and text, as the command line takes them, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return made / "start", made / "text.txt"


def held_out_reduction(text: Path, rules: RuleSet) -> float:
    """Token reduction of the last tenth of the text."""
    words = text.read_text().split()
    ids = np.array([LETTERS.index(word) for word in words])
    rows = segment_rows(ids, LENGTH)
    return Matcher(rules).token_reduction(*flat(list(rows[-(len(rows) // 10) :])))


def printed(result: Result) -> list[list[str]]:
    """The commands to run next."""
    return [shlex.split(line) for line in result.out.splitlines() if line.startswith("  umim ")]


Given = tuple[Path, Path]


def test_the_budget_is_met_without_digits_and_the_result_generates(
    umim: Umim, given: Given
) -> None:
    done = umim("prune", *given, "--target-tr", 0.1, "--out", "less")
    assert done.code == 0, done.err
    rules = Checkpoint.load("less").rules
    texts = {" ".join(LETTERS[i] for i in row) for n in (2, 3, 4) for row in rules.ids_by_order[n]}
    assert texts < set(SPANS) and not texts & {"7 7", "j 7"}
    assert rules.options.protect == ("digits",)
    before = held_out_reduction(given[1], Checkpoint.load(given[0]).rules)
    assert 0.1 <= held_out_reduction(given[1], rules) < before
    assert "tokens measured" in done.err
    (generate,) = printed(done)
    generate[2] = "a b c"
    assert umim(*generate[1:], "--max-new-tokens", 2).code == 0


def test_a_table_serves_further_targets(
    umim: Umim, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert umim("prune", *given, "--keep-all", "--out", "all").code == 0
    table, whole = DamageTable.load("all/damage"), Checkpoint.load("all").rules
    price = priced(table).require_prices()
    assert whole.require_prices().tolist() == price.tolist() and len(whole) == len(SPANS)
    again = ("--damage", "all/damage", "--target-tr", 0.1, "--out", "less")
    assert umim("prune", "all", given[1], *again).code == 0
    fewer = Checkpoint.load("less").rules
    kept = [span in grams_of(fewer) for span in grams_of(whole)]
    assert not all(kept) and fewer.require_prices().tolist() == price[kept].tolist()
    monkeypatch.chdir("all")
    named = document(umim("prune", ".", given[1], "--damage", "damage", "--keep-all", "--json"))
    assert named["name"] == "pruned/all-all"


def test_the_rules_of_decoding_are_bounded_by_price_or_by_effect(umim: Umim, given: Given) -> None:
    options = ("--keep-all", "--json", "--decode-tr", 0.1)
    first = document(umim("prune", *given, *options, "--out", "one"))
    made = Checkpoint.load("one")
    bound, prices = made.config.decode_max_damage, made.rules.require_prices()
    assert bound == first["decode_max_damage"] and bound in prices.tolist()
    under = rules_under(made.rules, bound)
    assert first["decode_rules"] == len(under) < len(made.rules) == len(SPANS)
    assert 0.1 <= held_out_reduction(given[1], under) == first["decode_token_reduction"]
    again = ("--damage", "one/damage", "--target-tr", 0.1, "--decode-max-damage", 0)
    done = umim("prune", *given, *again, "--out", "two")
    assert "generated tokens merge by 0 rules of at most 0.0 nats per saved token" in done.out
    assert Checkpoint.load("two").config.decode_max_damage == 0.0


@pytest.mark.parametrize("limit", [LENGTH - 1, 2 * LENGTH - 1])
def test_too_few_tokens_are_told_with_their_limit(umim: Umim, given: Given, limit: int) -> None:
    done = umim("prune", *given, "--keep-all", "--limit", limit, "--out", "few")
    assert done.code == 1
    assert f"one held out; got [{limit}] tokens. Give more text or a higher --limit" in done.err


def test_the_table_of_another_module_is_refused(umim: Umim, made: Path, given: Given) -> None:
    options = (given[1], "--target-tr", 0.1, "--out")
    assert umim("prune", given[0], *options, "less").code == 0
    done = umim("prune", made / "other", *options, "more", "--damage", "less/damage")
    assert done.code == 1
    assert "must be the damage table of this checkpoint; got one of another module" in done.err
