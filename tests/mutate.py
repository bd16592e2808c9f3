"""Change places of the method's code, one at a time, and count what the tests of their room notice.

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
from pathlib import Path

TESTS = {"rules": ["rules"], "merging": ["merging"], "inference": ["inference", "model"],
         "training": ["training"]}  # fmt: skip
SWAP: dict[type, type] = {ast.Lt: ast.LtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.Add: ast.Sub}
SWAP |= {ast.And: ast.Or} | {to: old for old, to in SWAP.items()} | {ast.Or: ast.And}


def mutant(node: ast.AST) -> str | None:
    """Return other code for a node; None where it is no place for a change."""
    match twin := ast.parse(ast.unparse(node)).body[0].value if isinstance(node, KINDS) else None:
        case ast.Compare(ops=[op]) if type(op) in SWAP:
            twin.ops = [SWAP[type(op)]()]
        case ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in SWAP:
            twin.op = SWAP[type(op)]()
        case ast.UnaryOp(op=ast.Not()):
            twin = twin.operand
        case ast.Constant(value=int(value)) if not isinstance(value, bool) and value < 9:
            twin = ast.Constant(value + 1)
        case _:
            return None
    return f"({ast.unparse(twin)})"


KINDS = (ast.Compare, ast.BinOp, ast.BoolOp, ast.UnaryOp, ast.Constant)


def places(path: Path) -> list[tuple[Path, ast.AST]]:
    """Return the places of a file: in functions, on one line, not in text or in what is raised."""
    skipped = (ast.Raise, ast.JoinedStr, ast.arguments, ast.AnnAssign)

    def inside(node: ast.AST) -> list[ast.AST]:
        below = [x for child in ast.iter_child_nodes(node) for x in inside(child)]
        return [] if isinstance(node, skipped) else [node, *below]

    functions = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef)]
    nodes = {(n.lineno, n.col_offset): n for f in functions for n in inside(f) if mutant(n)}
    return [(path, n) for n in nodes.values() if n.lineno == n.end_lineno]


def notices(tree: Path, room: str) -> bool:
    """Return whether a test of a room fails."""
    tests = [f"tests/{name}" for name in TESTS[room]]
    command = [sys.executable, "-m", "pytest", "-xq", "-p", "no:cacheprovider", *tests]
    return subprocess.run(command, cwd=tree, stdout=subprocess.DEVNULL, timeout=1800).returncode > 0


def main(seed: int = 0, count: int = 40) -> None:
    """Run the changes."""
    with tempfile.TemporaryDirectory() as folder:
        tree, draw, caught = Path(folder) / "tree", random.Random(seed), 0
        shutil.copytree(".", tree, ignore=shutil.ignore_patterns(".git", ".venv*", ".umim"))
        if failing := [room for room in TESTS if notices(tree, room)]:
            sys.exit(f"tests fail without any change: {failing}")
        for number in range(count):
            room = list(TESTS)[number % len(TESTS)]
            files = sorted((tree / "umim_core" / room).rglob("*.py"))
            path, node = draw.choice([place for file in files for place in places(file)])
            whole, other = path.read_bytes(), str(mutant(node))
            lines = whole.split(b"\n")
            line = lines[node.lineno - 1]
            changed = line[: node.col_offset] + other.encode() + line[node.end_col_offset :]
            path.write_bytes(
                b"\n".join([*lines[: node.lineno - 1], changed, *lines[node.lineno :]])
            )
            noticed = notices(tree, room)
            path.write_bytes(whole)
            caught += noticed
            where = f"{path.relative_to(tree)}:{node.lineno} {ast.unparse(node)} -> {other}"
            print("caught" if noticed else "MISSED", where, flush=True)
    print(json.dumps({"seed": seed, "places": count, "caught": caught}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
