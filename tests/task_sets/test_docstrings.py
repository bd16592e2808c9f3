from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from umim_core.config.model_base import SPLITS, Split
from umim_core.errors import CorpusError
from umim_core.store.disk import write_rows
from umim_core.task_sets.docstrings import MAX_CONTEXT_CHARS, write_docstring_questions

VOCABULARY = [a + b + c for a in "bdfgk" for b in "aeiou" for c in "lmnprst"]


def document(identifier: str, text: str, **changed: object) -> dict[str, object]:
    module, _, qualified = identifier.partition("::")
    row = {"id": f"{module}::{qualified}", "text": text, "name": qualified.rpartition(".")[2]}
    return {**row, "kind": "function", "has_summary": True, **changed}


def fillers(count: int, seed: int = 0) -> list[dict[str, object]]:
    """Make documents that all become questions: unlike summaries, long bodies."""
    rng = random.Random(seed)
    rows = []
    for i in range(count):
        summary = " ".join(rng.sample(VOCABULARY, 6)).capitalize() + "."
        body = " ".join(rng.choices(VOCABULARY, k=60))
        rows.append(document(f"pkg/m{seed}_{i}.py::obj", f"{summary}\n\n{body}"))
    return rows


def build(
    tmp_path: Path, rows: list[dict[str, object]], size: int = 1000
) -> dict[str, dict[str, object]]:
    """Build the test split from the rows; return its questions by id."""
    corpus, out = tmp_path / "corpus", tmp_path / "task"
    corpus.mkdir(exist_ok=True)
    write_rows(corpus / "test.jsonl", rows)
    write_docstring_questions(out, {"test": size}, corpus)
    questions = [json.loads(line) for line in (out / "test.jsonl").read_text().splitlines()]
    return {q["id"]: q for q in questions}


def question_for(tmp_path: Path, row: dict[str, object]) -> dict[str, object] | None:
    return build(tmp_path, [row, *fillers(20)]).get(str(row["id"]))


def test_questions_are_made_of_summaries_and_bodies_of_the_split(tmp_path: Path) -> None:
    rows = fillers(30)
    questions = build(tmp_path, rows)
    summaries = {str(row["text"]).partition("\n\n")[0] for row in rows}
    assert len(questions) == 30
    for row in rows:
        summary, _, body = str(row["text"]).partition("\n\n")
        question = questions[str(row["id"])]
        assert question["choices"][question["gold"]] == summary
        assert question["context"] == body
        assert len(set(question["choices"])) == 4 and set(question["choices"]) <= summaries


@pytest.mark.parametrize("count", [4, 5, 6, 7, 40])
def test_gold_positions_are_balanced_to_within_one(tmp_path: Path, count: int) -> None:
    questions = build(tmp_path, fillers(count))
    positions = Counter(q["gold"] for q in questions.values())
    assert len(questions) == count
    assert max(positions.values()) - min(positions[i] for i in range(4)) <= 1


def test_splits_do_not_mix(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    texts: dict[Split, str] = {}
    for seed, split in enumerate(SPLITS):
        rows = fillers(12, seed)
        write_rows(corpus / f"{split}.jsonl", rows)
        texts[split] = "\n".join(str(row["text"]) for row in rows)
    write_docstring_questions(tmp_path / "task", corpus=corpus)
    for split in SPLITS:
        lines = (tmp_path / "task" / f"{split}.jsonl").read_text().splitlines()
        assert len(lines) == 12
        for question in map(json.loads, lines):
            assert question["context"] in texts[split]
            assert all(choice in texts[split] for choice in question["choices"])


BODY = "Walk over the inputs and collect what they hold, one after the other, " * 4


@pytest.mark.parametrize(
    ("text", "changed", "reason"),
    [
        (f"Short one.\n\n{BODY}", {}, "summary too short or too long"),
        (f"{'Long words here ' * 12}\n\n{BODY}", {}, "summary too short or too long"),
        ("Collect the held inputs.\n\n" + "b" * 199, {}, "body too short"),
        (f"Collect the held inputs.\n\n{BODY}", {"has_summary": False}, "summary repeats"),
        (f"collect(inputs, axis) -> Tensor out\n\n{BODY}", {}, "no sentence"),
        (f"Collect the held inputs\n=======\n\n{BODY}", {}, "no sentence"),
        (f"Collect the held inputs like this:\n\n{BODY}", {}, "no sentence"),
        (f"Collect the inputs.\n\nHere: collect the inputs. {BODY}", {}, "body repeats"),
    ],
)
def test_unsuitable_documents_are_left_out_for_a_reason(
    tmp_path: Path, text: str, changed: dict[str, object], reason: str
) -> None:
    row = document("pkg/x.py::obj", text, **changed)
    assert question_for(tmp_path, row) is None
    with pytest.raises(CorpusError, match=rf"{reason}[^,]*: 1}}"):
        build(tmp_path, [row])


def test_a_name_that_tells_the_summary_is_blanked(tmp_path: Path) -> None:
    body = f"{BODY}\n\n>>> np.nanmedian(x)\n1.0\n>>> nanmedian_of(x)"
    row = document("pkg/x.py::nanmedian", f"Compute the nanmedian along an axis.\n\n{body}")
    question = question_for(tmp_path, row)
    assert question is not None
    assert "np.___(x)" in question["context"]
    assert "nanmedian_of(x)" in question["context"], "other names stay"
    row = document("pkg/x.py::f", f"Fold the inputs along an axis.\n\n{BODY}\n\n>>> np.f(x)")
    question = question_for(tmp_path, row)
    assert question is not None and "np.f(x)" in question["context"], "a letter tells nothing"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (f"{'a' * 600}\n\n{'b' * 600}", "a" * 600),
        (f"{'a' * 100}\n\n{'b' * 600}\n{'c' * 600}", f"{'a' * 100}\n\n{'b' * 600}"),
        (f"{'a' * 700} {'b' * 600}", "a" * 700),
        ("a" * 2000, "a" * MAX_CONTEXT_CHARS),
        (f"{'a' * (MAX_CONTEXT_CHARS - 2)} b", f"{'a' * (MAX_CONTEXT_CHARS - 2)} b"),
        (f"{'a' * MAX_CONTEXT_CHARS} b", "a" * MAX_CONTEXT_CHARS),
    ],
    ids=["paragraph", "line", "word", "no border", "fits", "border at the limit"],
)
def test_long_bodies_are_cut_at_a_border(tmp_path: Path, body: str, expected: str) -> None:
    row = document("pkg/x.py::obj", f"Collect the held inputs.\n\n{body}")
    question = question_for(tmp_path, row)
    assert question is not None
    assert question["context"] == expected


def test_distractors_come_from_other_modules(tmp_path: Path) -> None:
    same = [{**row, "id": f"pkg/x.py::f{i}"} for i, row in enumerate(fillers(12))]
    other = fillers(3, seed=1)
    questions = build(tmp_path, [*same, *other])
    expected = {str(row["text"]).partition("\n\n")[0] for row in other}
    for i in range(12):
        question = questions[f"pkg/x.py::f{i}"]
        assert {c for k, c in enumerate(question["choices"]) if k != question["gold"]} == expected
