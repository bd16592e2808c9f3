"""Names are imported from the module that defines them, so that a search finds one place."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("umim_core", "tasks", "flows", "benchmarks", "docs", "tools", "tests")
# Doors on purpose: a name of theirs may be defined in another file of their room.
DOORS = {"umim_core", "umim_core.merging.module"}


def project_imports(nodes: Sequence[ast.AST]) -> list[tuple[int, str, str]]:
    """Line, module and name of everything that comes from this project."""
    return [
        (node.lineno, node.module, alias.name)
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(FOLDERS)
        for alias in node.names
    ]


def defined(nodes: Sequence[ast.AST]) -> set[str]:
    """Names that a module defines at its top level."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def detours(sources: Mapping[str, str]) -> list[str]:
    """Imports of a name from a module that has imported it itself."""
    taken, own = {}, {}
    for module, source in sources.items():
        nodes = list(ast.walk(ast.parse(source)))
        taken[module], own[module] = project_imports(nodes), defined(nodes)
    passed_on = {
        module: {name for _, _, name in names} - own[module]
        for module, names in taken.items()
        if module not in DOORS
    }
    return [
        f"{module}:{line}: {name} is not defined in {origin}"
        for module, names in taken.items()
        for line, origin, name in names
        if name in passed_on.get(origin, ())
    ]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_names_are_imported_from_where_they_are_defined() -> None:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    assert detours({module_name(path): path.read_text("utf-8") for path in files}) == []


def test_a_detour_is_seen() -> None:
    sources = {
        "tasks.a": "def f(): ...",
        "tasks.b": "from tasks.a import f",
        "tasks.c": "def g():\n    from tasks.b import f",
    }
    assert detours(sources) == ["tasks.c:2: f is not defined in tasks.b"]
    sources["tasks.c"] = "from tasks.a import f"
    assert detours(sources) == []
