"""The benchmark of generated texts: prompts, spread over seeds, page and a tiny run."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.generation_quality import MERGES, Subject, choose_prompts, main, over_seeds, run
from docs.make.results import benchmark_page
from umim_core import UMIM
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.evaluation.generation_quality import GenerationQuality

QUALITY = GenerationQuality(
    repetition={2: 0.5, 3: 0.5, 4: 0.5},
    distinct={1: float("nan"), 2: 0.5, 3: 0.5, 4: 0.5},
    ppl=8.0,
    tokens=100.0,
    token_reduction=0.25,
    gen_kv_reduction=0.5,
    cumulative_kv_reduction=0.125,
)


def test_mean_and_deviation_are_over_seeds() -> None:
    found = over_seeds([QUALITY, replace(QUALITY, ppl=10.0), replace(QUALITY, ppl=12.0)])
    assert found["ppl"] == {"mean": 10.0, "std": 2.0}
    assert found["rep_2"] == {"mean": 0.5, "std": 0.0}


def test_what_is_undefined_is_null() -> None:
    found = over_seeds([QUALITY])
    assert found["ppl"] == {"mean": 8.0, "std": None}
    assert found["dist_1"] == {"mean": None, "std": None}


def test_prompts_are_spread_over_documents_that_are_long_enough(tiny_umim: UMIM) -> None:
    texts = [" ".join([f"w{number}"] * length) for number, length in enumerate([0, 3, 2, 4, 9, 3])]
    chosen = choose_prompts(texts, tiny_umim, 3, length=3)  # of documents 1, 3, 4 and 5
    assert [prompt.tolist() for prompt in chosen] == [[1] * 3, [3] * 3, [5] * 3]


def test_too_few_documents_are_told(tiny_umim: UMIM) -> None:
    with pytest.raises(SystemExit, match="only 1 documents have 3 tokens, 2 are wanted"):
        choose_prompts(["w1 w2", "w1 w2 w3"], tiny_umim, 2, length=3)


def test_every_way_of_merging_runs_in_batches(tiny_umim: UMIM) -> None:
    prompts = [np.array([1, 2, 9, 3, 4]), np.array([5, 6, 7, 8, 9, 1, 2])] * 2
    subject = Subject(tiny_umim, prompts, 6)
    units = {
        merge: [row.prompt_units for row in run(subject, "greedy", merge, 0, 3)] for merge in MERGES
    }
    assert units == {"none": [5, 7, 5, 7], "prompt": [4, 3, 4, 3], "all": [4, 3, 4, 3]}


def test_seeds_change_samples_and_not_greedy_texts(tiny_umim: UMIM) -> None:
    subject = Subject(tiny_umim, [np.array([1, 2, 9, 3])] * 2, 12)

    def texts(decoding: str, seed: int) -> list[tuple[int, ...]]:
        return [row.ids for row in run(subject, decoding, "all", seed, 2)]

    assert texts("greedy", 0) == texts("greedy", 1)
    assert texts("plain sampling", 0) == texts("plain sampling", 0) != texts("plain sampling", 1)


def test_a_checkpoint_and_its_text_go_together() -> None:
    with pytest.raises(SystemExit):
        main(["--embedded", "--checkpoint", "somewhere"])


def test_a_tiny_run_writes_results_and_their_page(tiny_checkpoint: Path, tmp_path: Path) -> None:
    words = [f"w{number}" for number in range(1, 32)]
    lines = [" ".join(words[start : start + 8] * 13) for start in range(4)]
    (tmp_path / "text.txt").write_text("\n".join(lines), "utf-8")
    out, made = tmp_path / "generation_quality.json", Checkpoint.load(tiny_checkpoint)
    priced = replace(made.rules, prices=np.ones(len(made.rules), np.float32))
    bounded = made.with_contents(made.module, priced).decoding_under(0.5)
    bounded.save(tmp_path / "priced")
    options = ["--embedded", "--checkpoint", tmp_path / "priced", "--text", tmp_path / "text.txt"]
    options += [
        "--prompt-tokens",
        6,
        "--new-tokens",
        5,
        "--name",
        "tiny",
        "--prompts",
        3,
        "--seeds",
        2,
        "--out",
        out,
    ]
    options += ["--min-probability", 1, "--max-damage", 0.5, 2]
    options += ["--span-eviction", 2, "--commit", "abc"]
    assert main([str(option) for option in options]) == 0
    report = json.loads(out.read_text("utf-8"))
    rows = report["subjects"]["tiny"]["rows"]
    assert [row["runs"] for row in rows] == [1] * 7 + [2] * 14
    assert [row["decode_min_probability"] for row in rows] == [0, 0, 0, 1, 0, 0, 0] * 3
    assert [row["decode_max_damage"] for row in rows] == [None, None, None, None, 0.5, 2, None] * 3
    for bound in (3, 4):  # nothing is certain, and every price is 1
        assert all(row["metrics"]["gen_kv_reduction"]["mean"] == 0 for row in rows[bound::7])
    assert [row["metrics"] for row in rows[2::7]] == [row["metrics"] for row in rows[5::7]]
    assert [row["span_eviction"] for row in rows] == [None, None, None, None, None, None, 2] * 3
    assert rows[6]["metrics"]["gen_kv_reduction"]["mean"] > 0  # columns go though nothing merges
    base = rows[0]["metrics"]
    assert base["token_reduction"] == base["gen_kv_reduction"] == {"mean": 0.0, "std": None}
    assert out.with_suffix(".md").read_text("utf-8") == benchmark_page(report)
    # A second call measures what is missing and nothing else.
    base["ppl"]["mean"] = -1.0
    interrupted = copy.deepcopy(report)
    interrupted["subjects"]["tiny"]["rows"] = rows[:-1]
    out.write_text(json.dumps(interrupted), "utf-8")
    assert main([str(option) for option in options]) == 0
    assert json.loads(out.read_text("utf-8")) == report
    # With other prices, only the rows under a bound on them are measured anew.
    cheaper = replace(made.rules, prices=np.zeros(len(made.rules), np.float32))
    made.with_contents(made.module, cheaper).save(tmp_path / "cheaper")
    options[options.index(tmp_path / "priced")] = tmp_path / "cheaper"
    assert main([str(option) for option in options]) == 0
    again = json.loads(out.read_text("utf-8"))["subjects"]["tiny"]["rows"]
    free = [row for row in rows if row["decode_max_damage"] is None]
    assert again[: len(free)] == free and len(again) == len(rows)
    cheap = [row["metrics"] for row in again[len(free) :: 2]]  # all rules are under the bound now
    assert cheap == [row["metrics"] for row in rows[2::7]]


def test_a_page_shows_means_deviations_and_shares() -> None:
    row = {"decoding": "plain sampling", "merge": "all", "runs": 2}
    likely = row | {"decode_min_probability": 0.6, "decode_max_damage": None}
    cheap = row | {"decode_min_probability": 0.0, "decode_max_damage": 0.25}
    metrics = over_seeds([QUALITY, replace(QUALITY, ppl=10.0, gen_kv_reduction=0.25)])
    report = {
        "benchmark": "generation_quality",
        "facts": {"platform": "Linux", "cores": 2, "commit": None, "versions": {"numpy": "2"}},
        "prompt_tokens": 100,
        "new_tokens": 100,
        "seeds": 2,
        "subjects": {
            "tiny": {
                "prompts": 3,
                "rows": [way | {"metrics": metrics} for way in (row, likely, cheap)],
            }
        },
    }
    page = benchmark_page(report)
    for text in (
        "9.00 ± 1.41",
        "37.5 ± 17.7 %",
        "Rep-2",
        "PPL",
        "UMIM, prompt and decode where p >= 0.6",
        "UMIM, prompt and decode by rules of at most 0.25 nats per saved token",
    ):
        assert text in page
