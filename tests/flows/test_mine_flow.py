from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows import parts
from support.ngram_oracle import grams_of
from support.small_recipe import files_corpus
from support.tiny_pipeline import Walk, counting_in_process
from tasks.run.recipes import find_recipe
from umim_core import RuleSet
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.config.recipe import Recipe
from umim_core.errors import CorpusError

BACKBONE = "umim-docs-llama"
LONGER = {"tau": 40, "longest": 5, "overlap": "none", "containment": "keep"}
TEXT = "Return a new array. Return a new view of the array. Return the sum of the array. " * 40


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a text per split and a recipe of two thresholds."""
    recipe = {
        "name": "files",
        "corpus": files_corpus(tmp_path, TEXT),
        "segment_length": 16,
        "cells": [{"backbone": BACKBONE, "tau": 5}, {"backbone": BACKBONE, **LONGER}],
        "distill": {"max_steps": 1},
        "task": None,
    }
    (tmp_path / "files.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return tmp_path


def in_process(place: Path) -> list[str]:
    """Run the flow's stages without Prefect, MLflow and Ray."""
    run: Any = Walk(place / "root", find_recipe(str(place / "files.yaml")))
    with counting_in_process():
        results = parts.mine(run, parts.prepare(run))
    return [str(result.filtered.path / "rules") for result in results]


def test_rules_of_the_flow_equal_a_counter(place: Path) -> None:
    directories = in_process(place)
    ids = load_tokenizer(BACKBONE)(TEXT, add_special_tokens=False)["input_ids"]
    segments = [ids[i : i + 16] for i in range(0, len(ids) // 16 * 16, 16)]
    counts = Counter(
        tuple(s[i : i + n]) for s in segments for n in range(2, 6) for i in range(17 - n)
    )
    for directory, tau, longest in zip(directories, (5, 40), (4, 5), strict=True):
        rules = RuleSet.load(directory)
        assert (rules.options.tau, rules.longest) == (tau, longest)
        found = grams_of(rules)
        assert len(found) > 3 and max(map(len, found)) == longest
        for row, support in found.items():
            assert counts[row] == support >= tau


@pytest.mark.parametrize(
    ("split", "text", "benchmark", "needed"),
    [
        ("valid", "Return a new array.", None, 16),
        ("test", "Return a new array.", None, 16),
        ("test", TEXT, {"prompt_lengths": [1024]}, 1024),
    ],
)
def test_text_that_is_too_short_is_refused_before_training(
    place: Path, split: str, text: str, benchmark: dict[str, Any] | None, needed: int
) -> None:
    (place / f"{split}.txt").write_text(text, encoding="utf-8")
    recipe = find_recipe(str(place / "files.yaml")).model_dump(mode="json")
    run: Any = Walk(place / "root", Recipe.model_validate(recipe | {"benchmark": benchmark}))
    with (
        counting_in_process(),
        pytest.raises(CorpusError, match=f"split '{split}' must hold {needed} tokens"),
    ):
        parts.run_everything(run)
    assert run.executed()[-1] == "filter"


@pytest.mark.parametrize(
    ("split", "dependants"),
    [
        ("train", {"corpus": 1, "tokenize": 1, "count": 1, "filter": 2}),
        ("test", {"corpus": 1, "tokenize": 1}),
    ],
)
def test_one_changed_byte_runs_exactly_its_dependants(
    place: Path, split: str, dependants: dict[str, int]
) -> None:
    def stages() -> Counter[str]:
        return Counter(path.parent.parent.name for path in place.glob("root/*/*/manifest.json"))

    in_process(place)
    before = stages()
    path = place / f"{split}.txt"
    path.write_bytes(b"S" + path.read_bytes()[1:])
    in_process(place)
    assert stages() - before == dependants
