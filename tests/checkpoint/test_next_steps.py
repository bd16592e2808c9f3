"""Commands to run next."""

from __future__ import annotations

from pathlib import Path

import pytest

from umim_core.checkpoint.checkpoint_files import read_config
from umim_core.checkpoint.next_steps import FIELD, after_pruning


@pytest.mark.parametrize("revision", [None, "v2"])
def test_training_is_printed_for_models_that_the_command_takes(
    tiny_checkpoint: Path, revision: str | None
) -> None:
    config = read_config(tiny_checkpoint).model_copy(update={"backbone_revision": revision})
    generate, train = after_pruning(Path("less"), config, ["a.txt"], FIELD)
    assert generate.startswith("  umim generate")
    if revision is None:
        assert train.startswith("  umim train") and "--start less --out less-trained" in train
    else:
        assert "revision v2" in train and "recipe" in train
