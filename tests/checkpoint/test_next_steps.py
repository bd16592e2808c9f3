"""Commands to run next."""

from __future__ import annotations

from pathlib import Path

import pytest

from umim_core.checkpoint.checkpoint_files import read_config
from umim_core.checkpoint.next_steps import FIELD, after_pruning


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"kind": "linear"}, "kind linear"),
        ({"depth": 3}, "depth 3"),
        ({"backbone_revision": "v2"}, "revision v2"),
    ],
    ids=["paper", "linear", "deep", "revision"],
)
def test_training_is_printed_for_forms_that_the_command_makes(
    tiny_checkpoint: Path, change: dict[str, object], words: str | None
) -> None:
    config = read_config(tiny_checkpoint).model_copy(update=change)
    generate, train = after_pruning(Path("less"), config, ["a.txt"], FIELD)
    assert generate.startswith("  umim generate")
    assert train.startswith("  umim train") is (words is None)
    assert words is None or (words in train and "recipe" in train)
