"""Page and figure of a task adaptation: what they claim of given figures, and what they do not."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from tasks.report.adaptation import adaptation_page, adaptation_rows, adaptation_svg, clear, reach
from tasks.report.render import Report

REDUCTIONS = {50: 0.08, 5: 0.2}
TRAINED = {"WT + FT": 0.01, "Task-Adapted": 0.03}  # accuracy over that of the rules alone
CONTROLS = {"input-adapter": 0.002, "lora": 0.04}
BASE = {"accuracy": 0.45, "accuracy_se": 0.02, "margin": -0.1, "margin_se": 0.02}


def point(setting: str, tau: int | None, seed: int | None, **of: Any) -> Report:
    """Return a point; what is not given is that of a setting at TR 0 that changes nothing."""
    found: Report = {
        "setting": setting, "kind": "setting", "tau": tau, "seed": seed, "rules": None,
        "token_reduction": 0.0, "input_reduction": 0.0, "difference": 0.0, "difference_se": 0.01,
        "margin_difference": 0.0, "margin_difference_se": 0.01, "gained": 3, "lost": 5,
        "steps": None if seed is None else 40, "best_step": None if seed is None else 20,
        "skipped": None if seed is None else 0,
    }  # fmt: skip
    found |= of
    given = {"accuracy": BASE["accuracy"] + found["difference"]}
    given["margin"] = BASE["margin"] + found["margin_difference"]
    return given | found


def against(difference: float) -> Report:
    """Return a difference to another model with its error."""
    return {"difference": difference, "difference_se": 0.01}


def points(taus: tuple[int, ...] = (50, 5), seeds: tuple[int, ...] = (0,)) -> list[Report]:
    """Return the points of a backbone: WT, the rules alone, two trainings, two controls."""
    found = [point("WT", None, None, token_reduction=0.14, difference=-0.05, rules=900)]
    for tau in taus:
        reduction = REDUCTIONS[tau]
        lost = {"difference": -0.2 * reduction, "rules": 5000 // tau}
        lost |= {"token_reduction": reduction, "input_reduction": 0.8 * reduction}
        found.append(point("WT + Rules", tau, None, **lost))
        for setting, gain in TRAINED.items():
            for seed in seeds:
                more: Report = {"difference": lost["difference"] + gain + 0.002 * seed}
                more["against"] = {"WT + Rules": against(gain + 0.002 * seed)}
                more["against"] |= {
                    name: against(more["difference"] - gain) for name, gain in CONTROLS.items()
                }
                found.append(point(setting, tau, seed, **lost | more))
    for name, gain in CONTROLS.items():
        found += [point(name, None, seed, kind="control", difference=gain) for seed in seeds]
    return found


def adaptation(given: list[Report] | None = None, **of: Any) -> Report:
    """Return the content of ``adaptation.json``, of one backbone with :func:`points` by default."""
    own = points() if given is None else given
    training = {"max_steps": 40, "max_epochs": 2, "batch_size": 4, "learning_rate": 0.001}
    training |= {"validation_rows": 64, "validate_every": 20}
    return {
        "kind": "adaptation", "name": "tiny", "figure": "fig:arc_compar", "task": "umim_tiny",
        "chance": 0.25, "dtype": "float32", "questions": {"train": 1500, "valid": 200, "test": 500},
        "taus": [50, 5], "seeds": [0], "max_tokens": 128, "sft": training, "dpo": training,
        "control_dpo": dict.fromkeys(CONTROLS, training),
        "question_digests": {"test": "0123456789abcdef"},
        "backbones": [
            {
                "checkpoint": "umim-small", "backbone": "small", "backbone_fingerprint": "f" * 64,
                "base": dict(BASE), "points": own,
            }
        ],
    } | of  # fmt: skip


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


@pytest.mark.parametrize("given", [points(), points((5,)), []], ids=["all", "one threshold", "no"])
def test_the_figure_has_a_line_per_setting_and_labels_of_every_point(given: list[Report]) -> None:
    texts = re.findall(r">([^<>]+)</text>", adaptation_svg(adaptation(given)))
    labelled = {(one["setting"], one["tau"]) for one in given if one["tau"] is not None}
    assert len([text for text in texts if text.startswith("τ")]) == len(labelled)
    for name in {one["setting"] for one in given}:
        assert texts.count(name) == 1  # in the legend


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


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "docstrings-llama",
            "`python -m flows run adaptation/docstrings-llama` measures it again.",
        ),
        ("tiny", "`python -m flows run` with the path of its file measures it again."),
    ],
)
def test_the_command_of_the_page_finds_its_recipe(name: str, said: str) -> None:
    assert said in adaptation_page(adaptation(name=name))
