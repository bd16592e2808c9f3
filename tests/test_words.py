"""First lines of docstrings are nouns or verbs that a reader would search for."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("umim_core", "tasks", "flows", "infra", "benchmarks", "docs", "packaging")
RELATIVE = re.compile(r"(?:What|Which|Whether|Wherever|Where|Who|When|How)(?:ever)?\b")
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def relative_clauses(tree: ast.Module, *, modules_only: bool) -> Iterator[str]:
    """First lines of a module's docstrings that begin with a relative clause."""
    documented: list[ast.Module | Definition] = [tree]
    if not modules_only:
        documented += [node for node in ast.walk(tree) if isinstance(node, Definition)]
    for node in documented:
        first = (ast.get_docstring(node) or "").partition("\n")[0]
        # "Whether ..." is the usual first line of a property that is true or false.
        if RELATIVE.match(first) and (node is tree or not first.startswith("Whether")):
            yield first


@pytest.mark.parametrize(("folders", "modules_only"), [(PRODUCT, False), (("tests",), True)])
def test_no_first_line_is_a_relative_clause(folders: tuple[str, ...], modules_only: bool) -> None:
    found = {
        str(path.relative_to(ROOT)): lines
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        if (
            lines := list(
                relative_clauses(ast.parse(path.read_text("utf-8")), modules_only=modules_only)
            )
        )
    }
    assert found == {}


def test_the_checker_sees_modules_classes_and_functions() -> None:
    source = (
        '"""{} it is."""\nclass A:\n    """What A holds."""\n    def f(self):\n        """How."""\n'
    )
    for word in ("What", "Whether", "Wherever"):
        found = list(relative_clauses(ast.parse(source.format(word)), modules_only=False))
        assert found == [f"{word} it is.", "What A holds.", "How."]
    assert len(list(relative_clauses(ast.parse(source.format("When")), modules_only=True))) == 1


def test_the_checker_leaves_verbs_and_truths_alone() -> None:
    source = '"""Show how."""\ndef f():\n    """Whether it is so."""\n'
    assert list(relative_clauses(ast.parse(source), modules_only=False)) == []
