"""Generated lists of the source tree: packages in README.md, every file in docs/files.md."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Final

from docs.make.document import ROOT, Document

LAYERS: Final = ("umim_core", "tasks", "flows", "benchmarks", "docs/make", "tests/support")
_OTHERS: Final = {
    "infra": "Recipes of the pipeline (YAML) and DeepSpeed's configuration.",
    "packaging": "Start-up hook that makes lm-eval know the model ``umim``, and the build hook.",
    "requirements": "Locked versions and hashes of all dependencies.",
    "docs": "Guide, decisions, gates, log, results; ``docs/make`` writes the generated pages.",
    "tests": "Tests, one folder per package; ``support`` holds what they share.",
}
_HEAD: Final = """# Files

One line per source file: the first line of its docstring. Written by `python -m docs.make files`.
Layers import downwards only: `flows`, `tasks`, `umim_core`. So do the packages inside a
layer; their order is in `tests/test_rooms.py`.
"""
_WIDTH: Final = 19  # of a folder in the tree


def documents() -> list[Document]:
    """Return docs/files.md."""
    return [Document(ROOT / "docs" / "files.md", _files)]


def rooms() -> str:
    """Return the folders of the source tree, a line each, as a fenced block."""
    lines = []
    for layer in LAYERS[:4]:
        lines.append(f"{layer + '/':<{_WIDTH}}{_first_line(ROOT / layer / '__init__.py')}")
        for room in _rooms(layer):
            name = "  " * len(room.relative_to(ROOT / layer).parts) + room.name + "/"
            lines.append(f"{name:<{_WIDTH}}{_first_line(room / '__init__.py')}")
    lines += [f"{name + '/':<{_WIDTH}}{text.replace('``', '')}" for name, text in _OTHERS.items()]
    return "\n".join(["```", *lines, "```", ""]).replace("``umim``", "umim")


def _files() -> str:
    parts = [_HEAD]
    for layer in LAYERS:
        for folder in (ROOT / layer, *_rooms(layer)):
            files = [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
            if files:
                parts.append(f"\n## {folder.relative_to(ROOT).as_posix()}")
                parts.append("\n".join(f"- `{path.name}`: {_first_line(path)}" for path in files))
    return "\n".join(parts) + "\n"


def _rooms(layer: str) -> list[Path]:
    """Return the packages below a layer, in the order of their names."""
    return sorted(path.parent for path in (ROOT / layer).rglob("*/__init__.py"))


def _first_line(path: Path) -> str:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return (ast.get_docstring(tree) or "").partition("\n")[0]
