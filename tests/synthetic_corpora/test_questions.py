"""Questions: prompts, which are asked, their split, and files of them and of their answers."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from umim_core.config.corpus import GeneratedCorpus, SplitFractions
from umim_core.errors import ArtifactError, ConfigError
from umim_core.synthetic_corpora.questions import (
    Selection,
    TrajectoryRow,
    iter_rows,
    prompt_ids,
    read_selection,
    select_questions,
    shard_path,
    split_questions,
    write_selection,
    write_shard,
)

TEXTS = [f"question {number}" for number in range(200)]


def corpus(folder: Path, questions: list[str], **fields: object) -> GeneratedCorpus:
    path = folder / "questions.jsonl"
    path.write_text("".join(json.dumps({"ask": text}) + "\n" for text in questions))
    source = {"kind": "jsonl", "paths": [str(path)], "field": "ask"}
    limits = {"max_tokens": 20, "max_question_tokens": 4}
    raw = {"kind": "generated", "questions": [source], "model": "tiny", **limits}
    return GeneratedCorpus.model_validate(raw | fields)


def test_a_template_replaces_the_question_alone(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    config = corpus(tmp_path, [], template="w1 {question} w2 {0}")
    assert prompt_ids("w5 w6", config, tiny_tokenizer) == [1, 5, 6, 2, 0]


def test_a_chat_template_frames_the_question(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer._tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}w30 {{ m['content'] }} {% endfor %}"
        "{% if add_generation_prompt %}w31{% endif %}"
    )
    config = corpus(tmp_path, [], template="w1 {question}", chat="template")
    assert prompt_ids("w5", config, tokenizer) == [30, 1, 5, 31]


def test_a_chat_needs_a_template(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ConfigError, match="needs a tokenizer with a chat template; got tiny"):
        select_questions(corpus(tmp_path, ["w1"], chat="template"), tiny_tokenizer)


def test_long_and_repeated_questions_are_left_out_and_counted(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    asked = ["w1", "w1 w2 w3 w4", "w1 w2 w3 w4 w5", "w1", " ", "w7", "w8 w8 w8 w8 w8 w8"]
    config = corpus(tmp_path, asked)
    found = select_questions(config, tiny_tokenizer)
    assert found.texts == ["w1", "w1 w2 w3 w4", "w7"]
    assert (found.too_long, found.duplicates, found.bad_rows) == (2, 1, 1)


def test_a_prompt_must_leave_room_for_an_answer(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    asked = ["w1", "w2", "w3", "w1 w2"]
    config = corpus(tmp_path, asked, template="w9 " * 18 + "{question}")
    found = select_questions(config, tiny_tokenizer)
    assert (found.texts, found.too_long) == (["w1", "w2", "w3"], 1)


def test_splits_have_their_parts_of_the_questions() -> None:
    fractions = SplitFractions(train=0.8, valid=0.15, test=0.05)
    counts = Counter(split_questions(TEXTS, fractions, seed=0))
    assert counts == {"train": 160, "valid": 30, "test": 10}
    few = split_questions(TEXTS[:4], SplitFractions(train=0.02, valid=0.49, test=0.49), seed=0)
    assert Counter(few) == {"train": 1, "valid": 1, "test": 2}


def test_the_order_of_the_questions_does_not_matter_and_the_seed_does() -> None:
    chosen = dict(zip(TEXTS, split_questions(TEXTS, SplitFractions(), 0), strict=True))
    mixed = random.Random(0).sample(TEXTS, len(TEXTS))
    assert dict(zip(mixed, split_questions(mixed, SplitFractions(), 0), strict=True)) == chosen
    assert split_questions(TEXTS, SplitFractions(), 1) != list(chosen.values())


ROWS = [TrajectoryRow(0, number, "eos", 5, "two\nlines \u2028 of text") for number in range(2)]
WHOLE = b'{"ended":"eos","question":0,"text":"a","tokens":5,"trajectory":0}\n'


def test_a_selection_and_the_rows_of_all_shards_come_back(tmp_path: Path) -> None:
    selection = Selection(["a", "b"], too_long=1, duplicates=2, bad_rows=3)
    write_selection(tmp_path, selection)
    write_shard(tmp_path, 1, ROWS[1:])
    write_shard(tmp_path, 0, ROWS[:1])
    assert (read_selection(tmp_path), list(iter_rows(tmp_path))) == (selection, ROWS)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (WHOLE[:20], "Invalid JSON"),
        (WHOLE.replace(b'"tokens":5,', b""), "tokens must be given"),
    ],
)
def test_a_torn_shard_is_refused(tmp_path: Path, line: bytes, problem: str) -> None:
    write_shard(tmp_path, 0, ROWS)
    shard_path(tmp_path, 1).write_bytes(WHOLE + line)
    with pytest.raises(ArtifactError, match=f"000001.jsonl:2 must be a trajectory; got {problem}"):
        list(iter_rows(tmp_path))


def test_torn_questions_are_refused(tmp_path: Path) -> None:
    (tmp_path / "questions.json").write_text('{"texts": "a"}', encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"must hold .*; got texts must be a list"):
        read_selection(tmp_path)
