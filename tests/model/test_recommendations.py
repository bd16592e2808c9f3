"""A checkpoint's recommendations for generation, its bound for decode rules, and overrides."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from support.altered_checkpoints import alter_config
from support.merged_models import fresh_model
from umim_core import UMIM
from umim_core.backbone.backbone import Backbone
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.errors import CheckpointError, ConfigError, RuleSetError
from umim_core.rules.ruleset import RuleSet

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


TEXT = "w1 w2 w9 w3 w4 w5 w6 w7 w8 w9"  # w1 w2, w3 w4 w5 and w6 w7 w8 w9 merge


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
