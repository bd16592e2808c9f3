"""Defaults of a generation that a checkpoint recommends, and what a caller says instead."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from support.altered_checkpoints import alter_config
from umim_core import UMIM
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.errors import CheckpointError, ConfigError
from umim_core.store.artifacts import read_json

TEXT = "w1 w2 w9 w3 w4 w5 w6 w7 w8 w9"  # w1 w2, w3 w4 w5 and w6 w7 w8 w9 merge


@pytest.fixture
def checkpoint(tiny_checkpoint: Path) -> Checkpoint:
    return Checkpoint.load(tiny_checkpoint).recommending("prompt", 2)


@pytest.fixture
def umim(checkpoint: Checkpoint, tiny_umim: UMIM, tmp_path: Path) -> UMIM:
    checkpoint.save(tmp_path / "recommending")
    return UMIM(tiny_umim.backbone, Checkpoint.load(tmp_path / "recommending"))


@pytest.mark.parametrize(
    ("said", "merge", "raw_tail"),
    [
        ({}, "prompt", 2),
        ({"merge": "all"}, "all", 0),
        ({"raw_tail": 0}, "prompt", 0),
        ({"merge": "none"}, "none", 0),
        ({"decode_max_damage": math.inf}, "all", 2),
        ({"match_border": True}, "all", 0),
        ({"merge": "all", "raw_tail": 0}, "all", 0),
        ({"match_border": False}, "prompt", 2),
    ],
)
def test_a_recommendation_is_taken_where_the_caller_says_nothing(
    umim: UMIM, tiny_umim: UMIM, said: dict[str, object], merge: str, raw_tail: int
) -> None:
    found = umim.generate(TEXT, max_new_tokens=4, **said)
    assert (found.merge, found.raw_tail) == (merge, raw_tail)
    whole = said | {"merge": merge, "raw_tail": raw_tail}
    assert found == tiny_umim.generate(TEXT, max_new_tokens=4, **whole)


def test_without_a_recommendation_a_configuration_keeps_its_bytes(
    checkpoint: Checkpoint, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    checkpoint.recommending("prompt", 16).save(tmp_path / "plain")
    known = read_json(tiny_checkpoint / "config.json")
    plain = {name: value for name, value in known.items() if name not in ("merge", "raw_tail")}
    assert known != plain == read_json(tmp_path / "plain" / "config.json")


def test_a_raw_tail_of_nothing_merged_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="raw_tail needs a prompt that is merged"):
        checkpoint.recommending("none", 2)
    checkpoint.save(tmp_path / "made")
    alter_config(tmp_path / "made", {"merge": "none"})
    with pytest.raises(CheckpointError, match="raw_tail needs a prompt that is merged"):
        Checkpoint.load(tmp_path / "made")
