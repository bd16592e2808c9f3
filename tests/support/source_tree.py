"""The source tree as syntax: files of a folder, and what each of them imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


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
