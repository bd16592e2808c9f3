from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.tiny_language_models import SHAPES
from tasks.run.pipeline import open_pipeline
from tasks.run.recipes import find_recipe, recipe_names
from umim_core.config.backbone_recipe import BackboneRecipe, load_any_recipe
from umim_core.config.recipe import ClusterConfig, Recipe
from umim_core.errors import ConfigError


def test_recipes_of_both_kinds_are_listed_and_found() -> None:
    assert {"embedded", "backbone-llama", "backbone-gpt2"} <= set(recipe_names())
    assert isinstance(find_recipe("backbone-llama"), BackboneRecipe)
    assert isinstance(find_recipe("embedded"), Recipe)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        (
            "embedded",
            BackboneRecipe,
            "flow f needs a recipe of kind backbone; got embedded, of kind",
        ),
        ("backbone-gpt2", Recipe, "flow f needs a recipe of kind pipeline; got backbone-gpt2"),
    ],
)
def test_a_flow_refuses_recipes_of_another_kind(
    name: str, kind: type[Recipe] | type[BackboneRecipe], message: str
) -> None:
    with pytest.raises(ConfigError, match=message), open_pipeline(name, "f", kind):
        pass


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 256}, "vocab_size: Input should be greater than 256; got 256"),
        ({"train": {"max_steps": 1, "sequence_length": 65}}, "sequence_length must fit"),
        ({"train": {"max_steps": 1, "sequence_length": 9, "batch_size": 3}}, "must divide"),
        ({"architecture": SHAPES["gpt2"] | {"heads": 3}}, "heads must divide hidden_size"),
        ({"architecture": SHAPES["llama"] | {"heads": 3, "kv_heads": 2}}, "kv_heads must divide"),
        ({"architecture": {"kind": "mamba"}}, "architecture: Input tag 'mamba'"),
        ({"corpus": "ids"}, "needs text, not ids"),
        ({"cells": []}, "cells: Extra inputs are not permitted"),
    ],
)
def test_a_broken_recipe_names_file_field_and_rule(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    source = {"kind": "ids", "path": "x.npy"} if change == {"corpus": "ids"} else None
    text = {"kind": "text", "paths": ["x.txt"]}
    whole: dict[str, object] = {
        "kind": "backbone",
        "name": "x",
        "architecture": SHAPES["llama"],
        "train": {"max_steps": 1, "sequence_length": 8},
        "cluster": {"workers": 2},
    } | change
    whole["corpus"] = {"kind": "files", "train": source or text, "valid": text, "test": text}
    path = tmp_path / "broken.yaml"
    path.write_text(json.dumps(whole), encoding="utf-8")  # JSON is YAML
    with pytest.raises(ConfigError, match=r"broken\.yaml") as caught:
        load_any_recipe(path)
    assert message in str(caught.value)


def test_cluster_config_of_a_backbone_is_that_of_the_pipeline() -> None:
    assert find_recipe("backbone-llama").cluster == ClusterConfig()
