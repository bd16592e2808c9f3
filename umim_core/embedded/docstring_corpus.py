"""Build the embedded corpus: the docstrings of the installed packages, without repetitions.

    module.py --ast--> docstrings --blank lines--> paragraphs --not seen before--> document

The split of a document follows from the hash of its module path, whatever packages are installed.
Which paragraph counts as the repetition depends on the order, hence that of `TRAINING_PACKAGES`.
The models of this project were trained with exactly this rule: another package order, limit or
split rule would show them test text as training text.
"""

from __future__ import annotations

import ast
import gc
import hashlib
import inspect
import json
import os
import platform
import subprocess
import sys
import sysconfig
import warnings
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Final, Literal

from umim_core.encodable import encoding_error
from umim_core.errors import CorpusError, require
from umim_core.store.disk import write_rows

# fmt: off
TRAINING_PACKAGES: Final = (
    "transformers", "torch", "numpy", "scipy", "pandas", "sklearn", "ray", "mlflow", "datasets",
    "matplotlib", "prefect", "huggingface_hub", "sqlalchemy", "deepspeed", "nltk", "lm_eval",
    "pydantic", "werkzeug", "flask", "requests", "jinja2", "click", "rich", "httpx", "docker",
    "git", "google", "redis", "mpmath", "accelerate", "evaluate", "tokenizers", "safetensors",
    "fsspec", "aiohttp", "anyio", "starlette", "fastapi", "uvicorn", "websockets", "PIL",
    "pyparsing", "joblib", "attr", "beartype", "narwhals", "alembic", "cryptography", "oauthlib",
    "databricks", "fontTools",
)
# fmt: on
OUT_OF_DOMAIN_PACKAGES: Final = ("networkx", "sympy")
SKIPPED_FOLDERS: Final = frozenset(
    {"test", "tests", "testing", "_vendor", "vendor", "thirdparty_files"}
)
MIN_PARAGRAPH_CHARS: Final = 60  # only longer paragraphs are checked for repetition
_ALWAYS_THERE: Final = "transformers"  # this package depends on it

DOCSTRING_SPLITS: Final = ("train", "valid", "test", "ood_math", "ood_stdlib")
MIN_DOCUMENT_CHARS: Final = 120  # documents must be longer
_CHUNK: Final = 512  # files per worker process: about a second of parsing, 0.1 s of start-up
_BLOCKS: Final = ("body", "handlers", "orelse", "finalbody", "cases")
ObjectKind = Literal["module", "class", "function"]
Found = tuple[str, ObjectKind, str, int]  # name, kind, docstring, which one of that name


@dataclass(frozen=True)
class Document:
    """One docstring after the removal of repeated paragraphs.

    Its id is ``"<posix module path>::<qualified name>"``, the latter empty for the module itself; a
    ``#2``, ``#3`` ... follows a name that the module defines again.
    """

    id: str
    text: str  # the paragraphs that are left, joined by blank lines
    name: str  # of the object; for a module its stem, for ``__init__`` its folder
    kind: ObjectKind
    has_summary: bool  # whether the docstring's own first paragraph is still there


def read_modules(paths: Sequence[Path], workers: int = 1) -> Iterator[list[Found]]:
    """Yield the long docstrings of each file, in order; none of a file that does not parse."""
    if workers == 1:
        yield from map(_read_module, paths)
        return
    chunks = [paths[start : start + _CHUNK] for start in range(0, len(paths), _CHUNK)]
    with ThreadPoolExecutor(workers) as pool:
        for docstrings in pool.map(_read_elsewhere, chunks):
            yield from docstrings


def _read_elsewhere(paths: Sequence[Path]) -> list[list[Found]]:
    done = subprocess.run(  # noqa: S603  # this interpreter, this module
        [sys.executable, "-m", __name__],
        input=json.dumps([str(path) for path in paths]).encode(),
        capture_output=True,
        check=False,
    )
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise CorpusError(
            "every process that parses modules must end well",
            f"exit status {done.returncode}: {' '.join(last)}",
            "Look at the machine's memory, then run the same command again.",
        )
    return [[(n, k, text, i) for n, k, text, i in row] for row in json.loads(done.stdout)]


def _read_module(path: Path) -> list[Found]:
    try:
        # Invalid escapes warn, and would be errors under -W error: not our modules to mend.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, SyntaxError, ValueError, RecursionError, MemoryError):
        # Templates and Python 2; ValueError: NUL or bad UTF-8; MemoryError: nested too deep for
        # CPython's parser; FileNotFoundError: a dangling link.
        return []
    repeats: Counter[str] = Counter()
    docstrings: list[Found] = []
    for qualified, kind, docstring in _docstrings(tree):
        repeats[qualified] += 1
        if len(docstring) > MIN_DOCUMENT_CHARS:
            docstrings.append((qualified, kind, docstring, repeats[qualified]))
    return docstrings


def _docstrings(tree: ast.Module) -> Iterator[tuple[str, ObjectKind, str]]:
    """Yield (qualified name, kind, cleaned docstring), breadth first as `ast.walk` does."""
    queue: deque[tuple[ast.AST, str]] = deque([(tree, "")])
    while queue:
        node, scope = queue.popleft()
        kind: ObjectKind | None = None
        docstring: str | None = None
        if isinstance(node, ast.Module):
            kind, docstring = "module", ast.get_docstring(node, clean=False)
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            scope = f"{scope}.{node.name}" if scope else node.name
            kind = "class" if isinstance(node, ast.ClassDef) else "function"
            docstring = ast.get_docstring(node, clean=False)
        for block in _BLOCKS:  # nothing else of a node holds definitions
            if block in node._fields:
                queue.extend((child, scope) for child in getattr(node, block))
        if kind is not None and docstring:
            yield scope, kind, inspect.cleandoc(docstring)


if __name__ == "__main__":
    gc.disable()  # syntax trees hold no cycles; looking for them takes an eighth of the time
    json.dump([_read_module(Path(name)) for name in json.load(sys.stdin)], sys.stdout)


def split_of(module: str) -> Literal["train", "valid", "test"]:
    """Return the split of a module: 4 % of the paths are test, 4 % valid, the rest train."""
    digest = hashlib.blake2b(module.encode(), digest_size=4).digest()
    bucket = int.from_bytes(digest, "big") % 100
    return "test" if bucket < 4 else "valid" if bucket < 8 else "train"


def build_corpus(
    out: Path,
    *,
    packages: Sequence[str] = TRAINING_PACKAGES,
    out_of_domain: Sequence[str] = OUT_OF_DOMAIN_PACKAGES,
    site_packages: Path | None = None,
    stdlib: Path | None = None,
    workers: int = 1,
) -> dict[str, int]:
    """Write a file of `Document` rows per split, and return their numbers.

    Train, valid and test are of ``packages``, in order, then ``ood_math`` of ``out_of_domain`` and
    ``ood_stdlib`` of ``stdlib``; by default all are the running interpreter's. The training file is
    in the order of the hash of the ids. The same installed versions give the same bytes. About
    100 s on one core for the full stack.
    """
    site = site_packages or Path(sysconfig.get_path("purelib"))
    library = stdlib or Path(sysconfig.get_path("stdlib"))
    seen = set[bytes]()
    parts: dict[str, list[Document]] = {split: [] for split in DOCSTRING_SPLITS}
    trees = [*((site / name, site) for name in (*packages, *out_of_domain)), (library, library)]
    files = [list(_module_files(root, base)) for root, base in trees]
    for number, (paths, (_, base)) in enumerate(zip(files, trees, strict=True)):
        foreign = "ood_math" if number + 1 < len(trees) else "ood_stdlib"
        for path, docstrings in zip(paths, read_modules(paths, workers), strict=True):
            module = path.relative_to(base).as_posix()
            documents = parts[split_of(module) if number < len(packages) else foreign]
            documents.extend(_documents(path, module, docstrings, seen))
    there = sum((site / name).is_dir() for name in packages)
    require(
        bool(parts["train"]),
        CorpusError,
        "the embedded corpus needs docstrings of at least one installed package",
        f"{len(packages)} packages asked for, {there} of them in {site}",
        "Install the `pipeline` extra, or name installed packages.",
    )
    parts["train"].sort(key=lambda d: (hashlib.blake2b(d.id.encode()).digest(), d.id))
    out.mkdir(parents=True, exist_ok=True)
    for split in DOCSTRING_SPLITS:
        write_rows(out / f"{split}.jsonl", map(vars, parts[split]))
    return {split: len(documents) for split, documents in parts.items()}


def installed_versions(packages: Iterable[str]) -> list[list[str]]:
    """Return [name, version] of Python and then of the packages' distributions, sorted by name."""
    owners = _distributions(tuple(sys.path))
    names = {name for package in packages for name in owners.get(package, ())}
    return [["python", platform.python_version()], *sorted([n, version(n)] for n in names)]


@cache
def _distributions(_: tuple[str, ...]) -> Mapping[str, list[str]]:
    """Return the distributions of every package: all are read, a quarter of a second each time."""
    return packages_distributions()


def held_out_text(site_packages: Path | None = None) -> str:
    """Return docstrings of modules that the corpus keeps for testing, in every installation."""
    site = site_packages or Path(sysconfig.get_path("purelib"))
    files = sorted(_module_files(site / _ALWAYS_THERE, site))
    paths = [file for file in files if split_of(file.relative_to(site).as_posix()) == "test"]
    documents = [text for module in read_modules(paths) for _, _, text, _ in module]
    rule = f"the default text needs the docstrings of {_ALWAYS_THERE}"
    require(bool(documents), CorpusError, rule, f"none in {site}", "Give a text file.")
    return "\n\n".join(documents)


def _documents(
    path: Path, module: str, docstrings: list[Found], seen: set[bytes]
) -> Iterator[Document]:
    """Yield the documents of one module, those with lone surrogates left out."""
    for qualified, kind, docstring, repeat in docstrings:
        if encoding_error(docstring) is not None:
            continue
        text, has_summary = _without_repetitions(docstring, seen)
        if len(text) <= MIN_DOCUMENT_CHARS:
            continue
        suffix = f"#{repeat}" if repeat > 1 else ""
        stem = path.parent.name if path.stem == "__init__" else path.stem
        name = qualified.rpartition(".")[2] or stem
        yield Document(f"{module}::{qualified}{suffix}", text, name, kind, has_summary)


def _module_files(root: Path, base: Path) -> Iterator[Path]:
    """Yield the ``.py`` files under `root`, folders in string order, skipped folders left out."""
    for folder, _, files in sorted(os.walk(root)):
        parts = Path(folder).relative_to(base).parts
        if SKIPPED_FOLDERS.intersection(parts) or "site-packages" in parts:
            continue
        for file in sorted(files):
            if file.endswith(".py"):
                yield Path(folder, file)


def _without_repetitions(docstring: str, seen: set[bytes]) -> tuple[str, bool]:
    """Drop the long paragraphs in `seen`, add the others to it."""
    paragraphs: list[str] = []
    has_summary = True
    for index, paragraph in enumerate(docstring.split("\n\n")):
        if len(paragraph) > MIN_PARAGRAPH_CHARS:
            folded = " ".join(paragraph.split()).encode()
            key = hashlib.blake2b(folded, digest_size=8).digest()
            if key in seen:
                has_summary = has_summary and index > 0
                continue
            seen.add(key)
        paragraphs.append(paragraph)
    return "\n\n".join(paragraphs).strip(), has_summary
