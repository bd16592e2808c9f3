"""Page and figure of a task adaptation: what they claim of given figures, and what they do not."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from support.tiny_adaptation import adaptation, against, point, points
from tasks.paper.adaptation_figure import adaptation_svg
from tasks.paper.adaptation_page import adaptation_page
from tasks.paper.adaptation_rows import adaptation_rows, clear
from tasks.report.page_template import Report


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
    assert row["error"] == pytest.approx((0.01**2 + 0.01**2) ** 0.5)  # questions, seeds
    assert (row["seeds"], row["trained"]) == (2, True)


@pytest.mark.parametrize(
    ("difference", "error", "side"),
    [(0.03, 0.01, 1), (-0.03, 0.01, -1), (0.02, 0.01, 0), (0.5, None, 0), (None, 0.01, 0)],
)
def test_a_difference_is_clear_beyond_two_known_errors(
    difference: float | None, error: float | None, side: int
) -> None:
    assert clear(difference, error) == side


def test_the_table_shows_every_setting_at_every_threshold() -> None:
    page = adaptation_page(adaptation())
    assert cells(page, "base")[1:7] == ["–", "", "–", "0.0%", "–", "45.0 ± 2.0"]
    assert cells(page, "WT")[1:9] == (["–", "", "900", "14.0%", "0.0%", "40.0", "-5.0 ± 1.0", "–"])
    assert cells(page, "WT + Rules")[1:8] == (
        ["50", "", "100", "8.0%", "6.4%", "43.4", "-1.6 ± 1.0"]
    )
    assert page.count("| Task-Adapted ") == 4  # two thresholds, their two trainings
    assert "(adaptation.svg)" in page and "(own.svg)" in adaptation_page(adaptation(), "own.svg")


def test_settings_are_told_from_the_base_model_beyond_two_errors_only() -> None:
    (line,) = lines(adaptation_page(adaptation()), "Accuracy")
    above, below, neither = line.split(";")
    assert "lora (+4.0 points)" in above
    assert "WT (-5.0 points)" in below and "WT + Rules at τ 5" in below
    assert neither == " not told apart from it: 5 of 9."  # -1.6 ± 1.0 is


def test_an_unknown_error_claims_nothing() -> None:
    given = [point("WT + Rules", 5, None, difference=-0.4, difference_se=None)]
    (line,) = lines(adaptation_page(adaptation(given)), "Accuracy")
    assert "clearly below: none; not told apart from it: 1 of 1." in line


@pytest.mark.parametrize(("gain", "words"), [(0.03, "clearly more"), (0.02, "not told apart")])
def test_training_is_compared_with_the_rules_alone_at_equal_threshold(
    gain: float, words: str
) -> None:
    given = [point("WT + Rules", tau, None) for tau in (50, 5)]
    given.append(point("WT + FT", 5, 0, against={"WT + Rules": against(gain)}))
    (line,) = lines(adaptation_page(adaptation(given)), "Training")
    assert line == (
        f"- Training, against the rules alone: WT + FT at τ 5 {100 * gain:+.1f} points ({words})."
    )


def test_a_comparison_that_differs_between_seeds_claims_less() -> None:
    given = [
        point("WT + FT", 5, seed, against={"WT + Rules": against(gain)})
        for seed, gain in ((0, 0.0), (1, 0.05))
    ]
    (line,) = lines(adaptation_page(adaptation(given)), "Training")
    assert "+2.5 points (not told apart)" in line  # 2.5 ± 2.7, over questions alone ± 1.0


def test_what_merges_is_compared_with_controls_that_do_not() -> None:
    page = adaptation_page(adaptation())
    (line,) = lines(page, "Against lora")
    assert "Task-Adapted at τ 5 -5.0 points (clearly less)" in line
    assert "Task-Adapted at τ 50 -2.6 points (clearly less)" in line
    (line,) = lines(page, "Against input-adapter")
    assert "Task-Adapted at τ 50 +1.2 points (not told apart)" in line
    without = [one for one in points() if one["kind"] == "setting"]
    assert "what training alone would give is not known" in adaptation_page(adaptation(without))


def test_a_base_model_that_guesses_is_said_to() -> None:
    given = adaptation()
    assert "not clearly better than guessing" not in adaptation_page(given)
    given["backbones"][0]["base"]["accuracy"] = 0.28
    assert "(28.0%) is not clearly better than guessing (25.0%)" in adaptation_page(given)


def test_without_a_chance_of_guessing_nothing_is_said_of_it() -> None:
    given = adaptation(chance=None)
    given["backbones"][0]["base"] |= {"accuracy": 0.28}
    assert "uessing" not in adaptation_page(given)
    assert "Guessing answers 25% of the questions rightly." in adaptation_page(adaptation())


def test_missing_seeds_are_named_and_one_seed_is_a_limit() -> None:
    given = [*points(seeds=(0, 1)), point("WT + DPO", 5, 0)]
    page = adaptation_page(adaptation(given, seeds=[0, 1]))
    assert "Of 2 seeds, there are fewer of: WT + DPO at τ 5 on small 1." in page
    assert "One seed" not in page and cells(page, "Task-Adapted")[8] == "0.1"
    alone = adaptation_page(adaptation())
    assert "fewer of" not in alone and "One seed" in alone


@pytest.mark.parametrize("absent", ["sft", "dpo", "control_dpo"])
def test_a_training_that_was_not_run_is_not_described(absent: str) -> None:
    whole, page = (adaptation_page(adaptation(**of)) for of in ({}, {absent: None}))
    assert whole.count("learning rate") == 3 and page.count("learning rate") == 2


def of_figure(report: Report) -> list[str]:
    svg = adaptation_svg(report)
    assert svg == adaptation_svg(report)
    ElementTree.fromstring(svg)  # noqa: S314  # our own drawing
    return re.findall(r">([^<>]+)</text>", svg)


def test_the_figure_has_a_line_per_setting_and_labels_of_every_point() -> None:
    texts = of_figure(adaptation())
    assert sorted(text for text in texts if text.startswith("τ")) == ["τ 5"] * 3 + ["τ 50"] * 3
    for name in ("WT", "input-adapter", "lora"):
        assert texts.count(name) == 2  # legend and point
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


def bars(report: Report) -> list[float]:
    """Return the lengths of the error bars of the figure's file."""
    ends = re.findall(
        r'LineCollection_\d+">\s*<path d="M [\d.]+ ([\d.]+)\s+L [\d.]+ ([\d.]+)',
        adaptation_svg(report),
    )
    return [abs(float(first) - float(last)) for first, last in ends]


def test_error_bars_are_as_long_as_the_errors() -> None:
    given = [point("WT", None, None, difference_se=0.01)]
    given.append(point("WT + Rules", 5, None, difference_se=0.02))
    first, second = bars(adaptation(given))
    assert second == pytest.approx(2 * first, rel=1e-3) and first > 1
    assert bars(adaptation([point("WT", None, None, difference_se=None)])) == [0.0]


def test_without_a_figure_of_the_paper_none_is_named() -> None:
    assert "What the paper's fig:arc_compar shows" in adaptation_page(adaptation())
    assert "What the paper's" not in adaptation_page(adaptation(figure=None))
