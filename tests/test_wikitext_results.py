"""The committed results on WikiText-2 agree with their page, their figure and the known figures."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "infra" / "scripts" / "wikitext_rules.py"
RESULTS = ROOT / "docs" / "results"
# Of an independent oracle: (tau, overlap, containment) -> token reduction in percent.
REDUCTION = {
    (5, "greedy", "drop"): 28.52,
    (5, "greedy", "keep"): 39.97,
    (50, "greedy", "drop"): 20.35,
    (50, "greedy", "keep"): 30.23,
}


def check(*arguments: object) -> int:
    command = [sys.executable, str(SCRIPT), "--check", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    return done.returncode


def test_the_page_shows_the_committed_results() -> None:
    assert check() == 0, "run infra/scripts/wikitext_rules.py"


def test_a_page_of_other_results_is_seen(tmp_path: Path) -> None:
    for ending in ("json", "md"):
        shutil.copy(RESULTS / f"wikitext2-rules.{ending}", tmp_path / f"x.{ending}")
    assert check("--out", tmp_path / "x.json") == 0
    results = json.loads((tmp_path / "x.json").read_text("utf-8"))
    results["tokenizers"][0]["cells"][0]["token_reduction"] += 0.001
    (tmp_path / "x.json").write_text(json.dumps(results), "utf-8")
    assert check("--out", tmp_path / "x.json") == 1


def test_a_missing_page_is_seen(tmp_path: Path) -> None:
    shutil.copy(RESULTS / "wikitext2-rules.json", tmp_path / "x.json")
    assert check("--out", tmp_path / "x.json") == 1


@pytest.mark.parametrize("arguments", [[], ["--data", "x"], ["--data", "x", "--tokenizer", "y"]])
def test_a_run_without_its_inputs_is_refused(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert "--data DIR and --tokenizer NAME=DIR are needed" in done.stderr


def test_the_committed_results_are_those_of_the_oracle() -> None:
    results = json.loads((RESULTS / "wikitext2-rules.json").read_text("utf-8"))
    gpt2 = {t["name"]: t for t in results["tokenizers"]}["GPT-2"]
    cells = {(c["tau"], c["overlap"], c["containment"]): c for c in gpt2["cells"]}
    found = {key: round(100 * cells[key]["token_reduction"], 2) for key in REDUCTION}
    assert found == REDUCTION
    assert cells[5, "greedy", "drop"]["rules"] == {"2": 10131, "3": 13148, "4": 11542}
    assert cells[50, "greedy", "drop"]["rules"] == {"2": 860, "3": 487, "4": 324}


def test_every_cell_lies_on_its_curve() -> None:
    results = json.loads((RESULTS / "wikitext2-rules.json").read_text("utf-8"))
    for tokenizer in results["tokenizers"]:
        points = {
            (p["tau"], p["overlap"], p["containment"]): (p["rules"], p["token_reduction"])
            for p in tokenizer["curve"]
        }
        for cell in tokenizer["cells"]:
            key = cell["tau"], cell["overlap"], cell["containment"]
            assert points[key] == (sum(cell["rules"].values()), cell["token_reduction"])


def test_the_page_embeds_a_figure_that_is_there() -> None:
    name = "wikitext2-tr-against-rules.svg"
    assert f"]({name})" in (RESULTS / "wikitext2-rules.md").read_text("utf-8")
    svg = (RESULTS / name).read_text("utf-8")
    assert svg.startswith("<svg ")
    assert all(f"{a} + {b}" in svg for a in ("greedy", "none") for b in ("drop", "keep"))


@pytest.mark.full
def test_the_results_can_be_measured_again(tmp_path: Path) -> None:
    data = ROOT.parent / "shared" / "data"
    corpus, tokenizers = data / "wikitext-2", data / "tokenizers"
    if not (corpus.is_dir() and tokenizers.is_dir()):
        pytest.skip(f"WikiText-2 and the tokenizers are not at {data}")
    names = [f"GPT-2={tokenizers / 'gpt2'}", f"NeoX={tokenizers / 'neox'}"]
    arguments = ["--data", corpus, *(word for name in names for word in ("--tokenizer", name))]
    command = [sys.executable, str(SCRIPT), *map(str, arguments), "--out", str(tmp_path / "x.json")]
    subprocess.run(command, check=True, timeout=600)
    again = json.loads((tmp_path / "x.json").read_text("utf-8"))
    committed = json.loads((RESULTS / "wikitext2-rules.json").read_text("utf-8"))
    for part in ("corpus", "segment_length", "tokenizers"):
        assert again[part] == committed[part]
    assert (tmp_path / "x.md").is_file()
    assert (tmp_path / "wikitext2-tr-against-rules.svg").is_file()
