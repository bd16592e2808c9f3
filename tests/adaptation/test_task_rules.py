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
from umim_core.errors import ConfigError, RuleSetError
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
    mined = mine_task_rules(
        questions, encode, TAUS, QuestionForm(part=part), excluded=[END_OF_TEXT]
    )
    assert list(mined) == list(TAUS)
    for tau, rules in mined.items():
        assert rules_of(rules) == {g: n for g, n in counts.items() if n >= tau}
        assert (rules.origin.tau, rules.origin.overlap, rules.origin.containment) == (
            tau,
            "none",
            "keep",
        )
    sizes = [len(rules) for rules in mined.values()]
    assert 0 < sizes[1] < sizes[2] < sizes[3] < sizes[4]


def test_no_bigram_joins_two_questions_or_reaches_over_the_cut() -> None:
    questions = [Question("ab", ("x", "y"), 0), Question("cd", ("x", "y"), 0)]
    rules = mine_task_rules(questions, characters, [1], QuestionForm(), max_length=3)[1]
    assert set(rules_of(rules)) == {pairs("b "), pairs("d "), pairs(" x")}


def test_a_budget_raises_each_threshold_until_the_rules_fit() -> None:
    questions = [Question("abcabcab", ("x", "y"), 0)]  # (a,b):3 (b,c):2 (c,a):2
    mined = mine_task_rules(questions, characters, [1, 3], CONTEXT, budget=2)
    found = {tau: rules_of(rules) for tau, rules in mined.items()}
    assert found == {1: {pairs("ab"): 3}, 3: {pairs("ab"): 3}}
    assert [rules.origin.tau for rules in mined.values()] == [3, 3]
    free = mine_task_rules(questions, characters, [1], CONTEXT, budget=3)[1]
    assert (len(free), free.origin.tau) == (3, 1)


def test_the_corpus_digest_tells_what_was_counted() -> None:
    question = Question("abc", ("x", "y"), 0)
    digests = {
        mine_task_rules([question], characters, [1, 2], QuestionForm(part=part))[
            tau
        ].origin.corpus_digest
        for part in ("sequence", "context")
        for tau in (1, 2)
    }
    assert len(digests) == 2


@pytest.mark.parametrize(("taus", "error"), [([], ConfigError), ([5, 0], RuleSetError)])
def test_bad_thresholds_are_refused(taus: list[int], error: type[Exception]) -> None:
    with pytest.raises(error, match=r"at least (one|1)"):
        mine_task_rules([Question("abc", ("x", "y"), 0)], characters, taus, QuestionForm())
