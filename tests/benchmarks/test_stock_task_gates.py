"""Gates of the benchmark of stock tasks: equality with lm-eval's model, times, accuracy lost."""

from __future__ import annotations

import pytest

from benchmarks.common import Report
from benchmarks.stock_tasks.__main__ import gates
from benchmarks.stock_tasks.paired import compare


def test_log_likelihoods_are_gated_in_float32_only() -> None:
    row = {"difference": 2e-4, "other_choices": 0, "seconds": 2.0, "hf_seconds": 4.0}
    row |= {"same_call": True}
    report: Report = {"tasks": {"piqa": {"against_hf": {"none": row, "no rules": row}}}}
    report["settings"] = {}
    found = gates(report | {"dtype": "float32"})
    assert found["none_difference_from_hf"] == (2.0, 1.0, False)
    assert found["no_rules_difference_from_hf"] == (0.2, 1.0, True)
    assert found["no_rules_times_hf"] == (0.5, 1.0, True)
    assert gates(report | {"dtype": "bfloat16"}) == {}


@pytest.mark.parametrize(
    ("kept", "gate"),
    [
        ({}, (1.5, 1.0, False)),  # 60 s over 40 s
        ({("arc_easy", "hf")}, (2.0, 1.0, False)),
        ({("arc_easy", "no rules")}, (2.0, 1.0, False)),
        ({("piqa", "hf")}, (1.333, 1.0, False)),
        ({("piqa", "hf"), ("arc_easy", "no rules")}, None),
    ],
)
def test_times_are_gated_on_tasks_that_both_sides_ran_in_this_call(
    kept: set[tuple[str, str]], gate: tuple[float, float, bool] | None
) -> None:
    """A kept cell may be of a loaded machine: its seconds would meet or miss the gate for us."""
    seconds = {"piqa": {"hf": 10, "no rules": 20}, "arc_easy": {"hf": 30, "no rules": 40}}

    def cell(task: str, side: str) -> Report:
        found = {"log_likelihoods": [[1.0]], "seconds": seconds[task][side]}
        return found | {"kept": (task, side) in kept}

    tasks = {
        task: {"against_hf": compare({side: cell(task, side) for side in sides})}
        for task, sides in seconds.items()
    }
    found = gates({"dtype": "float32", "settings": {}, "tasks": tasks})
    assert found["no_rules_difference_from_hf"] == (0.0, 1.0, True)
    assert found.get("no_rules_times_hf") == (gate and pytest.approx(gate, abs=1e-3))


@pytest.mark.parametrize(
    ("saved", "lost", "gate"),
    [
        (0.15, 0.01, (1.0, 1.0, True)),
        (0.21, 0.012, (1.2, 1.0, False)),
        (0.149, 0.006, (0.6, 0.5, False)),
        (0.08, -0.02, (-2.0, 0.5, True)),
        (0.079, 0.3, None),
    ],
)
def test_merged_contexts_are_gated_by_what_they_save(
    saved: float, lost: float, gate: tuple[float, float, bool] | None
) -> None:
    mean = {"context_token_reduction": saved, "acc_difference": {"mean": -lost, "std": 0.1}}
    whole = {"context_token_reduction": None, "acc_difference": {"mean": -0.5, "std": 0.1}}
    found = gates(
        {
            "dtype": "float32",
            "tasks": {},
            "settings": {"a, prompt": {"merge": "prompt"}, "a, all": {"merge": "all"}},
            "mean": {"a, prompt": mean, "a, all": whole},
        }
    )
    assert list(found.values()) == ([] if gate is None else [gate])
    assert all(name.endswith("a, prompt") for name in found)
