"""Positions by kind of text: every kind is read, and a function counts once."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.positions import BENCHMARK, schemas


def rows(path: Path, *objects: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, objects)), "utf-8")
    return path


def test_every_kind_has_its_figures_its_page_and_the_picture(tmp_path: Path) -> None:
    functions = [{"name": f"get_{n}", "description": "Returns the array."} for n in "abcdefghij"]
    rows(tmp_path / "bfcl" / "simple.jsonl", {"function": functions})
    rows(tmp_path / "tools" / "github-mcp.jsonl", *({"function": one} for one in functions))
    rows(tmp_path / "tools" / "orders.jsonl", *({"state": "sent", "to": n} for n in "abcdefghij"))
    texts = ({"text": f"Return the sum of the array elements over {n}."} for n in "abcdefghij")
    rows(tmp_path / "general" / "web-test.jsonl", *texts)
    for n in "abcdefghij":
        (tmp_path / f"{n}.py").write_text(f"import numpy as np\n\n{n} = np.zeros(3)\n", "utf-8")
    out = tmp_path / "positions.json"
    options = ("--data", tmp_path, "--code", tmp_path / "*.py", "--out", out)
    assert BENCHMARK.main([*map(str, options), "--tokenizer", "umim-docs-llama"]) == 0
    kinds = json.loads(out.read_text("utf-8"))["kinds"]
    assert {(one["texts"], one["unseen"]) for one in kinds.values()} == {(10, 2)}
    assert all(0 < one["saved"]["16 tokens, 8192 spans"] < 1 for one in kinds.values())
    assert "| prose " in out.with_suffix(".md").read_text("utf-8")
    assert "prose" in out.with_suffix(".svg").read_text("utf-8")


def test_a_function_of_several_questions_is_one_schema(tmp_path: Path) -> None:
    file = rows(tmp_path / "a.jsonl", {"function": [{"name": "f"}]}, {"function": [{"name": "f"}]})
    (request,) = schemas([file])
    assert [piece.text for piece in request.prompt] == ['{"function": {"name": "f"}}']
