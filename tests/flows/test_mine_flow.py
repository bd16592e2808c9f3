"""The mining flow on text files: exact rules; a change re-executes exactly its dependants."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from flows.mine import mine
from support.shared_services import PrefectServer
from umim_core import RuleSet
from umim_core.backbone.tokenizer_files import load_tokenizer

BACKBONE = "umim-docs-llama"
TEXT = "Return a new array. Return a new view of the array. Return the sum of the array. " * 40


@pytest.fixture(scope="module")
def place(
    tmp_path_factory: pytest.TempPathFactory,
    using_prefect: PrefectServer,
    two_cores: None,
    empty_store: Path,
) -> Iterator[Path]:
    base = tmp_path_factory.mktemp("mine")
    for split in ("train", "valid", "test"):
        (base / f"{split}.txt").write_text(TEXT, encoding="utf-8")
    source = {s: {"kind": "text", "paths": [str(base / f"{s}.txt")]} for s in ("valid", "test")}
    recipe = {
        "name": "files",
        "corpus": {
            "kind": "files",
            "train": {"kind": "text", "paths": [str(base / "train.txt")]},
            **source,
        },
        "segment_length": 16,
        "cells": [{"backbone": BACKBONE, "tau": 5}, {"backbone": BACKBONE, "tau": 50}],
        "distill": {"max_steps": 1},
        "task": None,
    }
    (base / "files.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("UMIM_ROOT", str(base / "root"))
        store = shutil.copy(empty_store, base / "mlflow.db")
        environment.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{store}")
        yield base


def _stages(base: Path) -> Counter[str]:
    return Counter(path.parent.parent.name for path in base.glob("root/*/*/manifest.json"))


def test_rules_of_the_flow_equal_a_counter(place: Path) -> None:
    directories = mine(str(place / "files.yaml"))
    ids = load_tokenizer(BACKBONE)(TEXT, add_special_tokens=False)["input_ids"]
    segments = [ids[i : i + 16] for i in range(0, len(ids) // 16 * 16, 16)]
    counts = Counter(tuple(s[i : i + 4]) for s in segments for i in range(13))
    for directory, tau in zip(directories, (5, 50), strict=True):
        rules = RuleSet.load(directory)
        assert rules.origin.tau == tau
        for row, support in zip(rules.ids_by_order[4], rules.support_by_order[4], strict=True):
            assert counts[tuple(int(i) for i in row)] == support >= tau


@pytest.mark.full
def test_one_changed_byte_of_the_test_text_counts_nothing_again(place: Path) -> None:
    mine(str(place / "files.yaml"))
    before = _stages(place)
    path = place / "test.txt"
    path.write_bytes(b"S" + path.read_bytes()[1:])
    mine(str(place / "files.yaml"))
    assert _stages(place) - before == {"corpus": 1, "tokenize": 1}


def test_one_changed_byte_runs_exactly_its_dependants(place: Path) -> None:
    mine(str(place / "files.yaml"))
    before = _stages(place)
    path = place / "train.txt"
    path.write_bytes(b"S" + path.read_bytes()[1:])
    mine(str(place / "files.yaml"))
    assert _stages(place) - before == {"corpus": 1, "tokenize": 1, "count": 1, "filter": 2}
