"""Change places of the method's code, one at a time, and count what the tests nearest to it notice.

python -m tests.mutate [SEED [PLACES]]      works in a copy of the tree; a line a place, JSON last
"""

from __future__ import annotations

import ast
import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from copy import copy
from pathlib import Path

LOOP = [f"tasks/training/test_{name}.py" for name in ("train_loop", "train_job", "strategies")]
TESTS = {"rules": ["rules", "model/test_loading.py"],
         "merging": ["merging", "evaluation/test_perplexity.py"],
         "inference": ["inference", "model"], "training": ["training", *LOOP]}  # fmt: skip
SWAP: dict[type, type] = {ast.Lt: ast.LtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.Add: ast.Sub}
SWAP |= {ast.And: ast.Or} | {to: old for old, to in SWAP.items()} | {ast.Or: ast.And}


def change(node: ast.AST) -> bool:
    """Change a node in place; False where it is no place for a change."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in SWAP:
            node.ops = [SWAP[type(op)]()]
        case ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in SWAP:
            node.op = SWAP[type(op)]()
        case ast.UnaryOp(op=ast.Not()):
            node.operand = ast.UnaryOp(ast.Not(), node.operand)
        case ast.Constant(value=int(value)) if not isinstance(value, bool) and value < 9:
            node.value = value + 1
        case _:
            return False
    return True


def places(node: ast.AST, in_function: bool = False) -> Iterator[ast.AST]:
    """Give the places of a file: in functions, not in text or in what is raised."""
    if isinstance(node, ast.Raise | ast.JoinedStr | ast.arguments | ast.AnnAssign):
        return
    if in_function and change(copy(node)):
        yield node
    for child in ast.iter_child_nodes(node):
        yield from places(child, in_function or isinstance(node, ast.FunctionDef))


def notices(tree: Path, room: str) -> bool:
    """Return whether a test near to a room fails."""
    tests = [f"tests/{name}" for name in TESTS[room]]
    command = [sys.executable, "-m", "pytest", "-xq", "-p", "no:cacheprovider", *tests]
    return subprocess.run(command, cwd=tree, stdout=subprocess.DEVNULL, timeout=1800).returncode > 0


def main(seed: int = 0, count: int = 40) -> None:
    """Run the changes."""
    with tempfile.TemporaryDirectory() as folder:
        copied, draw, caught = Path(folder) / "tree", random.Random(seed), 0
        shutil.copytree(".", copied, ignore=shutil.ignore_patterns(".git", ".venv*", ".umim"))
        if failing := [room for room in TESTS if notices(copied, room)]:
            sys.exit(f"tests fail without any change: {failing}")
        for number in range(count):
            room = list(TESTS)[number % len(TESTS)]
            files = sorted((copied / "umim_core" / room).rglob("*.py"))
            trees = [(path, ast.parse(path.read_bytes())) for path in files]
            path, tree, node = draw.choice([(p, t, n) for p, t in trees for n in places(t)])
            whole, before = path.read_bytes(), ast.unparse(node)
            change(node)
            path.write_text(ast.unparse(tree))
            noticed = notices(copied, room)
            path.write_bytes(whole)
            caught += noticed
            where = f"{path.relative_to(copied)}:{node.lineno} {before} -> {ast.unparse(node)}"
            print("caught" if noticed else "MISSED", where, flush=True)
    print(json.dumps({"seed": seed, "places": count, "caught": caught}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
