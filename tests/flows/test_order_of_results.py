from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from flows import parts
from support.recorder import Recorder
from tasks.cluster.lease import ClusterLease
from tasks.run.pipeline import PipelineRun
from tasks.run.stage import Artifact
from umim_core.adaptation.settings import WT
from umim_core.config.recipe import Recipe


class Backwards(Recorder):
    """A plan whose independent parts end in the opposite order.

    Attributes:
        registered: Backbones with the paths of their checkpoints, in order.
    """

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.registered: list[tuple[str, Path]] = []

    def run_parallel(self, parts: Sequence[Callable[[], Any]], _: int | None = None) -> list[Any]:
        return [part() for part in reversed(parts)][::-1]

    def register(self, backbone: str, trained: Artifact) -> None:
        self.registered.append((backbone, trained.path))


@pytest.fixture
def recipe() -> Recipe:
    cells = [{"backbone": "umim-docs-llama", "tau": tau, "adapt": tau == 5} for tau in (5, 50)]
    return Recipe.model_validate(
        {
            "name": "small",
            "corpus": {"kind": "docstrings"},
            "cells": cells,
            "distill": {"max_steps": 1},
            "task": {},
            "adapt": {"sft": {"max_steps": 1}, "dpo": {"max_steps": 1}},
        }
    )


def test_checkpoints_are_registered_in_the_order_of_cells(recipe: Recipe) -> None:
    run: Any = Backwards(recipe)
    cells, _ = parts.run_everything(run)
    first, second = (cell.settings[WT] for cell in cells)
    assert int(first.key) > int(second.key)  # the second was made first
    assert run.registered == [("umim-docs-llama", made.path) for made in (first, second)]


def test_the_alias_of_a_backbone_is_the_first_checkpoint_of_it(
    recipe: Recipe, tmp_path: Path
) -> None:
    given: list[tuple[object, ...]] = []

    class Registry:
        def register_checkpoint(self, *args: object) -> None:
            given.append(args)

    registry: Any = Registry()
    run = PipelineRun(recipe, tmp_path, ClusterLease(recipe.cluster), registry, "key")
    for backbone, key in (("a", "1"), ("b", "2"), ("a", "3")):
        run.register(backbone, Artifact("distill", key, tmp_path / key, "", executed=True))
    assert given == [
        ("a", tmp_path / "1" / "checkpoint", "1"),
        ("b", tmp_path / "2" / "checkpoint", "2"),
    ]
