"""Page and figure of a task adaptation: what they claim of given figures, and what they do not."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np
import pytest

from support.tiny_adaptation import adaptation, against, point, points
from tasks.report.adaptation import (
    adaptation_page,
    adaptation_rows,
    adaptation_svg,
    clear,
    reach,
)
from tasks.report.render import Report


def cells(page: str, setting: str) -> list[str]:
    """Return the cells of a setting's first line in the page's first table."""
    (line, *_) = re.findall(rf"^\| {re.escape(setting)} .*\|$", page, re.MULTILINE)
    return [cell.strip() for cell in line.strip("|").split("|")]


def lines(page: str, begin: str) -> list[str]:
    return [line for line in page.splitlines() if line.startswith(f"- {begin}")]


def test_a_row_is_the_mean_over_its_seeds_with_their_spread() -> None:
    given = [point("WT + FT", 5, seed, difference=d) for seed, d in ((0, 0.01), (1, 0.03))]
    (row,) = adaptation_rows(adaptation(given)["backbones"][0])
    assert row["difference"] == pytest.approx(0.02)
    assert row["spread"] == pytest.approx(0.01 * 2**0.5)
    assert row["reach"] == pytest.approx((0.02**2 + (12.71 * 0.01) ** 2) ** 0.5)
    assert (row["seeds"], row["trained"]) == (2, True)


@pytest.mark.parametrize(
    ("difference", "beyond", "side"),
    [(0.03, 0.02, 1), (-0.03, 0.02, -1), (0.02, 0.02, 0), (0.5, None, 0), (None, 0.01, 0)],
)
def test_a_difference_is_clear_beyond_what_chance_reaches(
    difference: float | None, beyond: float | None, side: int
) -> None:
    assert clear(difference, beyond) == side


@pytest.mark.parametrize(("seeds", "ratio"), [(2, 0.3), (5, 30.0), (14, 3.0)])
def test_of_what_does_not_differ_at_most_one_in_twenty_seems_clear(
    seeds: int, ratio: float
) -> None:
    """The deviation of seeds is ``ratio`` times the standard error over questions."""
    draws = np.random.default_rng(seeds)
    own = draws.normal(0.0, ratio, (4000, seeds))
    means = own + draws.normal(0.0, 1.0, (4000, 1))
    found = [
        clear(float(row.mean()), reach([{"gain": mean, "gain_se": 1.0} for mean in row], "gain"))
        for row in means
    ]
    assert np.count_nonzero(found) < 0.06 * len(found)  # 0.05 and three errors of the count


def test_the_table_shows_every_setting_at_every_threshold() -> None:
    page = adaptation_page(adaptation())
    assert cells(page, "base")[1:7] == ["–", "", "–", "0.0%", "–", "45.0 ± 2.0"]
    assert cells(page, "WT")[1:9] == (
        ["–", "", "900", "14.0%", "0.0%", "40.0", "-5.0 ± 1.0", "2.0"]
    )
    assert cells(page, "WT + Rules")[1:8] == (
        ["50", "", "100", "8.0%", "6.4%", "43.4", "-1.6 ± 1.0"]
    )
    assert page.count("| Task-Adapted ") == 4  # two thresholds, their two trainings
    assert "(adaptation.svg)" in page and "(own.svg)" in adaptation_page(adaptation(), "own.svg")


def of_figure(report: Report) -> list[str]:
    svg = adaptation_svg(report)
    assert svg == adaptation_svg(report)
    ElementTree.fromstring(svg)  # noqa: S314  # our own drawing
    return re.findall(r">([^<>]+)</text>", svg)


def test_the_figure_has_a_line_per_setting_and_labels_of_every_point() -> None:
    texts = of_figure(adaptation())
    assert sorted(text for text in texts if text.startswith("τ")) == ["τ 5"] * 3 + ["τ 50"] * 3
    for name in ("WT", "input-adapter", "lora"):
        assert texts.count(name) == 1  # in the legend
    assert texts.count("Task-Adapted") == 1 and "small" in texts


@pytest.mark.parametrize(
    "given",
    [points((5,)), [one for one in points() if one["kind"] == "setting"], []],
    ids=["one threshold", "no controls", "nothing"],
)
def test_a_figure_is_made_of_what_there_is(given: list[Report]) -> None:
    texts = of_figure(adaptation(given))
    labelled = {(one["setting"], one["tau"]) for one in given if one["tau"] is not None}
    assert len([text for text in texts if text.startswith("τ")]) == len(labelled)


def test_settings_differ_from_the_base_model_beyond_two_errors_only() -> None:
    (line,) = lines(adaptation_page(adaptation()), "Accuracy")
    above, below, neither = line.split(";")
    assert "lora (+4.0 points)" in above
    assert "WT (-5.0 points)" in below and "WT + Rules at τ 5" in below
    assert neither == " no clear difference: 5 of 9."  # -1.6 ± 1.0 is


@pytest.mark.parametrize(
    ("gains", "above", "neither"),
    [
        ((0.03,), "WT + FT at τ 5 (+3.0 points)", 0),
        ((0.02,), "none", 1),
        ((0.0, 0.05), "none", 1),  # 2.5 ± 2.7, over questions alone ± 1.0
    ],
)
def test_training_is_compared_with_the_rules_alone_and_with_its_start(
    gains: tuple[float, ...], above: str, neither: int
) -> None:
    given = [point("WT + Rules", tau, None) for tau in (50, 5)]
    given.append(point("WT", None, None, token_reduction=0.14))
    given += [
        point("WT + FT", 5, seed, against={"WT + Rules": against(gain), "WT": against(-0.03)})
        for seed, gain in enumerate(gains)
    ]
    start, rules = lines(adaptation_page(adaptation(given)), "Training")
    assert rules == (
        "- Training, against the rules alone at equal threshold, "
        f"clearly above: {above}; clearly below: none; no clear difference: {neither} of 1."
    )
    assert start == (
        "- Training, against WT (its own rules, TR 14.0%), clearly above: none; clearly below: "
        "WT + FT at τ 5 (-3.0 points); no clear difference: 0 of 1."
    )


def test_what_merges_is_compared_with_controls_that_do_not() -> None:
    page = adaptation_page(adaptation())
    (line,) = lines(page, "DPO after SFT, against lora")
    below = "Task-Adapted at τ 50 (-2.6 points), Task-Adapted at τ 5 (-5.0 points)"
    assert f"clearly below: {below}; no clear difference: 0 of 2." in line
    (line,) = lines(page, "DPO after SFT, against input-adapter")
    assert "Task-Adapted at τ 50" not in line  # +1.2 points
    assert "WT + DPO was not run" in page
    without = [one for one in points() if one["kind"] == "setting"]
    assert "what training alone would give is not known" in adaptation_page(adaptation(without))
