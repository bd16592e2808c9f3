from __future__ import annotations

import json
from pathlib import Path

from docs.make.__main__ import main
from docs.make.document import RESULTS
from docs.make.results import benchmark_page, documents_of
from support.tiny_adaptation import adaptation
from tasks.report.render import Report

FACTS = {"platform": "Linux", "cores": 2, "commit": "0123456789abcdef", "versions": {"numpy": "2"}}
SPREAD = {"median": 1.0, "low": 0.5, "high": 2.0, "runs": 10}


def matching() -> Report:
    """A small result of the matching benchmark."""
    sizes = {"memory": 30.0}
    ours = {"seconds": SPREAD, "tokens_per_s": 2e6}
    return {
        "benchmark": "matching",
        "facts": FACTS,
        "held_out_tokens": 1024,
        "segment_length": 512,
        "rule_sets": {
            "tau 5": {
                "rules": {"2": 1000, "3": 200, "4": 34},
                "sides": {"ours": ours, "Python sets": {**ours, "ratio": SPREAD}},
                "bytes_per_rule": sizes,
            }
        },
        "synthetic": {
            "rules": {"2": 10, "3": 20, "4": 30},
            "bytes_per_rule": sizes,
            "load_seconds": SPREAD,
        },
        "gates": {"load_seconds": [1.5, 1.0, False]},
        "equal": True,
    }


def test_a_page_of_other_results_is_seen_and_written_anew(tmp_path: Path) -> None:
    report = matching()
    results, page = tmp_path / "any.json", tmp_path / "any.md"
    results.write_text(json.dumps(report), "utf-8")
    only = ["results", "--folder", str(tmp_path)]
    assert main([*only, "--check"]) == 1
    assert main(only) == 0
    assert main([*only, "--check"]) == 0
    report["held_out_tokens"] = 2048
    results.write_text(json.dumps(report), "utf-8")
    assert main([*only, "--check"]) == 1
    assert "1,024 tokens" in page.read_text("utf-8")


def test_every_result_file_of_a_benchmark_has_a_page() -> None:
    places = [
        path
        for path in RESULTS.glob("*.json")
        if "benchmark" in json.loads(path.read_text("utf-8"))
    ]
    assert places and [path.stem for path in places if not path.with_suffix(".md").is_file()] == []


def test_a_result_file_has_its_page_and_the_figure_that_the_page_shows(tmp_path: Path) -> None:
    file = tmp_path / "adaptation-tiny.json"
    file.write_text(json.dumps(adaptation()), "utf-8")
    page, figure = documents_of(file)
    assert (page.path.name, figure.path.name) == ("adaptation-tiny.md", "adaptation-tiny.svg")
    assert f"({figure.path.name})" in page.make()
    for document in (page, figure):
        assert not document.current()
        document.write()
        assert document.current()


def test_a_page_says_how_many_cores_counted_and_that_a_peer_was_not_installed() -> None:
    mining = json.loads((RESULTS / "mining.json").read_text("utf-8"))
    for side in mining["sides"].values():
        side["cores"] = 1
    assert " tokens, 1 core each: " in benchmark_page(mining)
    loss = {"what": "loss", "side": "ours", "seconds": SPREAD, "of_peak": 0.5, "bytes": 1}
    gpu = {"benchmark": "gpu", "facts": FACTS | {"device": "any"}, "gates": {}, "equal": True}
    gpu |= {
        "failed": [],
        "left_out": [],
        "peak_flops": 1e12,
        "copied_bytes": 1e12,
        "seconds": 1.0,
        "tiny": False,
    }
    pages = [
        benchmark_page(gpu | {"distillation": [loss, *peers]})
        for peers in ([], [loss | {"side": "Liger"}])
    ]
    assert ["Liger was not installed." in page for page in pages] == [True, False]
