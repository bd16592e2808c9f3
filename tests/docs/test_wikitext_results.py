"""The committed results on WikiText-2 agree with their page, their figure and the known figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.wikitext_rules import main

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
# Of an independent oracle: (tau, overlap, containment) -> token reduction in percent.
REDUCTION = {
    (5, "greedy", "drop"): 28.52,
    (5, "greedy", "keep"): 39.97,
    (50, "greedy", "drop"): 20.35,
    (50, "greedy", "keep"): 30.23,
}


@pytest.mark.parametrize("arguments", [[], ["--data", "x"], ["--data", "x", "--tokenizer", "y"]])
def test_a_run_without_its_inputs_is_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert "--data DIR and --tokenizer NAME=DIR are needed" in capsys.readouterr().err


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
    assert main([*map(str, arguments), "--out", str(tmp_path / "x.json")]) == 0
    again = json.loads((tmp_path / "x.json").read_text("utf-8"))
    committed = json.loads((RESULTS / "wikitext2-rules.json").read_text("utf-8"))
    for part in ("corpus", "segment_length", "tokenizers"):
        assert again[part] == committed[part]
    assert (tmp_path / "x.md").is_file()
    assert (tmp_path / "wikitext2-tr-against-rules.svg").is_file()
