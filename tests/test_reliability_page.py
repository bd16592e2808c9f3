"""dev/reliability.md names tests that exist, for every statement from 1 to 53."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "dev" / "reliability.md"


def rows(text: str) -> dict[int, list[str]]:
    """Return the tests by number of statement."""
    found = re.findall(r"^\| (\d+) \|[^|]+\|([^|]+)\|$", text, re.MULTILINE)
    return {int(number): re.findall(r"`([^`]+)`", tests) for number, tests in found}


def missing(test: str) -> bool:
    """Return whether a test file, or a test in it, does not exist."""
    path, _, name = test.partition("::")
    if not (ROOT / "tests" / path).is_file():
        return True
    tree = ast.parse((ROOT / "tests" / path).read_text(encoding="utf-8"))
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    return name not in names if name else not any(n.startswith("test_") for n in names)


def test_every_statement_names_tests_that_exist() -> None:
    found = rows(PAGE.read_text(encoding="utf-8"))
    assert list(found) == list(range(1, 54))
    assert all(found.values())
    assert [test for tests in found.values() for test in tests if missing(test)] == []


@pytest.mark.parametrize(
    "test", ["test_nosuch.py", "store/test_locking.py::test_nosuch", "conftest.py"]
)
def test_a_test_that_does_not_exist_is_found(test: str) -> None:
    assert missing(test)
