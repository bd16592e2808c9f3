"""A checkpoint's bound on the damage of its decode rules: on disk, as a default, overridden."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from support.altered_checkpoints import alter_config
from umim_core import UMIM
from umim_core.backbone.backbone import Backbone
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.errors import CheckpointError, RuleSetError
from umim_core.merging.merged_model import MergedModel
from umim_core.merging.module import MergeModule
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet
from umim_core.store.artifacts import read_json

PROMPT = [[7, 9, 11]]
PRICE = 0.5


@pytest.fixture
def checkpoint(tiny_llama: Backbone) -> Checkpoint:
    """One rule of a price, which the first two generated tokens complete."""
    module = MergeModule(tiny_llama.hidden_size)
    module.initialise(tiny_llama.embedding_std, torch.Generator().manual_seed(0))
    none = Checkpoint.of(
        MergedModel(tiny_llama, module, Matcher(RuleSet.from_spans([])), "compact")
    )
    [ids] = UMIM(tiny_llama, none).generate(PROMPT, max_new_tokens=2).ids
    rules = replace(RuleSet.from_spans([ids]), prices=np.array([PRICE], np.float32))
    made = Checkpoint.of(MergedModel(tiny_llama, module, Matcher(rules), "compact"))
    return made.recommending("all")


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


def test_a_configuration_without_a_bound_keeps_its_bytes(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    checkpoint.decoding_under(0.4).decoding_under(None).save(tmp_path / "made")
    assert "decode_max_damage" not in dict(read_json(tmp_path / "made" / "config.json"))


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
