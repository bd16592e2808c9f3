"""Verdicts of a task adaptation's page: what is compared, what is called clear, what is counted."""

from __future__ import annotations

import re

import pytest

from support.tiny_adaptation import adaptation, against, point, points
from tasks.paper.adaptation_page import adaptation_page


def lines(page: str, begin: str) -> list[str]:
    return [line for line in page.splitlines() if line.startswith(f"- {begin}")]


def test_settings_differ_from_the_base_model_beyond_two_errors_only() -> None:
    (line,) = lines(adaptation_page(adaptation()), "Accuracy")
    above, below, neither = line.split(";")
    assert "lora (+4.0 points)" in above
    assert "WT (-5.0 points)" in below and "WT + Rules at τ 5" in below
    assert neither == " no clear difference: 5 of 9."  # -1.6 ± 1.0 is


def test_an_unknown_error_claims_nothing() -> None:
    given = [point("WT + Rules", 5, None, difference=-0.4, difference_se=None)]
    (line,) = lines(adaptation_page(adaptation(given)), "Accuracy")
    assert "clearly below: none; no clear difference: 1 of 1." in line


@pytest.mark.parametrize(
    ("gain", "above", "neither"), [(0.03, "WT + FT at τ 5 (+3.0 points)", 0), (0.02, "none", 1)]
)
def test_training_is_compared_with_the_rules_alone_at_equal_threshold(
    gain: float, above: str, neither: int
) -> None:
    given = [point("WT + Rules", tau, None) for tau in (50, 5)]
    given.append(point("WT + FT", 5, 0, against={"WT + Rules": against(gain)}))
    (line,) = lines(adaptation_page(adaptation(given)), "Training")
    assert line == (
        "- Training, against the rules alone at equal threshold, "
        f"clearly above: {above}; clearly below: none; no clear difference: {neither} of 1."
    )


def test_a_comparison_that_differs_between_seeds_claims_less() -> None:
    given = [
        point("WT + FT", 5, seed, against={"WT + Rules": against(gain)})
        for seed, gain in ((0, 0.0), (1, 0.05))
    ]
    (line,) = lines(adaptation_page(adaptation(given)), "Training")
    assert "no clear difference: 1 of 1." in line  # 2.5 ± 2.7, over questions alone ± 1.0


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


def test_controls_are_compared_first_with_what_is_trained_like_them() -> None:
    trained = point("WT + DPO", 5, 0, against={"lora": against(0.03)})
    page = adaptation_page(adaptation([*points((5,)), trained]))
    first, second = (line for line in lines(page, "DPO") if "against lora" in line)
    assert first == (
        "- DPO, against lora, which has DPO alone and merges nothing, clearly above: "
        "WT + DPO at τ 5 (+3.0 points); clearly below: none; no clear difference: 0 of 1."
    )
    assert second.startswith("- DPO after SFT")
    assert "was not run" not in page


def test_nothing_is_compared_with_a_control_without_gain() -> None:
    given = [
        one | {"best_step": 0, "difference": 0.0} if one["setting"] == "lora" else one
        for one in points()
    ]
    page = adaptation_page(adaptation(given))
    assert not any("against lora" in line for line in lines(page, "DPO"))
    assert "Training brought the control lora no gain over its start, the base model" in page
    assert "no gain over its start" not in adaptation_page(adaptation())


def test_a_training_without_gain_is_not_compared_with_controls() -> None:
    given = [
        one | {"best_step": 0} if (one["setting"], one["tau"]) == ("Task-Adapted", 5) else one
        for one in points()
    ]
    page = adaptation_page(adaptation(given))
    (line,) = lines(page, "DPO after SFT, against lora")
    assert "Task-Adapted at τ 50" in line and "no clear difference: 0 of 1." in line
    assert "at τ 5 (" not in line


def test_training_is_compared_with_the_checkpoint_that_it_started_from() -> None:
    given = [point("WT", None, None, token_reduction=0.14)]
    given.append(point("WT + FT", 5, 0, against={"WT": against(-0.03)}))
    (line,) = lines(adaptation_page(adaptation(given)), "Training, against WT")
    assert line == (
        "- Training, against WT (its own rules, TR 14.0%), clearly above: none; clearly below: "
        "WT + FT at τ 5 (-3.0 points); no clear difference: 0 of 1."
    )


def test_every_comparison_of_the_page_is_counted() -> None:
    """Nine rows by accuracy and margin; four trainings against the rules; two with two controls."""
    page = adaptation_page(adaptation())
    compared = (
        sum(int(count) for count in re.findall(r"no clear difference: \d+ of (\d+)", page)) - 2 * 9
    )
    assert compared == 4 + 2 * 2
    assert f"{2 * 9 + compared} differences are called clear or not." in page
    assert f"up to 5 % of them ({0.05 * (2 * 9 + compared):.1f})" in page


def test_a_base_model_that_guesses_is_named() -> None:
    given = adaptation()
    assert "not clearly better than guessing" not in adaptation_page(given)
    given["backbones"][0]["base"]["accuracy"] = 0.28
    assert "(28.0%) is not clearly better than guessing (25.0%)" in adaptation_page(given)


def test_without_a_chance_of_guessing_the_page_names_none() -> None:
    given = adaptation(chance=None)
    given["backbones"][0]["base"] |= {"accuracy": 0.28}
    assert "uessing" not in adaptation_page(given)
    assert "Guessing answers 25% of the questions rightly." in adaptation_page(adaptation())
