"""No stage of any recipe has another key than before: finished results are found again.

A key changes on purpose or by mistake. On purpose: `python -m tests.support.recipe_keys`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.recipe_keys import GOLDEN, golden_path, nothing_is_built, recipe_keys
from tasks.run.recipes import recipe_names


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("keys")
    with nothing_is_built(folder / "hub"):
        yield folder / "root"


@pytest.mark.parametrize("name", recipe_names())
def test_every_stage_keeps_its_key(name: str, root: Path) -> None:
    expected, found = golden_path(name).read_text(encoding="utf-8"), recipe_keys(name, root)
    changes = difflib.unified_diff(
        expected.splitlines(), found.splitlines(), "golden", "now", lineterm="", n=0
    )
    assert found == expected, "\n".join(changes)


def test_every_golden_file_belongs_to_a_recipe() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == set(recipe_names())
