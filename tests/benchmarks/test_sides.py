"""Sides of the benchmarks find the same; what counts as an answer, and what methods save."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import mining
from benchmarks.answers import HALVES, LISTS, Question, answer_shortened, questions
from benchmarks.distillation import HAS_LIGER, LIGER, OURS, PLAIN, Shape, loss_sides
from benchmarks.matching import AhoCorasick, Spans, compare
from benchmarks.mining import Grams, make_sides
from benchmarks.problems import answer, answer_shorter, solves_function, solves_word_problem
from benchmarks.runner import points
from benchmarks.subjects import SEGMENT
from support.ngram_oracle import units_of
from umim_core import UMIM
from umim_core.baselines.methods import Text
from umim_core.baselines.registry import find_baseline
from umim_core.errors import ConfigError
from umim_core.mining.counting import count_ngrams
from umim_core.rules.grams import ORDERS
from umim_core.rules.ruleset import RuleSet

NESTED = [(1, 2), (1, 2, 3), (2, 3), (2, 3, 1, 2), (3, 3, 3), (0, 0), (0, 0, 0, 0)]
TINY = Shape(rows=300, hidden=16, vocab=101)


# --- matching, mining


def merged_spans(segments: np.ndarray, rules: RuleSet) -> Spans:
    """Try every length at every position."""
    spans = {tuple(map(int, row)) for found in rules.ids_by_order.values() for row in found}
    return [
        (number * len(row) + at, length)
        for number, row in enumerate(segments)
        for at, length in units_of(row.tolist(), spans)
        if length > 1
    ]


@pytest.mark.parametrize("spans", [NESTED, [(1, 2, 3), (0, 0), (3, 1)]])
def test_matchers_find_the_spans_of_a_plain_loop(
    spans: list[tuple[int, ...]], rng: np.random.Generator
) -> None:
    ids, rules = rng.integers(0, 4, 4 * SEGMENT).astype(np.int32), RuleSet.from_spans(spans)
    wanted = merged_spans(ids.reshape(-1, SEGMENT), rules)
    assert AhoCorasick(rules)(ids.reshape(-1, SEGMENT)) == wanted
    found, equal = compare(rules, ids, lambda: None, rounds=2)
    assert equal and found["merged_spans"] == len(wanted) > 0
    assert {side["seconds"]["runs"] for side in found["sides"].values()} == {2}


def test_all_sides_of_mining_find_the_same_and_one_that_finds_less_is_seen(
    rng: np.random.Generator,
) -> None:
    ids = (rng.zipf(1.3, 80 * SEGMENT) % 1000).astype(np.uint32)
    sides = make_sides(ids, 5)
    report = mining.compare(sides, len(ids), rounds=1)
    assert report["same"] == dict.fromkeys(sides, True)
    counts = count_ngrams(ids, range(0, 80 * SEGMENT + 1, SEGMENT), 5)
    assert report["rules"] == {str(n): len(counts.keys[n]) for n in ORDERS}
    assert min(report["rules"].values()) > 0
    whole = sides[mining.POLARS]

    def short() -> Grams:
        result = whole.run()
        keys, found = result[4]
        return {**result, 4: (keys[1:], found[1:])}

    few = {mining.OURS: sides[mining.OURS], mining.POLARS: replace(whole, run=short)}
    found = mining.compare(few, len(ids), rounds=1)["same"]
    assert found == {mining.OURS: True, mining.POLARS: False}


# --- the loss of a distillation


def test_all_sides_of_the_loss_agree() -> None:
    sides = loss_sides(TINY, torch.device("cpu"), torch.float32)
    assert set(sides) == {OURS, PLAIN} | ({LIGER} if HAS_LIGER else set())
    loss, gradient = sides[PLAIN]()
    for side in sides.values():
        other_loss, other = side()
        assert other_loss == pytest.approx(loss, rel=1e-5)
        torch.testing.assert_close(other, gradient, rtol=1e-4, atol=1e-7)


# --- questions and answers


def test_the_halves_share_no_sentence() -> None:
    said = {
        half: {
            sentence
            for which in LISTS
            for question in questions(which, half)
            for sentence in re.split(r"(?<=[.?!])\s+", question.text)
        }
        for half in HALVES
    }
    assert not said["choose"] & said["report"]


@pytest.mark.parametrize("half", HALVES)
def test_a_half_has_400_questions_and_documents_hold_their_answers(half: str) -> None:
    asked = {which: questions(which, half) for which in LISTS}  # type: ignore[arg-type]
    assert {which: len(found) for which, found in asked.items()} == {"chats": 280, "documents": 120}
    assert asked["chats"] == questions("chats", half)  # type: ignore[arg-type]
    for question in asked["documents"]:
        assert question.accepts(question.text.rpartition("\n\n")[0])


@pytest.mark.parametrize(
    ("answer", "accepted"), [("A Cat.", True), ("7!", True), ("concatenate", False), ("17", False)]
)
def test_a_key_is_a_whole_word(answer: str, accepted: bool) -> None:
    assert Question("q", "?", ("cat", "7")).accepts(answer) is accepted


@pytest.mark.parametrize("name", ["truncation", "selective-context", "h2o", "streaming-llm"])
def test_every_method_realises_the_saving(tiny_umim: UMIM, name: str) -> None:
    """Of a prompt [24] whose first four and last four tokens are protected."""
    ids = np.arange(24, dtype=np.int64) % tiny_umim.backbone.vocab_size
    protected = np.arange(24) % 20 < 4
    prompt = Text(ids, protected, ids[-4:])
    method = find_baseline(name).make(tiny_umim.backbone, tiny_umim.matcher)
    text, saving = answer_shortened(method, prompt, 0.25, tiny_umim, new_tokens=3)
    assert saving == pytest.approx(0.25)
    if name == "truncation":
        rest, plain = np.concatenate([ids[:4], ids[10:]]), {"do_sample": False, "merge": "none"}
        assert text == tiny_umim.generate(rest, max_new_tokens=3, **plain).text[0]
    spans = find_baseline("random-spans").make(tiny_umim.backbone, tiny_umim.matcher)
    with pytest.raises(ConfigError, match="drop tokens"):
        answer_shortened(spans, prompt, 0.25, tiny_umim, new_tokens=3)


@pytest.mark.parametrize(
    ("answer", "counts"),
    [
        ("So the answer is 1004.", True),
        ("First 3 apples. The answer is: $1,004.00", True),
        ("12 apples, then 1,004 apples", True),
        ("The Answer is, **1,004**", True),
        ("The answer is 1003, not 1004", False),
        ("The answer is -1004", False),
        ("no number", False),
    ],
)
def test_a_word_problem_counts_by_the_number_that_is_named_or_else_the_last(
    answer: str, counts: bool
) -> None:
    assert solves_word_problem(answer, {"answer": "Two and two.\n#### 1,004"}) is counts


def test_a_function_counts_by_its_tests_and_ends_at_the_next_statement() -> None:
    row = {"prompt": "def one():\n", "entry_point": "one"}
    row["test"] = "def check(candidate):\n    assert candidate() == 1\n"
    assert solves_function("    return 1\nprint(1 / 0)", row)
    assert not solves_function("    return 2", row)


def test_points_are_paired_differences_to_the_base_model() -> None:
    base, own = [True, True, False, False], [True, False, False, False]
    assert points(own, base) == pytest.approx({"mean": -25.0, "std": 25.0})
    assert points(base, base) == {"mean": 0.0, "std": 0.0}


def test_every_side_answers_every_problem_in_its_place_and_goes_on_where_it_was_killed(
    tiny_umim: UMIM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["the of and to in is " * n for n in (9, 5, 7)]
    options = argparse.Namespace(batch_size=2, answers=tmp_path / "answers")
    base, none_saved = answer(tiny_umim, asked, "none", 3, options)
    greedy = {"max_new_tokens": 3, "do_sample": False, "merge": "none"}
    assert base == [tiny_umim.generate([text], **greedy).text[0] for text in asked]
    assert none_saved == [0.0] * 3
    found = answer_shorter(tiny_umim, asked, 3, options)
    assert set(found[0]) == {"umim", "truncation"} and 0.0 <= found[1] < 1.0
    monkeypatch.setattr(tiny_umim.engine, "generate", None)  # read again, not asked again
    assert answer_shorter(tiny_umim, asked, 3, options) == found
