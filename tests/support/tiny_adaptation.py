"""A small task adaptation with invented figures."""

from __future__ import annotations

from typing import Any

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
                    name: against(more["difference"] - of) for name, of in CONTROLS.items()
                }
                found.append(point(setting, tau, seed, **lost | more))
    for name, gain in CONTROLS.items():
        found += [point(name, None, seed, kind="control", difference=gain) for seed in seeds]
    return found


def adaptation(given: list[Report] | None = None, **of: Any) -> Report:
    """Return the content of ``adaptation.json``.

    Args:
        given: Points of its one backbone; those of :func:`points` if None.
        of: Fields in place of its own.
    """
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
