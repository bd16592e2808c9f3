"""The ladder: equal batches, keys of cells, resuming, statistics, page, bad input."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.ladder.__main__ import main, shipped_rules
from benchmarks.ladder.ladder_rows import LadderRow, choose, ladder
from benchmarks.ladder.seed_spread import check_same_batches, difference, quality, spread
from docs.make.results import benchmark_page
from support.tiny_ladder import LENGTH, SPANS, ids, subject, text
from umim_core.errors import ArtifactError, ConfigError, TokenizerMismatchError
from umim_core.rules.ruleset import RuleSet


@pytest.mark.parametrize(
    "changed",
    ["steps", "rate", "bf16", "seed", "rules", "saving", "train", "test", "form", "kinds"],
)
def test_every_input_is_part_of_a_trained_cells_key(changed: str) -> None:
    own = subject()
    row, seed = LadderRow("words", None), 0
    key = own.trained_key(row, seed)
    named = LadderRow("other words", "over")
    assert key == own.trained_key(named, seed) == json.loads(json.dumps(key))
    fields = {"steps": {"max_steps": 1}, "rate": {"learning_rate": 0.1}, "bf16": {"bf16": True}}
    other = replace(own, config=own.config.model_copy(update=fields.get(changed, {})))
    if changed == "rules":
        other = replace(other, rules=RuleSet.from_spans(SPANS[:1]))
    if changed == "saving":
        other = replace(other, saving=0.1)
    if changed in ("train", "test"):
        other = replace(other, **{changed: text(2, 6)})
    rows = {
        "form": LadderRow("", None, {"residual": "last"}),
        "kinds": LadderRow("", None, kinds={"copy_rows": 0.5}),
    }
    seed = int(changed == "seed")
    assert other.trained_key(rows.get(changed, row), seed) != key
    same = changed in ("steps", "rate", "bf16", "train", "kinds")
    untrained = other.untrained_key(rows.get(changed, row), seed)
    assert (untrained == own.untrained_key(row, 0)) == same


def test_a_rate_of_rule_rows_leaves_rows_without_any_alone() -> None:
    own, fast = subject(), subject(row_rate=3.0)
    rows = ladder(2)
    assert own.trained_key(rows["last"], 0) == fast.trained_key(rows["last"], 0)
    assert own.trained_key(rows["rule-rows"], 0) != fast.trained_key(rows["rule-rows"], 0)


def test_a_row_is_compared_with_one_before_it_that_differs() -> None:
    rows = ladder(3)
    names = list(rows)
    for place, row in enumerate(rows.values()):
        assert (row.over is None) == (place == 0)
        if row.over is not None:
            assert names.index(row.over) < place
            other = rows[row.over]
            assert (row.form, row.kinds) != (other.form, other.kinds)
    assert rows["paper"].form.form() == {"positions": "none"}
    assert rows["rule-rows"].form.rule_rows == 3


def test_rows_at_equal_saving_have_rules_of_their_own() -> None:
    """Layers below the depth read every token: a deeper row has to merge more."""
    own = replace(subject(), saving=0.2)
    deep = LadderRow(
        "", None, {"residual": "last", "unit_positions": "preserved", "merge_depth": 1}
    )
    few, many = (own.rules_of(row) for row in (LadderRow("", None), deep))
    assert len(few) < len(many) <= len(SPANS)


def test_a_row_whose_start_is_left_out_is_compared_with_the_nearest_before_it() -> None:
    rows = ladder(3)
    assert choose(rows, []) == rows
    names = ["rule-rows", "paper", "last", "depth-2"]
    found = choose(rows, names)
    assert {name: row.over for name, row in found.items()} == {
        "paper": None,
        "last": "paper",
        "rule-rows": "last",
        "depth-2": "last",
    }
    assert choose(rows, ["last"])["last"].over is None


def test_spread_and_differences_of_a_worked_example() -> None:
    """Two seeds, two test rows of 2 and 6 aligned rows; KL 8/8 and 4/8 against 12/8 twice."""

    def cell(kl: list[float], ppl: float) -> dict[str, Any]:
        sums = {"kl": kl, "top1": [1.0, 3.0]}
        nats = {"row_nats": [4.0, 4.0], "row_targets": [2, 6]}
        means = {"kl": sum(kl) / 8, "top1": 0.5, "ppl": ppl}
        return {**means, "row_sums": sums, "row_counts": [2, 6], **nats}

    ours = [cell([2.0, 6.0], 3.0), cell([1.0, 3.0], 6.0)]
    theirs = [cell([3.0, 9.0], 3.0), cell([6.0, 6.0], 3.0)]
    assert spread([1.0, 0.5]) == {
        "mean": 0.75,
        "std": pytest.approx(0.125**0.5),
        "min": 0.5,
        "max": 1.0,
    }
    assert spread([1.0])["std"] is None
    found = quality(ours, {"ppl": 2.0})
    assert found["kl"] == spread([1.0, 0.5])
    assert found["ppl_ratio"] == spread([1.5, 3.0])
    steps = difference(ours, theirs)
    # Means over seeds of the sums: -3 of 2 aligned rows and -3 of 6; residuals -1.5 and 1.5.
    assert steps["kl"]["mean"] == -0.75
    assert steps["kl"]["std"] == pytest.approx((2 * (1.5**2 + 1.5**2)) ** 0.5 / 8)
    assert steps["kl"]["seeds"] == [-0.5, -1.0]
    assert steps["ln_ppl"] == {"mean": 0.0, "std": 0.0, "seeds": [0.0, 0.0]}
    assert difference(ours[:1], ours[1:])["kl"]["seeds"] == [0.5]


def test_rows_of_other_depths_differ_by_their_means() -> None:
    """KL 8 of 8 aligned tokens against 9 of 6: -0.5, and each row of text moves it by 1/8."""
    nats = {"row_nats": [4.0, 4.0], "row_targets": [2, 6]}
    ours = {"row_sums": {"kl": [3.0, 5.0], "top1": [1.0, 3.0]}, "row_counts": [2, 6], **nats}
    theirs = {"row_sums": {"kl": [3.0, 6.0], "top1": [1.0, 2.0]}, "row_counts": [2, 4], **nats}
    kl = difference([ours], [theirs])["kl"]
    assert kl["mean"] == -0.5 and kl["seeds"] == [-0.5]
    assert kl["std"] == pytest.approx((2 * (2 * 0.125**2)) ** 0.5)


def test_rows_of_other_batches_are_not_compared() -> None:
    one = {"batches": "a", "row_targets": [2], "steps": 2}
    check_same_batches({0: {"paper": one, "last": dict(one)}, 1: {"paper": one | {"batches": "b"}}})
    for field, value in (("batches", "b"), ("row_targets", [3]), ("steps", 1)):
        with pytest.raises(ArtifactError, match=f"the same {field} in seed 0"):
            check_same_batches({0: {"paper": one, "last": one | {field: value}}})


@pytest.fixture
def words(tiny_checkpoint: Path, tmp_path: Path) -> list[str]:
    """Options of a ladder in seconds."""
    for name, seed in (("train", 0), ("test", 1)):
        np.save(tmp_path / f"{name}.npy", ids(seed))
    places = [
        "--backbone",
        tiny_checkpoint.parent / "backbone",
        "--rules",
        tiny_checkpoint / "rules",
    ]
    places += ["--train", tmp_path / "train.npy", "--test", f"mine={tmp_path / 'test.npy'}"]
    places += ["--cells", tmp_path / "cells", "--out", tmp_path / "ladder.json"]
    numbers = ["--steps", 2, "--rows", 2, "--test-rows", 3, "--length", LENGTH, "--rule-rows", 2]
    return [str(word) for word in places + numbers]


def test_a_killed_ladder_goes_on_with_the_missing_cell_and_writes_its_page(
    words: list[str], tmp_path: Path
) -> None:
    words += ["--only", "paper", "last", "rule-rows", "adapters"]
    assert main(words) == 0
    out, cells = tmp_path / "ladder.json", tmp_path / "cells"
    report = json.loads(out.read_text("utf-8"))
    rows = report["ladder"]
    assert list(rows) == ["paper", "last", "rule-rows", "adapters"]
    (first, second), *others = (row["batches"] for row in rows.values())
    assert first != second and all(other == [first, second] for other in others)
    trained = [row["trained"]["kl"]["mean"] for row in rows.values()]
    assert len(set(trained)) == len(trained)
    assert rows["last"]["untrained"]["kl"]["std"] == 0.0  # the anchor, whatever the seed
    assert rows["paper"]["untrained"]["kl"]["std"] > 0.0
    over = {name: row.get("over") for name, row in rows.items()}
    assert over == {
        "paper": None,
        "last": "paper",  # positions, between them, is left out
        "rule-rows": "last",
        "adapters": "last",
    }
    page = out.with_suffix(".md").read_text("utf-8")
    assert page == benchmark_page(report)
    assert "seeds 0, 1" in page and "of *mine*" in page and "| adapters " in page

    # Four forms without training, four rows trained; two seeds, one base.
    files = {path: path.stat().st_mtime_ns for path in cells.iterdir()}
    assert len(files) == 2 * (4 + 4) + 1
    lost = next(path for path in files if path.name.startswith("trained-1-"))
    lost.unlink()
    assert main(words) == 0
    assert {path: path.stat().st_mtime_ns for path in cells.iterdir() if path != lost} == {
        path: time for path, time in files.items() if path != lost
    }
    again = json.loads(out.read_text("utf-8"))
    for found in (report, again):
        for row in found["ladder"].values():
            del row["seconds_per_step"]
    assert again == report


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--only", "lasst"], "--only must name rows of the ladder .* Did you mean 'last'"),
        (["--seeds", "1", "1"], "--seeds must be different"),
        (["--seeds", "-1"], "--seeds must be different and not negative"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--test-rows", "1"], "--test-rows must be at least 2"),
        (["--rate", "0"], "learning_rate"),
        (["--saving", "0"], "a target token reduction must lie above 0"),
        (["--row-rate", "-1"], "row_rate"),
    ],
)
def test_bad_options_are_refused(given: list[str], message: str, words: list[str]) -> None:
    with pytest.raises(ConfigError, match=message):
        main([*words, *given])


def test_rules_of_another_tokenizer_are_refused(words: list[str]) -> None:
    with pytest.raises(TokenizerMismatchError):
        main([*words, "--rules", str(shipped_rules("umim-docs-llama"))])


def test_a_backbone_without_shipped_rules_needs_some() -> None:
    with pytest.raises(ConfigError, match="--rules must name a rule directory"):
        shipped_rules("umim-docs-lama")
