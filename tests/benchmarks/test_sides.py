"""Sides of the benchmarks find the same; what counts as an answer, and what methods save."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import answers, engines, mining
from benchmarks.answering import answer, answer_shorter, points, truncated
from benchmarks.answers import HALVES, LISTS, Question, answer_all, questions, summary
from benchmarks.gpu import HAS_LIGER, LIGER, OURS, PLAIN, Shape, loss_sides
from benchmarks.matching import Spans, compare
from benchmarks.mining import Counts, make_sides
from benchmarks.problems import solves_function, solves_word_problem
from benchmarks.subjects import SEGMENT
from support.ngram_oracle import units_of
from support.servers import CHATML
from umim_core import UMIM
from umim_core.mining.counting import count_ngrams
from umim_core.model.inputs import encode_prompts
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

    def short() -> list[Counts]:
        *others, (keys, found) = whole.run()
        return [*others, (keys[1:], found[1:])]

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


# --- other engines


def test_raw_and_merged_prompts_are_timed_by_pairs_in_turn() -> None:
    prompts = [engines.Prompt([1] * n, [n] * 2, [n]) for n in (4, 6, 8)]
    asked: list[int] = []

    def ask(ids: list[int], tokens: int) -> engines.Timed:
        asked.append(len(ids))
        return [ids[0]], float(len(ids)), 2.0 * len(ids)

    found = engines.measure(ask, prompts)
    assert asked == [4, 2, *(4, 2), *(2, 6), *(8, 2), *(2, 2, 2)]
    assert (found["equal"], found["compared"]) == (3, 3)
    for clock, times in (("wall", 1), ("cpu", 2)):
        medians = {name: figures["median"] for name, figures in found[clock].items()}
        assert medians == {"raw": 6.0 * times, "merged": 2.0 * times, "times": 3.0}


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
    asked = {which: questions(which, half) for which in LISTS}
    assert {which: len(found) for which, found in asked.items()} == {"chats": 280, "documents": 120}
    assert asked["chats"] == questions("chats", half)
    for question in asked["documents"]:
        assert question.accepts(question.text.rpartition("\n\n")[0])


@pytest.mark.parametrize(
    ("answer", "accepted"), [("A Cat.", True), ("7!", True), ("concatenate", False), ("17", False)]
)
def test_a_key_is_a_whole_word(answer: str, accepted: bool) -> None:
    assert Question("q", "?", ("cat", "7")).accepts(answer) is accepted


def test_truncation_realises_the_saving_and_keeps_template_and_end(
    tiny_umim: UMIM, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone, text = tiny_umim.backbone, " ".join(f"w{number}" for number in range(1, 31))
    ids = backbone.encode(text)
    assert truncated(text, 0.25, backbone).tolist() == ids[round(0.25 * len(ids)) :]
    assert truncated(text, 0.9, backbone).tolist() == ids[-16:]
    monkeypatch.setattr(backbone.require_tokenizer(), "chat_template", CHATML)
    chat = [{"role": "user", "content": text}]
    (whole,) = encode_prompts([chat], backbone, None)
    ((first, end),) = whole.parts
    wanted = [*whole.ids[:first], *whole.ids[first + 10 :]]
    assert truncated(chat, 10 / len(whole.ids), backbone).tolist() == wanted
    assert end - first > 26


def test_what_the_base_model_knows_is_asked_again_from_shorter_prompts(
    tiny_umim: UMIM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny_umim.backbone.require_tokenizer(), "chat_template", CHATML)
    text = " ".join(f"w{number}" for number in range(1, 31)) + " w1 w2 w3"
    options = argparse.Namespace(batch_size=1, answers=None)
    monkeypatch.setattr(answers, "NEW", 3)
    greedy = {"max_new_tokens": 3, "do_sample": False, "merge": "none"}
    said = tiny_umim.generate([{"role": "user", "content": text}], **greedy).text[0].lower()
    word = re.findall(r"\w+", said)[0]
    asked = [Question("unknown", text, ("nowhere",)), Question("known", text, (word,))]
    found = summary(list(answer_all(asked, tiny_umim, options)))
    assert (found["questions"], found["accepted"]) == (2, 1)
    assert [list(row["sides"]) for row in found["rows"]] == [
        ["base"],
        ["base", "umim, raw tail 16", "truncation"],
    ]
    assert found["sides"]["base"]["kept"] == 1 and found["sides"]["truncation"]["saving"] > 0


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
    assert set(found[0]) == {"umim", "truncation"} and all(
        0.0 <= saving < 1.0 for saving in found[1]
    )
    monkeypatch.setattr(tiny_umim.engine, "generate", None)  # read again, not asked again
    assert answer_shorter(tiny_umim, asked, 3, options) == found
