"""Recommendations of a checkpoint that callers override: priced rules, what merges, a raw tail."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from support.merged_models import fresh_model
from umim_core import UMIM
from umim_core.backbone.backbone import Backbone
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.errors import CheckpointError, ConfigError, RuleSetError
from umim_core.model.compression import compress_text
from umim_core.rules.pruning import recording_reductions
from umim_core.rules.ruleset import RuleSet
from umim_core.store.artifacts import read_json, write_json, write_manifest

TEXT = "w1 w2 w9 w3 w4 w5 w6 w7 w8 w9"  # w1 w2, w3 w4 w5 and w6 w7 w8 w9 merge
PRICES = (0.05, 0.2, 0.8)


def alter_config(checkpoint: Path, changes: Mapping[str, object]) -> None:
    """Write other values into a checkpoint's config.json."""
    write_json(checkpoint / "config.json", dict(read_json(checkpoint / "config.json")) | changes)
    write_manifest(checkpoint, kind="checkpoint", schema=2, body={})


@pytest.fixture
def priced(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    made = Checkpoint.load(tiny_checkpoint)
    rules = replace(made.rules, prices=np.array(PRICES, np.float32))
    ids = np.array([int(word[1:]) for word in TEXT.split()])
    rules = recording_reductions(rules, (ids, np.array([0, len(ids)])))
    made.with_contents(made.module, rules).save(tmp_path / "priced")
    return tmp_path / "priced"


@pytest.mark.parametrize(
    ("own", "budget", "units"),
    [(None, 0.1, 9), (None, 0.5, 7), (0.1, None, 9), (0.1, 0.5, 7), (0.1, math.inf, 4)],
)
def test_dearer_rules_go(
    priced: Path, tmp_path: Path, own: float | None, budget: float | None, units: int
) -> None:
    made = Checkpoint.load(priced)
    replace(made, config=made.config.model_copy(update={"budget": own})).save(tmp_path / "own")
    umim = UMIM.from_pretrained(tmp_path / "own", budget=budget)
    assert umim.checkpoint.config.budget is None
    if budget is None:
        assert len(compress_text(TEXT, str(tmp_path / "own")).units) == units
    assert len(umim.compress(TEXT).units) == units
    umim.save_pretrained(tmp_path / "again")
    assert Checkpoint.load(tmp_path / "again").rules.digest == umim.rules.digest


@pytest.mark.parametrize(
    ("target", "units"), [(0.05, 9), (0.1, 9), (0.2, 7), (0.3, 7), (0.31, 4), (0.6, 4)]
)
def test_the_cheapest_rules_stay_that_reach_a_reduction(
    priced: Path, tmp_path: Path, target: float, units: int
) -> None:
    umim = UMIM.from_pretrained(priced, target_tr=target)
    assert len(umim.compress(TEXT).units) == units <= math.ceil(10 * (1 - target))
    umim.save_pretrained(tmp_path / "again")
    if len(umim.rules) < len(PRICES):  # what is left saves another share of each price
        with pytest.raises(RuleSetError, match="umim prune CHECKPOINT TEXTS --keep-all"):
            UMIM.from_pretrained(tmp_path / "again", target_tr=target)


def test_a_reduction_that_cannot_be_reached_or_told_is_refused(
    priced: Path, tiny_checkpoint: Path
) -> None:
    with pytest.raises(RuleSetError, match=r"a token reduction of 0\.7; got 0\.6 with all 3"):
        UMIM.from_pretrained(priced, target_tr=0.7)
    with pytest.raises(RuleSetError, match="umim prune CHECKPOINT TEXTS --keep-all"):
        UMIM.from_pretrained(tiny_checkpoint, target_tr=0.1)
    made = Checkpoint.load(priced)
    rules = replace(made.rules, origin=Checkpoint.load(tiny_checkpoint).rules.origin)
    with pytest.raises(RuleSetError, match="recorded with their prices; got 3 rules without it"):
        UMIM.from_pretrained(made.with_contents(made.module, rules), target_tr=0.1)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        *(({"target_tr": t}, "reduction must lie above 0") for t in (0, 0.95, math.nan, "0.1")),
        *(({"budget": b}, "must be a number of nats") for b in (-0.1, math.nan, "0.1", True)),
        ({"budget": 0.1, "target_tr": 0.1}, "rules are chosen by a budget or by target_tr"),
    ],
)
def test_what_chooses_no_rules_is_refused_first(options: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        UMIM.from_pretrained("no-such-checkpoint", **options)


def test_a_budget_needs_prices_and_a_rule(priced: Path, tiny_checkpoint: Path) -> None:
    assert len(UMIM.from_pretrained(priced, budget=0.5, protect="w1$").rules) == 1
    with pytest.raises(RuleSetError, match=r"the cheapest of 3 rules costs 0\.05"):
        UMIM.from_pretrained(priced, budget=0.01)
    with pytest.raises(RuleSetError, match="umim prune CHECKPOINT TEXTS --keep-all"):
        UMIM.from_pretrained(tiny_checkpoint, budget=0.1)


def test_lm_eval_takes_it(priced: Path) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is the `eval` extra")
    from umim_core.evaluation.harness import UmimLM

    for name, value in {"budget": 0.5, "target_tr": 0.1, "protect": "w1$"}.items():
        model = UmimLM.create_from_arg_string(f"checkpoint={priced},{name}={value}")
        rules = UMIM.from_pretrained(priced, **{name: value}).rules
        assert model.get_model_info()["umim"]["rules_digest"] == rules.digest


PROMPT = [[7, 9, 11]]
PRICE = 0.5


@pytest.fixture
def checkpoint(tiny_llama: Backbone) -> Checkpoint:
    """One rule of a price, which the first two generated tokens complete."""
    none = Checkpoint.of(fresh_model(tiny_llama, []))
    [ids] = UMIM(tiny_llama, none).generate(PROMPT, max_new_tokens=2).ids
    rules = replace(RuleSet.from_spans([ids]), prices=np.array([PRICE], np.float32))
    return Checkpoint.of(fresh_model(tiny_llama, rules)).recommending("all")


@pytest.mark.parametrize(
    ("bound", "options", "merges"),
    [
        (None, {}, True),
        (PRICE, {}, True),
        (0.4, {}, False),
        (0.4, {"decode_max_damage": math.inf}, True),
        (0.4, {"decode_max_damage": 0.6}, True),
        (None, {"decode_max_damage": 0.4}, False),
        (0.4, {"merge": "prompt"}, False),
    ],
)
def test_generation_merges_by_the_rules_under_the_bound(
    tiny_llama: Backbone,
    checkpoint: Checkpoint,
    tmp_path: Path,
    bound: float | None,
    options: dict[str, object],
    merges: bool,
) -> None:
    checkpoint.decoding_under(bound).save(tmp_path / "made")
    loaded = Checkpoint.load(tmp_path / "made")
    assert (loaded.config.decode_max_damage, loaded.config.merge) == (bound, "all")
    [spans] = UMIM(tiny_llama, loaded).generate(PROMPT, max_new_tokens=3, **options).generated_spans
    assert spans == (((0, 2),) if merges else ())


def test_a_bound_is_of_no_use_for_rules_without_prices(checkpoint: Checkpoint) -> None:
    bounded, rules = checkpoint.decoding_under(0.4), checkpoint.rules
    unpriced = replace(rules, prices=None)
    assert bounded.with_contents(bounded.module, rules).config.decode_max_damage == 0.4
    without = bounded.with_contents(bounded.module, unpriced)
    assert without.config.decode_max_damage is None
    with pytest.raises(RuleSetError, match="needs the price of every rule"):
        without.decoding_under(0.4)


def test_a_bound_on_disk_is_a_finite_number(checkpoint: Checkpoint, tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "made")
    alter_config(tmp_path / "made", {"decode_max_damage": "inf"})
    with pytest.raises(CheckpointError, match="decode_max_damage"):
        Checkpoint.load(tmp_path / "made")


@pytest.fixture
def advised(tiny_checkpoint: Path) -> Checkpoint:
    return Checkpoint.load(tiny_checkpoint).recommending("prompt", 2)


@pytest.fixture
def umim(advised: Checkpoint, tiny_umim: UMIM, tmp_path: Path) -> UMIM:
    advised.save(tmp_path / "recommending")
    return UMIM(tiny_umim.backbone, Checkpoint.load(tmp_path / "recommending"))


@pytest.mark.parametrize(
    ("said", "merge", "raw_tail"),
    [
        ({}, "prompt", 2),
        ({"merge": "all"}, "all", 0),
        ({"raw_tail": 0}, "prompt", 0),
        ({"merge": "none"}, "none", 0),
        ({"decode_max_damage": math.inf}, "all", 2),
        ({"merge": "all", "raw_tail": 0}, "all", 0),
    ],
)
def test_a_recommendation_is_taken_where_the_caller_says_nothing(
    umim: UMIM, tiny_umim: UMIM, said: dict[str, object], merge: str, raw_tail: int
) -> None:
    found = umim.generate(TEXT, max_new_tokens=4, **said)
    assert (found.merge, found.raw_tail) == (merge, raw_tail)
    whole = said | {"merge": merge, "raw_tail": raw_tail}
    assert found == tiny_umim.generate(TEXT, max_new_tokens=4, **whole)


def test_a_raw_tail_of_nothing_merged_is_refused(advised: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="raw_tail needs a prompt that is merged"):
        advised.recommending("none", 2)
    advised.save(tmp_path / "made")
    alter_config(tmp_path / "made", {"merge": "none"})
    with pytest.raises(CheckpointError, match="raw_tail needs a prompt that is merged"):
        Checkpoint.load(tmp_path / "made")
