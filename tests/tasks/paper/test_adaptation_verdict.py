"""Verdicts of a task adaptation's page: what is compared, what is called clear, what is counted."""

from __future__ import annotations

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


def test_training_is_compared_with_the_checkpoint_that_it_started_from() -> None:
    given = [point("WT", None, None, token_reduction=0.14)]
    given.append(point("WT + FT", 5, 0, against={"WT": against(-0.03)}))
    (line,) = lines(adaptation_page(adaptation(given)), "Training, against WT")
    assert line == (
        "- Training, against WT (its own rules, TR 14.0%), clearly above: none; clearly below: "
        "WT + FT at τ 5 (-3.0 points); no clear difference: 0 of 1."
    )
