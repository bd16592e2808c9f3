"""Docstrings of Python source files, read by this process or by several.

Worker processes are plain interpreters that run this module with paths on stdin and JSON on stdout:
unlike a process pool they never import the caller's script again, so any caller is safe. The module
imports the standard library only.
"""

from __future__ import annotations

import ast
import gc
import inspect
import json
import subprocess
import sys
import warnings
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from umim_core.embedded.documents import Kind
from umim_core.errors import CorpusError

MIN_DOCUMENT_CHARS: Final = 120  # documents must be longer
_CHUNK: Final = 512  # files per worker process: about a second of parsing, 0.1 s of start-up
_BLOCKS: Final = ("body", "handlers", "orelse", "finalbody", "cases")
Found = tuple[str, Kind, str, int]


def read_modules(paths: Sequence[Path], workers: int = 1) -> Iterator[list[Found] | None]:
    """Yield the long docstrings of each file, in order.

    Yields:
        Per file (qualified name, kind, docstring, which one of that name), or None for a file that
        does not parse.

    Raises:
        CorpusError: If a worker process dies.
    """
    if workers == 1:
        yield from map(_read_module, paths)
        return
    chunks = [paths[start : start + _CHUNK] for start in range(0, len(paths), _CHUNK)]
    with ThreadPoolExecutor(workers) as pool:
        for docstrings in pool.map(_read_elsewhere, chunks):
            yield from docstrings


def _read_elsewhere(paths: Sequence[Path]) -> list[list[Found] | None]:
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
    rows = json.loads(done.stdout)
    return [None if row is None else [(n, k, text, i) for n, k, text, i in row] for row in rows]


def _read_module(path: Path) -> list[Found] | None:
    """Return (qualified name, kind, docstring, which one of that name) of the long docstrings.

    None stands for a file that does not parse.
    """
    tree = _parse(path)
    if tree is None:
        return None
    repeats: Counter[str] = Counter()
    docstrings: list[Found] = []
    for qualified, kind, docstring in _docstrings(tree):
        repeats[qualified] += 1
        if len(docstring) > MIN_DOCUMENT_CHARS:
            docstrings.append((qualified, kind, docstring, repeats[qualified]))
    return docstrings


def _parse(path: Path) -> ast.Module | None:
    """Return the syntax tree, or None for templates, Python 2 and other things in ``.py`` files."""
    try:
        # Invalid escapes warn, and would be errors under -W error: not our modules to mend.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, SyntaxError, ValueError, RecursionError, MemoryError):
        # ValueError: NUL or bad UTF-8; MemoryError: nested too deep for CPython's parser;
        # FileNotFoundError: a dangling link.
        return None


def _docstrings(tree: ast.Module) -> Iterator[tuple[str, Kind, str]]:
    """Yield (qualified name, kind, cleaned docstring), breadth first as `ast.walk` does."""
    queue: deque[tuple[ast.AST, str]] = deque([(tree, "")])
    while queue:
        node, scope = queue.popleft()
        kind: Kind | None = None
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
