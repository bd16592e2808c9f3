from __future__ import annotations

import pytest
from pydantic import ValidationError

from umim_core.config.recipe import Recipe

HARDWARE = {
    "name": "test GPU",
    "gpus": 2,
    "gpu_memory_gib": 48,
}
RECIPE = {
    "name": "test",
    "corpus": {"kind": "docstrings"},
    "cells": [{"backbone": "umim-docs-llama"}],
    "distill": {"max_steps": 1, "batch_size": 4},
    "cluster": {"workers": 2, "use_gpu": True},
}
SHAPE = {
    "hidden_size": 8,
    "intermediate_size": 16,
    "layers": 1,
    "heads": 2,
    "kv_heads": 1,
    "head_dim": 4,
    "vocab_size": 32,
    "tied": True,
    "gated_mlp": True,
}


def test_hardware_survives_a_dump() -> None:
    recipe = Recipe.model_validate(RECIPE | {"hardware": HARDWARE})
    assert recipe.hardware is not None
    assert Recipe.model_validate(recipe.model_dump(mode="json")) == recipe


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cluster": {"workers": 2}}, "needs use_gpu true, workers 2"),
        ({"cluster": {"workers": 1, "use_gpu": True}}, "needs use_gpu true, workers 2"),
        ({"hardware": HARDWARE | {"shapes": {"other": SHAPE}}}, "no cell has the backbone 'other'"),
        ({"hardware": HARDWARE | {"gpu_memory_gib": 0}}, "greater than 0"),
        ({"hardware": HARDWARE | {"tflops": 1}}, "Extra inputs are not permitted"),
    ],
)
def test_hardware_that_does_not_fit_its_recipe_is_refused(
    change: dict[str, object], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        Recipe.model_validate(RECIPE | {"hardware": HARDWARE} | change)
