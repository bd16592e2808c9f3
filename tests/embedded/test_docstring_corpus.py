from __future__ import annotations

import ast
import hashlib
import json
import os
import random
import sys
from collections import Counter
from pathlib import Path

import pytest

from support.processes import output_of
from umim_core.embedded.docstring_corpus import DOCSTRING_SPLITS, build_corpus
from umim_core.task_sets.docstrings import read_documents

WORDS = ["array", "axis", "value", "model", "tensor", "shape", "graph", "node", "token", "rule"]


def sentence(rng: random.Random, chars: int) -> str:
    text = ""
    while len(text) < chars:
        text += rng.choice(WORDS) + (".\n" if rng.random() < 0.1 else " ")
    return text.strip()


def write_module(path: Path, rng: random.Random, shared: list[str]) -> None:
    """Write a module whose docstrings mix fresh, repeated, short and long paragraphs."""

    def docstring(indent: str) -> str:
        paragraphs = [sentence(rng, rng.choice([20, 55, 61, 90, 200])) for _ in range(3)]
        if rng.random() < 0.6:
            paragraphs.insert(rng.randrange(4), rng.choice(shared))
        body = "\n\n".join(paragraphs).replace("\n", "\n" + indent)
        return f'{indent}"""{body}\n{indent}"""\n'

    code = docstring("")
    for name in "ab":
        code += f"def {name}():\n" + docstring("    ") + "\n"
    code += "class K:\n" + docstring("    ") + "    async def m(self):\n" + docstring("        ")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code, encoding="utf-8")


@pytest.fixture
def roots(tmp_path: Path) -> tuple[Path, Path]:
    rng = random.Random(5)
    shared = [sentence(rng, n) for n in (40, 70, 130, 250)]
    site, library = tmp_path / "site-packages", tmp_path / "stdlib"
    for package in ("zeta", "alpha"):
        for i in range(25):
            write_module(site / package / f"m{i}.py", rng, shared)
        write_module(site / package / "sub-1" / "x.py", rng, shared)
        write_module(site / package / "sub" / "__init__.py", rng, shared)
        # String order is sub, sub-1, sub/deep: no depth-first walk gives it.
        write_module(site / package / "sub" / "deep" / "x.py", rng, shared)
        write_module(site / package / "tests" / "hidden.py", rng, shared)
    for folder in ("sub-1", "sub/deep", "sub"):
        write_module(site / "mathy" / folder / "x.py", rng, shared)
    for i in range(4):
        write_module(site / "mathy" / f"m{i}.py", rng, shared)
        write_module(library / f"m{i}.py", rng, shared)
    write_module(library / "site-packages" / "other.py", rng, shared)
    return site, library


def reference_parts(site: Path, library: Path) -> dict[str, list[str]]:
    """Build the splits with the script that made the training text of the shipped models.

    It is kept in its own words (os.walk, absolute paths, ast.walk) to stay an oracle.
    """
    skip = {"test", "tests", "testing", "_vendor", "vendor", "thirdparty_files"}
    seen: set[bytes] = set()
    parts: dict[str, list[str]] = {split: [] for split in DOCSTRING_SPLITS}

    def visit(root: str, base: str, split: str | None) -> None:
        for folder, _, files in sorted(os.walk(root)):
            inside = os.path.relpath(folder, base)
            if skip & set(inside.split(os.sep)) or "site-packages" in inside:
                continue
            for file in sorted(f for f in files if f.endswith(".py")):
                path = os.path.join(folder, file)
                tree = ast.parse(Path(path).read_text(encoding="utf8"))
                for node in ast.walk(tree):
                    if not isinstance(
                        node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
                    ):
                        continue
                    docstring = ast.get_docstring(node)
                    if not docstring or len(docstring) <= 120:
                        continue
                    kept = []
                    for paragraph in docstring.split("\n\n"):
                        folded = " ".join(paragraph.split()).encode()
                        key = hashlib.blake2b(folded, digest_size=8).digest()
                        if len(paragraph) > 60:
                            if key in seen:
                                continue
                            seen.add(key)
                        kept.append(paragraph)
                    text = "\n\n".join(kept).strip()
                    if len(text) > 120:
                        name = os.path.relpath(path, base).encode()
                        h = int(hashlib.blake2b(name, digest_size=4).hexdigest(), 16) % 100
                        own = "test" if h < 4 else "valid" if h < 8 else "train"
                        parts[split or own].append(text)

    for package in ("zeta", "alpha"):
        visit(f"{site}/{package}", str(site), None)
    visit(f"{site}/mathy", str(site), "ood_math")
    visit(str(library), str(library), "ood_stdlib")
    return parts


def test_each_split_holds_the_texts_of_the_reference_script_in_order_but_for_train(
    roots: tuple[Path, Path], tmp_path: Path
) -> None:
    site, library = roots
    packages, maths = ("zeta", "alpha"), ("mathy",)
    sizes = build_corpus(
        tmp_path / "out", packages=packages, out_of_domain=maths, site_packages=site, stdlib=library
    )
    expected = reference_parts(*roots)
    assert all(expected.values()), "the tree must feed every split"
    for split in DOCSTRING_SPLITS:
        found = [one.text for one in read_documents(tmp_path / "out" / f"{split}.jsonl")]
        assert Counter(found) == Counter(expected[split])
        assert (found == expected[split]) == (split != "train")  # which is shuffled
        assert sizes[split] == len(found)


@pytest.mark.full
def test_bytes_do_not_depend_on_the_hash_seed(roots: tuple[Path, Path], tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path;"
        "from umim_core.embedded.docstring_corpus import build_corpus as b;"
        "o, s, l = map(Path, sys.argv[1:]);"
        "b(o, packages=('zeta', 'alpha'), out_of_domain=(), site_packages=s, stdlib=l)"
    )
    outputs = []
    for seed in ("1", "2"):
        out = tmp_path / seed
        output_of(sys.executable, "-c", code, out, *roots, PYTHONHASHSEED=seed)
        outputs.append({p.name: p.read_bytes() for p in out.iterdir()})
    assert outputs[0] == outputs[1]
    assert set(outputs[0]) == {f"{split}.jsonl" for split in DOCSTRING_SPLITS}


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
    lines = [
        line for s in DOCSTRING_SPLITS for line in (out / f"{s}.jsonl").read_text().splitlines()
    ]
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
def test_modules_that_do_not_parse_are_left_out(tmp_path: Path, content: str | bytes) -> None:
    site = make_package(tmp_path, {"bad.py": content, "good.py": f'"""{LONG}"""'})
    assert list(train_rows(site, tmp_path / "out")) == ["pkg/good.py::"]
