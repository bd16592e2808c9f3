"""Documents: wrapped lines, links that lead somewhere, decisions numbered without a gap."""

from __future__ import annotations

import re

import pytest

from support.source_tree import ROOT

WIDTH = 100
GENERATED = ("recipe-fields.md",)
DOCUMENTS = [
    *sorted(path for path in ROOT.glob("*.md")),
    *sorted((ROOT / "dev").glob("*.md")),
    *sorted(path for path in (ROOT / "docs").glob("*.md") if path.name not in GENERATED),
]
NAMES = [path.relative_to(ROOT).as_posix() for path in DOCUMENTS]
# Tables, comments, images, and lines of one word or code span, such as a long link, stay whole.
WHOLE = re.compile(r"\s*(\||<|!\[|(?:[-*] )?(?:\S+|`[^`]*`\W?)$)")


def long_lines(text: str) -> list[str]:
    """Prose lines beyond the width, outside fenced and generated blocks."""
    prose, fenced, generated = [], False, False
    for number, line in enumerate(text.splitlines(), 1):
        fenced ^= line.lstrip().startswith("```")
        generated = (generated or line.startswith("<!-- ")) and not line.startswith("<!-- /")
        if not fenced and not generated and len(line) > WIDTH and not WHOLE.match(line):
            prose.append(f"{number}: {line}")
    return prose


@pytest.mark.parametrize("name", NAMES)
def test_lines_of_a_document_are_wrapped(name: str) -> None:
    assert long_lines((ROOT / name).read_text(encoding="utf-8")) == []


def test_line_checker_sees_prose_and_leaves_tables_and_code() -> None:
    words = "word " * 30
    assert long_lines(f"a\n{words}\n") == [f"2: {words}"]
    assert long_lines(f"| {words} |\n```\n{words}\n```\n") == []


@pytest.mark.parametrize("name", NAMES)
def test_links_of_a_document_lead_to_files_of_the_repository(name: str) -> None:
    path = ROOT / name
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text(encoding="utf-8"))
    local = [
        target for target in targets if "://" not in target and not target.startswith("mailto")
    ]
    assert [target for target in local if not (path.parent / target).exists()] == []


def test_decisions_are_numbered_without_a_gap() -> None:
    text = (ROOT / "dev" / "decisions.md").read_text(encoding="utf-8")
    numbers = [int(number) for number in re.findall(r"^(\d+)\. ", text, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert "NEW." not in text


def test_the_reading_list_of_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (section,) = re.findall(r"^## Read the code\n(.*?)<!--", text, re.MULTILINE | re.DOTALL)
    files = re.findall(r"`([\w/]+\.py)`", section)
    assert len(files) == 3
    assert sum(len((ROOT / name).read_text("utf-8").splitlines()) for name in files) <= 600
