"""Every benchmark on tiny input: equal sides, results without paths, their page, the status."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks import positions
from benchmarks.runner import Benchmark, Report
from benchmarks.subjects import SEGMENT
from docs.make.results import benchmark_page
from support.processes import run_command
from umim_core import UMIM
from umim_core.embedded.docstring_corpus import held_out_text
from umim_core.text.roles import Role

SMALL = "umim-docs-llama"
HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": 'def add(a, b):\n    """Return the sum of a and b."""\n',
    "entry_point": "add",
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
}
FILES: dict[str, Callable[[np.random.Generator], np.ndarray | str]] = {
    "zipf.npy": lambda rng: (300 + rng.zipf(1.3, 80 * SEGMENT) % 500).astype(np.uint32),
    "text.txt": lambda rng: held_out_text()[:20_000],
    "humaneval.jsonl": lambda rng: json.dumps(HUMANEVAL),
}
QUICK = {
    "engine": f"--backbones {SMALL} --prompt-lengths 64 --batch-sizes 1 3 --new-tokens 4 --pairs 1 "
    "--warmup 0 --token-reductions 0.5 --device cpu",
    "merged_quality": f"--checkpoints a={SMALL} b={SMALL} --test text.txt --rows 2 --window 64",
    "problems": f"--checkpoint {SMALL} --humaneval humaneval.jsonl --dtype float32",
}
FULL = {
    "matching": f"--ids zipf.npy --held-out {20 * SEGMENT} --rounds 2 --synthetic 100 100 100",
    "mining": "--ids zipf.npy --rounds 1",
}


def words(options: str, folder: Path, rng: np.random.Generator) -> list[str]:
    """Return options whose files lie in a folder."""
    for name, make in FILES.items():
        if name in options:
            content = make(rng)
            if isinstance(content, str):
                (folder / name).write_text(content, "utf-8")
            else:
                np.save(folder / name, content)
            options = options.replace(name, str(folder / name))
    return [*options.split(), "--commit", "abc", "--out", str(folder / "results.json")]


def check(folder: Path, name: str, status: int, printed: str) -> Report:
    """Return results that agree, of which the run printed page and JSON."""
    text = (folder / "results.json").read_text("utf-8")
    report: Report = json.loads(text)
    assert report["benchmark"] == name and report["facts"]["commit"] == "abc"
    assert str(folder) not in text and json.loads(printed.splitlines()[-1]) == report
    passed = [gate[2] for gate in report.get("gates", {}).values()]
    assert report.get("equal", True) is True and status == int(not all(passed))
    page = (folder / "results.md").read_text("utf-8")
    assert page == benchmark_page(report) and printed.startswith(page)
    assert f"Measured by `python -m benchmarks.{name}`." in page
    return report


@pytest.mark.parametrize("name", QUICK)
def test_a_tiny_run(
    name: str, rng: np.random.Generator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark: Benchmark = importlib.import_module(f"benchmarks.{name}").BENCHMARK
    status = benchmark.main(words(QUICK[name], tmp_path, rng))
    report = check(tmp_path, name, status, capsys.readouterr().out)
    if name == "merged_quality":
        one, other = report["subjects"].values()
        assert one == other and 0 < one["prompt_saving"] < one["saving"] < 1
    if name == "engine":
        assert report["backbones"][SMALL]["logits_error"]["1"] == 0.0  # under an empty rule set
        assert len(report["backbones"][SMALL]["engines"]["3"]) == 3
    if name == "problems":
        sides = report["sets"]["humaneval"]["sides"]
        assert list(sides) == ["base", "umim", "truncation"]
        assert sides["base"]["points"]["mean"] == 0


@pytest.mark.full
@pytest.mark.parametrize("name", FULL)
def test_a_tiny_run_in_a_process(name: str, rng: np.random.Generator, tmp_path: Path) -> None:
    options = words(FULL[name], tmp_path, rng)
    done = run_command(sys.executable, "-m", f"benchmarks.{name}", *options, seconds=900)
    report = check(tmp_path, name, done.returncode, done.stdout)
    if name == "mining":
        assert report["memory"]["peak_bytes"] > 0


@pytest.mark.parametrize(
    ("name", "roles", "role"),
    [("calls", ["user"], "tools"), ("answers", ["tools"], "user"), ("problems", [], "user")],
)
def test_a_checkpoint_that_merges_nothing_of_what_is_asked_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, roles: list[Role], role: str
) -> None:
    UMIM.from_pretrained(SMALL).checkpoint.recommending("prompt", 0, roles).save(tmp_path / "made")
    files = {"calls": ["--bfcl", tmp_path], "problems": ["--gsm8k", tmp_path]}.get(name, [])
    options = ["--checkpoint", tmp_path / "made", "--out", tmp_path / "results.json", *files]
    benchmark: Benchmark = importlib.import_module(f"benchmarks.{name}").BENCHMARK
    with pytest.raises(SystemExit):
        benchmark.main([*map(str, options), "--commit", "abc"])
    found = ", ".join(roles) or "no role"
    (line,) = capsys.readouterr().err.splitlines()
    assert f"role '{role}', or nothing that is asked merges; got {found}. Save another" in line


def test_every_benchmark_is_run_here_or_has_tests_of_its_own() -> None:
    scripts = Path(str(sys.modules["benchmarks"].__path__[0])).glob("*.py")
    named = {path.stem for path in scripts if re.search("^BENCHMARK", path.read_text(), re.M)}
    elsewhere = {"answers", "calls", "gpu", "positions"}  # next to this, below
    elsewhere |= {"engines"}  # tests/serving
    assert named == {*QUICK, *FULL, *elsewhere}


def rows(path: Path, *objects: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, objects)), "utf-8")
    return path


def test_every_kind_has_its_figures_its_page_and_the_picture(tmp_path: Path) -> None:
    functions = [{"name": f"get_{n}", "description": "Returns the array."} for n in "abcdefghij"]
    rows(tmp_path / "bfcl" / "simple.jsonl", *[{"function": functions}] * 2)  # each counts once
    rows(tmp_path / "tools" / "github-mcp.jsonl", *({"function": one} for one in functions))
    rows(tmp_path / "tools" / "orders.jsonl", *({"state": "sent", "to": n} for n in "abcdefghij"))
    texts = ({"text": f"Return the sum of the array elements over {n}."} for n in "abcdefghij")
    rows(tmp_path / "general" / "web-test.jsonl", *texts)
    for n in "abcdefghij":
        (tmp_path / f"{n}.py").write_text(f"import numpy as np\n\n{n} = np.zeros(3)\n", "utf-8")
    out = tmp_path / "positions.json"
    options = ("--data", tmp_path, "--code", tmp_path / "*.py", "--out", out)
    assert positions.BENCHMARK.main([*map(str, options), "--tokenizer", "umim-docs-llama"]) == 0
    kinds = json.loads(out.read_text("utf-8"))["kinds"]
    assert {(one["texts"], one["unseen"]) for one in kinds.values()} == {(10, 2)}
    assert all(0 < one["saved"]["16 tokens, 8192 spans"] < 1 for one in kinds.values())
    assert "| prose " in out.with_suffix(".md").read_text("utf-8")
    assert "prose" in out.with_suffix(".svg").read_text("utf-8")
