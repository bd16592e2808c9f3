"""Imports run down the layers and rooms, some modules have one door, no file names a machine."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from support.processes import ROOT, output_of, run_command

LAYERS = ("umim_core", "tasks", "flows", "benchmarks")
# The rooms of a layer, lowest first: a file imports from its own room and from lower ones.
ROOMS = {
    "umim_core": (
        "store", "embedded", "text", "model_sources", "backbone", "config", "rules", "merging",
        "mining", "traffic",
        "inference", "checkpoint", "model", "serving", "synthetic_corpora", "task_sets",
        "adaptation", "training", "baselines", "evaluation", "throughput", "tuning",
        "cli",
    ),
    "tasks": ("storage", "cluster", "tracking", "data", "training", "run", "report", "stages"),
}  # fmt: skip
# Module -> the only places that import it, prefixes of paths.
DOORS = {
    "ray": ("tasks/", "flows/", "infra/"),
    "prefect": ("tasks/", "flows/", "infra/"),
    "deepspeed": ("tasks/",),
    "mlflow": ("tasks/tracking/tracker.py",),
    "lm_eval": ("umim_core/evaluation/", "packaging/"),
}
HEAVY = ("torch", "transformers", "datasets", "numba", "pyarrow", "pandas", "tokenizers", "numpy")
# Preceded by nothing that makes it part of an address; images of Ray have their home there.
MACHINE_PATH = re.compile(r"(?<![\w.:/-])/(?:home(?!/ray\b)|root|work|Users|mnt/data)/[\w.]")


@cache
def parse(path: Path) -> ast.Module:
    """Return a file's syntax, which nobody changes; parsed once in a process."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def python_files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def imports(tree: ast.AST, package: str = "") -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything a module imports, inside functions too.

    ``from a import b`` gives ``a.b``; a relative import is resolved against ``package``.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parent, base]).strip(".")
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"


def report(path: Path, items: list[str] | list[int]) -> list[str]:
    return [f"{path.relative_to(ROOT)}:{item}" for item in items]


def test_imports_run_down_the_layers_and_rooms() -> None:
    found: list[str] = []
    for path in python_files(*LAYERS):
        layer, *inside = path.relative_to(ROOT).with_suffix("").parts
        order = ("", *ROOMS.get(layer, ()))
        room = inside[0] if len(inside) > 1 else ""
        for line, target in imports(parse(path), ".".join((layer, *inside[:-1]))):
            top, *below = target.split(".")
            climbs = top in LAYERS and LAYERS.index(top) > LAYERS.index(layer)
            if top == layer and inside != ["__init__"] and room in order and len(below) > 1:
                climbs = below[0] in order and order.index(below[0]) > order.index(room)
            if climbs:
                found += report(path, [f"{line}: {target}"])
    assert found == []


def test_a_module_is_imported_through_its_doors_alone() -> None:
    found: list[str] = []
    for path in python_files("umim_core", "tasks", "flows", "infra", "benchmarks", "docs", "tools"):
        place = path.relative_to(ROOT).as_posix()
        for line, name in imports(parse(path)):
            if not place.startswith(DOORS.get(name.partition(".")[0], place)):
                found += report(path, [f"{line}: {name}"])
    assert found == []


def test_ray_is_initialised_in_one_place() -> None:
    calls = [
        str(path)
        for path in python_files("tasks", "flows", "infra", "benchmarks")
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "ray.init"
        if path != ROOT / "tasks" / "cluster" / "ray_cluster.py"
    ]
    assert calls == []


def test_importing_umim_core_is_light() -> None:
    probe = f"import sys, umim_core; print([m for m in {HEAVY!r} if m in sys.modules])"
    assert output_of(sys.executable, "-c", probe).strip() == "[]"


def test_no_file_names_a_machine_path() -> None:
    options = ["-z", "--cached", "--others", "--exclude-standard"]
    listing = run_command("git", "ls-files", *options)
    if listing.returncode:
        pytest.skip("not a git checkout")
    found: list[str] = []
    for name in filter(None, listing.stdout.split("\0")):
        path = ROOT / name
        data = path.read_bytes() if path.is_file() else b"\0"
        if b"\0" not in data[:8192] and len(data) < 2_000_000:
            text = data.decode("utf-8", errors="replace")
            found += [
                f"{name}: {line[:80]}" for line in text.splitlines() if MACHINE_PATH.search(line)
            ]
    assert found == []
