"""Task rules against a Counter over the same questions, made, cut and counted independently."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from umim_core.adaptation.choices import mine_task_rules
from umim_core.config.evaluate import MergedPart
from umim_core.errors import RuleSetError
from umim_core.rules.grams import ORDERS
from umim_core.rules.ruleset import RuleSet
from umim_core.task_sets.spec import Question, QuestionForm, read_questions

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
TAUS = (2000, 200, 50, 5, 1)
LENGTH = 128
END_OF_TEXT = 50256
TASKS = ("hellaswag_dev1000", "arc_easy_train", "arc_challenge_train")
# Both parts, and questions of both forms: endings of a text, answers to a question.
QUICK = (("hellaswag_dev1000", "context"), ("arc_challenge_train", "sequence"))
CONTEXT = QuestionForm(part="context")
Bigrams = dict[tuple[int, ...], int]


def characters(text: str) -> list[int]:
    return [ord(character) for character in text]


def pairs(text: str) -> tuple[int, ...]:
    return tuple(characters(text))


def rules_of(rules: RuleSet) -> Bigrams:
    assert [rules.counts_by_order[n] for n in ORDERS if n != 2] == [0, 0]
    ids = [tuple(row) for row in rules.ids_by_order[2].tolist()]
    return dict(zip(ids, rules.support_by_order[2].tolist(), strict=True))


@pytest.fixture(scope="module")
def encode() -> Callable[[str], list[int]]:
    file = DATA / "tokenizers" / "gpt2" / "tokenizer.json"
    if not file.is_file():
        pytest.skip(f"the GPT-2 tokenizer is not at {file}")
    tokenizer = Tokenizer.from_file(str(file))
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def questions_of(task: str) -> list[Question]:
    file = DATA / "mc" / f"{task}.jsonl"
    if not file.is_file():
        pytest.skip(f"the questions are not at {file}")
    return read_questions(file)


@pytest.mark.parametrize(
    ("task", "part"),
    [
        pytest.param(task, part, marks=[] if (task, part) in QUICK else [pytest.mark.full])
        for task in TASKS
        for part in ("sequence", "context")
    ],
)
def test_every_threshold_gives_the_bigrams_of_a_counter(
    task: str, part: MergedPart, encode: Callable[[str], list[int]]
) -> None:
    questions = questions_of(task)
    counts: Counter[tuple[int, ...]] = Counter()
    for question in questions:
        context = question.context.rstrip()
        blanks = question.context[len(context) :]
        alone = encode(context)
        answers = [encode(f"{context}{blanks} {c}")[len(alone) :] for c in question.choices]
        kept = alone[-(LENGTH - max(map(len, answers))) :]
        counts.update(pairwise(kept if part == "context" else kept + answers[question.gold]))
    for tau in TAUS:
        form = QuestionForm(part=part)
        rules = mine_task_rules(questions, encode, tau, form, excluded=[END_OF_TEXT])
        origin = rules.origin
        assert rules_of(rules) == {g: n for g, n in counts.items() if n >= tau}
        assert (origin.tau, origin.overlap, origin.containment) == (tau, "none", "keep")
    assert len({sum(n >= tau for n in counts.values()) for tau in TAUS[1:]}) == 4


def test_no_bigram_joins_two_questions_or_reaches_over_the_cut() -> None:
    questions = [Question("ab", ("x", "y"), 0), Question("cd", ("x", "y"), 0)]
    rules = mine_task_rules(questions, characters, 1, QuestionForm(), max_length=3)
    assert set(rules_of(rules)) == {pairs("b "), pairs("d "), pairs(" x")}


def test_a_budget_raises_each_threshold_until_the_rules_fit() -> None:
    questions = [Question("abcabcab", ("x", "y"), 0)]  # (a,b):3 (b,c):2 (c,a):2
    for tau in (1, 3):
        rules = mine_task_rules(questions, characters, tau, CONTEXT, budget=2)
        assert (rules_of(rules), rules.origin.tau) == ({pairs("ab"): 3}, 3)
    free = mine_task_rules(questions, characters, 1, CONTEXT, budget=3)
    assert (len(free), free.origin.tau) == (3, 1)


def test_the_corpus_digest_tells_what_was_counted() -> None:
    question = Question("abc", ("x", "y"), 0)
    forms = [QuestionForm(part="sequence"), CONTEXT]
    digests = {
        mine_task_rules([question], characters, tau, form).origin.corpus_digest
        for form in forms
        for tau in (1, 2)
    }
    assert len(digests) == 2


def test_a_bad_threshold_is_refused() -> None:
    with pytest.raises(RuleSetError, match="at least 1"):
        mine_task_rules([Question("abc", ("x", "y"), 0)], characters, 0, QuestionForm())
