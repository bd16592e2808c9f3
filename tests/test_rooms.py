"""Packages of each layer: their order, their size, and file names that occur once."""

from __future__ import annotations

import ast
from collections import Counter

import pytest

from support.source_tree import ROOT, imports, parse, python_files, report

MAX_FILES = 20
# The rooms of a layer, lowest first: a file imports from its own room and from lower ones. Files
# directly in ``umim_core`` are the lowest; ``umim_core/__init__.py`` resolves public names by need.
ROOMS = {
    "umim_core": (
        "store",
        "embedded",
        "text",
        "model_sources",
        "backbone",
        "config",
        "rules",
        "merging",
        "mining",
        "inference",
        "checkpoint",
        "model",
        "serving",
        "synthetic_corpora",
        "task_sets",
        "adaptation",
        "training",
        "baselines",
        "evaluation",
        "throughput",
        "cli",
    ),
    "tasks": (
        "storage",
        "cluster",
        "tracking",
        "data",
        "training",
        "run",
        "report",
        "paper",
        "stages",
        "plan",
    ),
}


def room_of(module: str) -> str:
    """Name of the room of a module such as ``umim_core.text.files``; empty for a root file."""
    return module.split(".")[1] if module.count(".") > 1 else ""


def upward_imports(layer: str, name: str, tree: ast.AST) -> list[str]:
    """Imports of a module that climb from its room into a higher one, inside functions too."""
    order = ("", *ROOMS[layer])
    here = order.index(room_of(name))
    found = []
    for line, target in imports(tree, name.rpartition(".")[0]):
        parts = target.split(".")
        inside = parts[0] == layer and len(parts) > 1 and parts[1] in order
        if inside and order.index(parts[1]) > here:
            found.append(f"{line}: {target}")
    return found


@pytest.mark.parametrize("layer", ROOMS)
def test_imports_run_down_the_rooms_of_a_layer(layer: str) -> None:
    found: list[str] = []
    for path in python_files(layer):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if name != f"{layer}.__init__":
            found += report(path, upward_imports(layer, name, parse(path)))
    assert found == []


@pytest.mark.parametrize(
    ("name", "source", "count"),
    [
        ("umim_core.text.x", "from umim_core.rules.grams import ORDERS", 1),
        ("umim_core.text.x", "def f():\n    from umim_core.rules import grams", 1),
        ("umim_core.rules.x", "from umim_core.text.files import f", 0),
        ("umim_core.rules.x", "from umim_core.rules.grams import f", 0),
        ("umim_core.errors", "import umim_core.store.disk", 1),
    ],
)
def test_room_checker_sees_imports_that_climb(name: str, source: str, count: int) -> None:
    assert len(upward_imports("umim_core", name, ast.parse(source))) == count


@pytest.mark.parametrize("layer", ROOMS)
def test_every_room_of_a_layer_has_its_place_in_the_order(layer: str) -> None:
    assert {path.parent.name for path in (ROOT / layer).glob("*/__init__.py")} == set(ROOMS[layer])


@pytest.mark.parametrize("layer", ["umim_core", "tasks", "flows", "benchmarks"])
def test_file_names_are_unique_inside_a_layer(layer: str) -> None:
    own = ("__init__.py", "__main__.py")  # each package has its own
    names = Counter(path.name for path in python_files(layer) if path.name not in own)
    assert [name for name, count in names.items() if count > 1] == []


def test_no_room_has_more_files_than_the_limit() -> None:
    layers = python_files("umim_core", "tasks", "flows", "benchmarks")
    counts = Counter(path.parent for path in layers if path.name != "__init__.py")
    full = {str(folder.relative_to(ROOT)): n for folder, n in counts.items() if n > MAX_FILES}
    assert full == {}
