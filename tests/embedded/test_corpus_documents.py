from __future__ import annotations

import json
from pathlib import Path

import pytest

from umim_core.embedded.docstring_corpus import SPLITS, build_corpus


def make_package(root: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = root / "pkg" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return root


def train_rows(site: Path, out: Path) -> dict[str, dict[str, object]]:
    """Build from ``pkg`` alone and return the rows of all splits by id."""
    (site / "lib").mkdir(exist_ok=True)
    build_corpus(out, packages=("pkg",), out_of_domain=(), site_packages=site, stdlib=site / "lib")
    lines = [line for s in SPLITS for line in (out / f"{s}.jsonl").read_text().splitlines()]
    return {row["id"]: row for row in map(json.loads, lines)}


LONG = "This sentence is long enough to be a document of its own, number {}, " + "x" * 80


def test_ids_name_module_and_object_and_stay_unique(tmp_path: Path) -> None:
    code = (
        f'"""{LONG.format(1)}"""\n'
        f'class A:\n    """{LONG.format(2)}"""\n'
        f'    def f(self):\n        """{LONG.format(3)}"""\n'
        f'    def f(self):\n        """{LONG.format(4)}"""\n'
        f'        def g():\n            """{LONG.format(5)}"""\n'
    )
    rows = train_rows(make_package(tmp_path, {"sub/__init__.py": code}), tmp_path / "out")
    assert {i: (row["name"], row["kind"]) for i, row in rows.items()} == {
        "pkg/sub/__init__.py::": ("sub", "module"),
        "pkg/sub/__init__.py::A": ("A", "class"),
        "pkg/sub/__init__.py::A.f": ("f", "function"),
        "pkg/sub/__init__.py::A.f#2": ("f", "function"),
        "pkg/sub/__init__.py::A.f.g": ("g", "function"),
    }


def test_a_repeated_paragraph_stays_only_where_it_came_first(tmp_path: Path) -> None:
    again, own = "repeated paragraph, " * 5, "own paragraph, " * 10
    site = make_package(
        tmp_path,
        {
            "a.py": f'"""{again}\n\n{LONG.format(1)}"""',
            "b.py": f'"""{again.replace(", ", ",  ")}\n\n{own}"""',
        },
    )
    rows = train_rows(site, tmp_path / "out")
    assert again.strip() in str(rows["pkg/a.py::"]["text"])
    assert rows["pkg/a.py::"]["has_summary"] is True
    assert rows["pkg/b.py::"]["text"] == own.strip()
    assert rows["pkg/b.py::"]["has_summary"] is False


@pytest.mark.parametrize(
    "content",
    ["print 'python 2'", b'"""\xff"""', "x = 1\0", "(" * 3000, "-" * 200_000 + "1"],
    ids=["syntax", "utf8", "nul", "brackets", "deep"],
)
def test_modules_that_do_not_parse_are_reported_and_left_out(
    tmp_path: Path, content: str | bytes
) -> None:
    site = make_package(tmp_path, {"bad.py": content, "good.py": f'"""{LONG}"""'})
    report = build_corpus(
        tmp_path / "out", packages=("pkg",), out_of_domain=(), site_packages=site, stdlib=site / "n"
    )
    assert report.unparsed == ["pkg/bad.py"]
    assert report.modules == 1
