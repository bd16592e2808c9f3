"""The benchmark of generated texts: prompts, spread over seeds, page and a tiny run."""

from __future__ import annotations

import copy
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.common import Report
from benchmarks.generation_quality.__main__ import main
from benchmarks.generation_quality.damage_bounds import damage_bounds
from benchmarks.generation_quality.method_runs import method_writer
from benchmarks.generation_quality.text_runs import (
    MERGES,
    PLAIN,
    Subject,
    choose_prompts,
    over_seeds,
    run,
)
from docs.make.benchmark_charts import DRAWINGS
from docs.make.benchmark_rows import ratio_of
from docs.make.results import benchmark_page
from umim_core import UMIM
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.errors import ConfigError, MissingExtraError, RuleSetError
from umim_core.evaluation.generation_quality import GenerationQuality
from umim_core.evaluation.text_metrics.reference_similarity import ReferenceSimilarity

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


@pytest.mark.parametrize("bound", ["--max-damage", "--decode-tr"])
def test_bounds_on_damage_are_refused_where_rules_have_no_prices(
    bound: str, tiny_checkpoint: Path
) -> None:
    with pytest.raises(RuleSetError, match="3 rules without prices"):
        main(["--checkpoints", str(tiny_checkpoint), "--text", "absent.txt", bound, "0.1"])


def test_a_token_reduction_gives_the_least_bound_that_reaches_it(tiny_umim: UMIM) -> None:
    """Of 15 tokens the pair saves 2 (at a price of 2), the four 3 (1) and the three 2 (0.5)."""
    texts = ["w1 w2 w10 w1 w2 w6 w7 w8 w9", "w3 w4 w5 w11", "w5 w12"]
    rules = replace(tiny_umim.rules, prices=np.array([2, 0.5, 1], np.float32))
    made = tiny_umim.checkpoint.with_contents(tiny_umim.module, rules)
    umim = UMIM(tiny_umim.backbone, made)
    assert damage_bounds(umim, texts, [0.5, 0.75], [0.1, 0.2, 0.4]) == {
        0.5: pytest.approx(2 / 15),
        0.75: pytest.approx(2 / 15),
        1.0: pytest.approx(5 / 15),
        2.0: pytest.approx(7 / 15),
    }
    with pytest.raises(RuleSetError, match=r"must reach a token reduction of 0\.5"):
        damage_bounds(umim, texts, [], [0.5])


def test_a_library_that_is_missing_is_named_before_anything_is_generated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics.chrf", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'umim\[eval\]'"):
        main(["--checkpoints", "absent", "--text", "absent.txt"])


def test_a_tiny_run_writes_results_and_their_page(tiny_checkpoint: Path, tmp_path: Path) -> None:
    words = [f"w{number}" for number in range(1, 32)]
    lines = [" ".join(words[start : start + 8] * 13) for start in range(4)]
    (tmp_path / "text.txt").write_text("\n".join(lines), "utf-8")
    out, made = tmp_path / "generation_quality.json", Checkpoint.load(tiny_checkpoint)
    priced = replace(made.rules, prices=np.ones(len(made.rules), np.float32))
    bounded = made.with_contents(made.module, priced).decoding_under(0.5)
    bounded.save(tmp_path / "priced")
    options = ["--checkpoints", f"tiny={tmp_path / 'priced'}", "--text", tmp_path / "text.txt"]
    options += ["--prompt-tokens", 6, "--new-tokens", 5, "--prompts", 3, "--seeds", 2]
    options += ["--out", out, "--max-damage", 0.5, 2]
    options += ["--span-eviction", 2, "--commit", "abc"]
    assert main([str(option) for option in options]) == 0
    report = json.loads(out.read_text("utf-8"))
    rows = report["subjects"]["tiny"]["rows"]
    assert [row["runs"] for row in rows] == [1] * 6 + [2] * 12
    assert [row["decode_max_damage"] for row in rows] == [None, None, None, 0.5, 2, None] * 3
    # every price is 1
    assert all(row["metrics"]["gen_kv_reduction"]["mean"] == 0 for row in rows[3::6])
    assert [row["metrics"] for row in rows[2::6]] == [row["metrics"] for row in rows[4::6]]
    assert [row["span_eviction"] for row in rows] == [None, None, None, None, None, 2] * 3
    assert rows[6]["metrics"]["gen_kv_reduction"]["mean"] > 0  # columns go though nothing merges
    base = rows[0]["metrics"]
    assert base["token_reduction"] == base["gen_kv_reduction"] == {"mean": 0.0, "std": None}
    assert base["mauve_stand_in_features"] == {"mean": None, "std": None}  # of three prompts
    features = report["subjects"]["tiny"]["features"]
    assert features.startswith("stand-in features: hidden states of") and "/" not in features
    for number, row in enumerate(rows):
        compared, own = row["by_prompt"], rows[number // 7 * 7]["by_prompt"]
        for name, values in compared.items():
            assert np.mean(values) == pytest.approx(row["metrics"][name]["mean"], abs=1e-5)
            step = np.subtract(values, own[name])
            wanted = {"mean": np.mean(step), "error": np.std(step, ddof=1) / 3**0.5}
            if number % 7:
                assert row["differences"][name] == pytest.approx(wanted, abs=1e-9)
        assert len(compared) == 6 and bool(row["differences"]) == bool(number % 7)
    shares = [row.get("text_token_reduction") for row in rows[:7]]
    assert shares[:5] == [None, None, None, None, 0] and shares[5] > 0.3 and shares[6] is None
    assert out.with_suffix(".md").read_text("utf-8") == benchmark_page(report)
    assert out.with_suffix(".svg").read_text("utf-8").startswith("<svg")
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
    options[1] = f"tiny={tmp_path / 'cheaper'}"
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
    cheap["text_token_reduction"] = 0.08
    metrics = over_seeds([QUALITY, replace(QUALITY, ppl=10.0, gen_kv_reduction=0.25)])
    report = {
        "benchmark": "generation_quality",
        "facts": {"platform": "Linux", "cores": 2, "commit": None, "versions": {"numpy": "2"}},
        "name": "quality",
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
    assert "![Perplexity of generated text" in page and "(quality.svg)" in page
    for text in (
        "9.00 ± 1.41",
        "37.5 ± 17.7 %",
        "Rep-2",
        "PPL",
        "UMIM, prompt and decode where p >= 0.6",
        "UMIM, prompt and decode by rules of at most 0.25 nats per saved token (TR of text 8.0%)",
    ):
        assert text in page


def test_a_page_shows_similarity_with_paired_differences_and_calls_its_features_a_stand_in() -> (
    None
):
    similar = ReferenceSimilarity(
        {name: (0.2, 0.4) for name in ("rouge1", "rouge2", "rougeL", "rougeLsum", "chrf")}
        | {"bertscore_stand_in_features": (0.5, 0.7)},
        mauve=float("nan"),
    )
    base = {"decoding": "greedy", "merge": "none", "runs": 1, "decode_min_probability": 0.0}
    base |= {"decode_max_damage": None, "span_eviction": None}
    base |= {"metrics": over_seeds([replace(QUALITY, similarity=similar)])}
    base |= {"by_prompt": {"chrf": [0.2, 0.4]}, "differences": {}}
    changes = {name: {"mean": 0.0125, "error": 0.025} for name in similar.by_text}
    merged = base | {"merge": "prompt", "differences": changes}
    subject = {"prompts": 2, "mauve_buckets": 2, "features": "stand-in features: states of tiny"}
    subject |= {"rows": [base, merged]}
    report = {"benchmark": "generation_quality", "name": "quality", "subjects": {"tiny": subject}}
    report |= {"prompt_tokens": 100, "new_tokens": 100, "seeds": 2}
    report["facts"] = {"platform": "Linux", "cores": 2, "commit": None, "versions": {"numpy": "2"}}
    page = benchmark_page(report)
    assert "compare stand-in features: states of tiny; the published scores" in page
    heads = [line for line in page.splitlines() if "BERTScore, stand-in features" in line]
    assert len(heads) == 2 and "MAUVE, stand-in features" in heads[0]
    assert page.count("+1.25 ± 2.50") == 6 and "30.00" in page and "60.00" in page
    del base["by_prompt"], merged["by_prompt"]  # results of before texts were compared
    assert "stand-in" not in benchmark_page(report)


def test_ratios_to_the_base_models_own_texts_are_drawn_and_shown_for_each_kind_of_bound() -> None:
    def row(ppl: float, saved: float, **way: object) -> Report:
        metrics = {name: {"mean": 0.5, "std": 0.0} for name in QUALITY.metrics()}
        metrics["ppl"] = {"mean": ppl, "std": 0.1 * ppl}
        metrics["gen_kv_reduction"] = {"mean": saved, "std": 0.0}
        decoding = {"decoding": "top-p 0.9, temperature 0.8", "metrics": metrics}
        return decoding | {"merge": "all", "runs": 2} | way

    rows = [
        row(8.0, 0.0, merge="none"),
        row(10.0, 0.3, decode_min_probability=0.0, decode_max_damage=None),
        row(9.0, 0.05, decode_min_probability=0.6),
        row(12.0, 0.2, decode_max_damage=0.0),
        row(11.0, 0.1, decode_max_damage=0.5),
        row(8.0, 0.25, merge="none", span_eviction=0),
        row(1.0, 0.9, decoding="greedy"),
    ]
    panel, *_ = DRAWINGS["generation_quality"][0].draw({"subjects": {"tiny": {"rows": rows}}}).axes
    drawn = [container.lines[0].get_xydata().tolist() for container in panel.containers]
    assert drawn == [[[30, 1.25]], [[5, 1.125]], [[10, 1.375], [20, 1.5]], [[25, 1]]]
    assert ratio_of(rows[1]["metrics"]["ppl"], rows[0]["metrics"]["ppl"]) == pytest.approx(
        {"mean": 1.25, "std": 1.25 * 0.1 * 2**0.5}
    )


@pytest.mark.parametrize("method", ["truncation", "h2o", "last-embedding", "span-eviction-0"])
def test_a_baseline_shortens_prompts_as_far_as_the_rules(tiny_umim: UMIM, method: str) -> None:
    prompts = [np.array([1, 2, 10, 3, 4, 5, 11]), np.array([20, 6, 7, 8, 9, 21])]
    subject = Subject(tiny_umim, prompts, new_tokens=4)
    plain = run(subject, "greedy", "none", 0, 2)
    merged = run(subject, "greedy", "prompt", 0, 2)
    writer = method_writer(tiny_umim, method, longest=11)
    found = run(subject, "greedy", "none", 0, 2, PLAIN, writer)
    assert run(subject, "greedy", "none", 0, 1, PLAIN, writer) == found  # whatever the batch
    for row, ours, base, prompt in zip(found, merged, plain, prompts, strict=True):
        assert row.prompt_ids == tuple(prompt.tolist()) and len(row.ids) == len(base.ids) == 4
        assert ours.token_reduction > 0 == base.token_reduction
        if method == "span-eviction-0":  # a span at the end is not old enough to go
            assert 0 < row.token_reduction <= ours.token_reduction
        else:
            assert row.token_reduction == ours.token_reduction
        if method == "h2o":  # one column more with every token, as behind merged prompts
            assert row.cache_lengths == ours.cache_lengths


def test_an_unknown_baseline_is_refused_before_anything_is_generated(tmp_path: Path) -> None:
    with pytest.raises((ConfigError, SystemExit), match="a baseline must be one of"):
        main(["--methods", "h20", "--out", str(tmp_path / "x.json")])
    assert not (tmp_path / "x.json").exists()
