"""The seeded bugs still apply; the full set seeds them and asks the tests (reliability 49)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from seeded_bugs.bug import SeededBug
from seeded_bugs.catalogue import BUGS
from seeded_bugs.harness import ROOT, Finding, Harness
from seeded_bugs.report import counts, load, merged, write

from umim_core.errors import ConfigError

LEAST_QUICK, LEAST = 26, 30
BUG = SeededBug("a is b", "method", "a.py", "a = 1", "a = 2", ("test_a.py",))


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_still_applies(bug: SeededBug) -> None:
    bug.check(ROOT)


def test_there_are_bugs_of_every_class() -> None:
    assert Counter(bug.kind for bug in BUGS) == {"method": 14, "resume": 11, "wiring": 7}
    assert len({bug.name for bug in BUGS}) == len(BUGS)


@pytest.mark.parametrize("text", ["b = 1\n", "a = 1\na = 1\n"])
def test_a_bug_that_no_longer_applies_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "test_a.py").touch()
    (tmp_path / "a.py").write_text(text)
    with pytest.raises(ConfigError, match=r"must stand once in a\.py; got [02] times"):
        BUG.check(tmp_path)


def test_a_bug_names_tests_that_exist_and_changes_something(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("a = 1\n")
    with pytest.raises(ConfigError, match=r"test_a\.py"):
        BUG.check(tmp_path)
    (tmp_path / "test_a.py").touch()
    BUG.check(tmp_path)
    with pytest.raises(ConfigError, match="the same text"):
        replace(BUG, new=BUG.old).check(tmp_path)


def test_a_report_keeps_what_was_not_seeded_again(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    first, second = (
        Finding(bug.name, bug.kind, bug.file, "tests/x.py::test_y", "quick") for bug in BUGS[:2]
    )
    write([first, second], page)
    escaped = replace(second, caught_by=None, suite=None)
    found = merged(load(page.with_suffix(".json")), [escaped])
    assert found == [first, escaped]
    assert counts(found) == {"seeded": 2, "caught_by_quick_tests": 1, "caught": 1}


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_the_suite_catches_seeded_bugs(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    findings = [harness.seed(bug) for bug in BUGS]
    write(findings, tmp_path / "page.md")
    told = counts(findings)
    assert told["caught_by_quick_tests"] >= LEAST_QUICK, (tmp_path / "page.md").read_text()
    assert told["caught"] >= LEAST, (tmp_path / "page.md").read_text()
