"""The folders of the source tree for README.md, a line each."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Final

from docs.make.document import ROOT

LAYERS: Final = ("umim_core", "tasks", "flows", "benchmarks", "tools")
_OTHERS: Final = {
    "infra": "Recipes of the pipeline (YAML) and DeepSpeed's configuration.",
    "packaging": "Start-up hook that makes lm-eval know the model ``umim``, and the build hook.",
    "requirements": "Locked versions and hashes of all dependencies.",
    "dev": "Decisions, log, reliability: for those who change UMIM.",
    "docs": "Documents by task, results; ``docs/make`` writes the generated pages.",
    "tests": "Tests, one folder per package; ``support`` holds what they share.",
}
_WIDTH: Final = 19  # of a folder in the tree


def rooms() -> str:
    """Return the folders of the source tree, a line each, as a fenced block."""
    lines = []
    for layer in LAYERS:
        lines.append(f"{layer + '/':<{_WIDTH}}{_first_line(ROOT / layer / '__init__.py')}")
        for room in _rooms(layer):
            name = "  " * len(room.relative_to(ROOT / layer).parts) + room.name + "/"
            lines.append(f"{name:<{_WIDTH}}{_first_line(room / '__init__.py')}")
    lines += [f"{name + '/':<{_WIDTH}}{text.replace('``', '')}" for name, text in _OTHERS.items()]
    return "\n".join(["```", *lines, "```", ""]).replace("``umim``", "umim")


def _rooms(layer: str) -> list[Path]:
    """Return the packages below a layer, in the order of their names."""
    return sorted(path.parent for path in (ROOT / layer).rglob("*/__init__.py"))


def _first_line(path: Path) -> str:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return (ast.get_docstring(tree) or "").partition("\n")[0]
