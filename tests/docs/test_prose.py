"""Documents: wrapped lines, links, sizes, plain words, decisions numbered without a gap."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from support.source_tree import ROOT

WIDTH = 100
PAGE_BYTES = 8_192
README_WORDS = 1_100
CHANGELOG_LINES = 80
RECIPE_FIELDS = ROOT / "docs" / "recipe-fields.md"  # generated
RESULTS = ROOT / "docs" / "results"
PAGES = [
    path
    for path in sorted((ROOT / "docs").rglob("*.md"))
    if path != RECIPE_FIELDS and path.relative_to(ROOT / "docs").parts[0] not in ("results", "make")
]
WRITTEN = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "dev").glob("*.md")), *PAGES]
ALL = [*WRITTEN, RECIPE_FIELDS, *sorted(RESULTS.rglob("*.md"))]
# Tables, comments, images, and lines of one word or code span, such as a long link, stay whole.
WHOLE = re.compile(r"\s*(\||<|!\[|(?:[-*] )?(?:\S+|`[^`]*`\W?)$)")
# What a reader trips over, each with what stands in its place.
PHRASES = {
    "refused by name": "raises an error that says why",
    "whatever came of": "chosen before measuring",
    "kept its start": "training brought no gain",
    "a timed test": "benchmarks never fail CI on time",
    "gives it back": "failed calls leave it reusable",
    "its own recommendation": "an explicit argument overrides only its own default",
    "says that generated tokens merge": "implies merge='all'",
    "stays lost": "dequantising does not restore precision",
    "zero until trained": "has no effect before training",
    "bought with": "name the quantity alone",
    "says nothing": "cannot be interpreted",
    "say nothing": "cannot be interpreted",
    "of equal price apart": "ties cannot be split",
    "raise no number": "are upper limits",
    "all computation on the processor": "is CPU-bound",
    "kept for good": "cached permanently",
    "a method's choice": "every method gets UMIM's budget",
    "told apart": "does not differ significantly from",
    "whatever a stage": "all stage inputs enter its cache key",
    "measured listens": "evaluations ignore recommendations",
    "is told": "say who says what to whom",
}


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def long_lines(text: str) -> list[str]:
    """Prose lines beyond the width, outside fenced and generated blocks."""
    prose, fenced, generated = [], False, False
    for number, line in enumerate(text.splitlines(), 1):
        fenced ^= line.lstrip().startswith("```")
        generated = (generated or line.startswith("<!-- ")) and not line.startswith("<!-- /")
        if not fenced and not generated and len(line) > WIDTH and not WHOLE.match(line):
            prose.append(f"{number}: {line}")
    return prose


@pytest.mark.parametrize("path", WRITTEN, ids=name)
def test_lines_of_a_document_are_wrapped(path: Path) -> None:
    assert long_lines(path.read_text(encoding="utf-8")) == []


def headings(text: str) -> set[str]:
    """Return the anchors of a page's headings, as the site and code hosts make them."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    words = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", word.lower()).strip().replace(" ", "-") for word in words}


def broken_links(path: Path) -> list[str]:
    """Return links that lead to no file of the repository, or to no heading of it."""
    text = re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)[^)]*\)", text):
        if "://" in link or link.startswith("mailto"):
            continue
        target, _, anchor = link.partition("#")
        place = path.parent / target if target else path
        if not place.exists() or (anchor and anchor not in headings(place.read_text("utf-8"))):
            broken.append(link)
    return broken


@pytest.mark.parametrize("path", ALL, ids=name)
def test_links_of_a_document_lead_somewhere(path: Path) -> None:
    assert broken_links(path) == []


def test_pages_of_the_site_link_nothing_outside_it() -> None:
    assert [name(path) for path in ALL if path.is_relative_to(ROOT / "docs") and leaves(path)] == []


def leaves(path: Path) -> bool:
    """Return whether a page links a file outside ``docs``, which the site does not have."""
    links = re.findall(r"\]\((?!\w+:)([^)#\s]+)", path.read_text(encoding="utf-8"))
    return any(not (path.parent / link).resolve().is_relative_to(ROOT / "docs") for link in links)


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_a_page_is_short(path: Path) -> None:
    assert path.stat().st_size <= PAGE_BYTES


def test_readme_and_changelog_are_short() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.replace("|", " ").split()) <= README_WORDS
    assert len((ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()) <= CHANGELOG_LINES


def test_the_navigation_of_the_site_lists_every_page() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    groups = [page for entry in nav for page in entry.values()]
    listed = [group for group in groups if isinstance(group, str)]
    listed += [page for group in groups if isinstance(group, list) for page in files(group)]
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in (*PAGES, RECIPE_FIELDS)]
    assert sorted(listed) == sorted(pages)


def files(group: list[dict[str, str]]) -> list[str]:
    """Return the files of a group of the navigation."""
    return [page for entry in group for page in entry.values()]


def odd_phrases(text: str) -> list[str]:
    """Return phrases of the list that a text has, however its lines break."""
    plain = " ".join(text.lower().split())
    return [phrase for phrase in PHRASES if re.search(rf"\b{re.escape(phrase)}\b", plain)]


@pytest.mark.parametrize("path", ALL, ids=name)
def test_a_document_has_plain_words(path: Path) -> None:
    odd = odd_phrases(path.read_text(encoding="utf-8"))
    assert [f"{phrase}: rather {PHRASES[phrase]}" for phrase in odd] == []


def test_the_architecture_page_lists_every_package() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for layer in ("umim_core", "tasks"):
        packages = [path.parent.name for path in (ROOT / layer).glob("*/__init__.py")]
        assert [package for package in packages if f"`{package}`" not in text] == []
