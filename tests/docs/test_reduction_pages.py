"""Pages, figures and README's part of quality by token reduction, from results made by hand."""

from __future__ import annotations

from typing import Any

import pytest
from matplotlib.figure import Figure

from benchmarks.common import Report
from docs.make.benchmark_charts import DRAWINGS
from docs.make.results import benchmark_page

curves, prompts = DRAWINGS["token_reduction"]


def results() -> Report:
    """Results of three checkpoints, as the benchmark writes them."""

    def point(policy: str, target: float | None, reduction: float, kl: float) -> Report:
        return {
            "policy": policy,
            "target": target,
            "table": None,
            "token_reduction": reduction,
            "rules": 5,
            "top1": {"mean": 0.9, "std": 0.01},
            "kl": {"mean": kl, "std": None},
            "ppl": 9.0,
            "ppl_ratio": {"mean": 1.1, "std": 0.02},
            "alignment": {"top1_states": 0.8, "kl_states": 0.4},
        }

    subject = {"backbone": "base-model", "rules": 5, "rule_rows": 0}
    subject |= {"residual": "none", "unit_positions": "compact"}
    evicted = point("eviction", None, 0.35, 0.1) | {"age": 16}
    subjects = {
        "one": [point("damage", 0.1, 0.1, 0.3), point("count", 0.1, 0.1, 0.2)],
        "three": [point("all", None, 0.4, 0.8), evicted],
        "two": [point("damage", 0.1, 0.1, 0.3), point("count", 0.1, 0.1, 0.5)],
    }
    subjects["one"].append(point("all", None, 0.3, 0.9))
    return {
        "benchmark": "token_reduction",
        "facts": {"platform": "Linux", "versions": {}, "commit": None},
        "name": "b",
        "length": 8,
        "texts": {x: {"rows": 3, "name": "x", "digest": "0" * 64} for x in ("test", "cut")},
        "protect": [],
        "subjects": {name: subject | {"points": found} for name, found in subjects.items()},
    }


def with_second_halves(report: Report) -> Report:
    """The same results with second halves of two checkpoints."""

    def half(policy: str, reduction: float, ratio: float, tail: int, **other: Any) -> Report:
        error = {"mean": ratio, "std": 0.01}
        point = {"policy": policy, "target": None, "raw_tail": tail, "rules": 5, "ppl": 9.0}
        return point | {"token_reduction": reduction, "ppl_ratio": error} | other

    ones = [half("count", 0.1, 1.02, 0, target=0.1), half("count", 0.08, 1.01, 16, target=0.1)]
    ones += [half("damage", 0.1, 1.03, 0, target=0.1), half("all", 0.4, 1.2, 0)]
    ones += [half("all", 0.3, 1.1, 16), half("eviction", 0.35, 1.05, 0, age=16)]
    threes = [half("all", 0.5, 1.3, 0), {"policy": "count", "target": 0.7, "unreached": "0.5"}]
    for name, halves in (("one", ones), ("three", threes)):
        report["subjects"][name] |= {"second_halves": halves, "ppl_base_of_halves": 8.5}
    return report


def drawn(report: Report) -> dict[str, list[list[float]]]:
    """Points of the lines of KL, by their labels."""
    figure = curves.draw(report)
    assert isinstance(figure, Figure)
    lines = [container.lines[0].get_xydata().tolist() for container in figure.axes[1].containers]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert figure.axes[1].get_xlabel().startswith("Token reduction (%")
    return dict(zip(labels, lines, strict=True))


def test_a_curve_has_a_line_per_checkpoint_and_policy_that_ends_with_all_rules() -> None:
    assert drawn(results()) == {
        "one, least damage": [[10, 0.3], [30, 0.9]],
        "one, highest count": [[10, 0.2], [30, 0.9]],
        "two, least damage": [[10, 0.3]],
        "two, highest count": [[10, 0.5]],
        "three, all rules": [[40, 0.8]],
        "three, span eviction": [[35, 0.1]],
    }


def test_all_rules_alone_are_drawn_and_an_axis_says_that_eviction_saves_cache() -> None:
    report = results()
    report["subjects"] = {"three": report["subjects"]["three"]}
    assert drawn(report) == {"all rules": [[40, 0.8]], "span eviction": [[35, 0.1]]}
    merged, evicted = report["subjects"]["three"]["points"]
    labels = []
    for points in ([merged], [evicted]):
        report["subjects"]["three"]["points"] = points
        labels.append(curves.draw(report).axes[0].get_xlabel())
    assert labels == ["Token reduction (%)", "Token reduction (%; span eviction: of the cache)"]


@pytest.mark.parametrize(
    ("noted", "words"),
    [
        ({}, "96 tokens (000000000000)"),
        ({"given": False}, "96 tokens (000000000000), other rows than quality"),
        ({"given": True}, "96 tokens (000000000000), given: not checked"),
    ],
    ids=["of before", "measured", "given"],
)
def test_a_page_claims_other_rows_only_where_they_were_checked(noted: Report, words: str) -> None:
    report = results()
    damage = {"tokens": 96, "text_digest": "0" * 64, "own_module": True}
    report["subjects"]["one"]["damage"] = damage | noted
    row = next(line for line in benchmark_page(report).splitlines() if "base-model" in line)
    assert row.split("|")[-2].strip() == words


def test_prompts_have_a_line_per_checkpoint_and_raw_tail_of_one_policy() -> None:
    report = with_second_halves(results())
    (axes,) = prompts.draw(report).axes
    lines = [container.lines[0].get_xydata().tolist() for container in axes.containers]
    labels = [text.get_text() for text in axes.figure.legends[0].get_texts()]
    assert dict(zip(labels, lines, strict=True)) == {
        "one, merged whole": [[10, 1.02], [40, 1.2]],
        "one, last 16 tokens raw": [[8, 1.01], [30, 1.1]],
        "one, span eviction": [[35, 1.05]],
        "three, merged whole": [[50, 1.3]],
    }
