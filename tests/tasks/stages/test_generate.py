"""Stage ``generate`` on a tiny model: what it samples, its splits, what it refuses."""

from __future__ import annotations

import json
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from support.sites import here
from support.tiny_generation import MAX_TOKENS, QUESTIONS, generate, tiny_generated_corpus
from tasks.run.stage import Artifact
from tasks.stages.corpus import CorpusText, corpus_stage, tokenize_stage, tokens
from tasks.stages.named import NamedTokenizer
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.config.corpus import GeneratedCorpus
from umim_core.errors import CorpusError
from umim_core.synthetic_corpora.questions import TrajectoryRow, iter_rows


@pytest.fixture(scope="module")
def generated(corpus: GeneratedCorpus, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return generate(tmp_path_factory.mktemp("generated"), corpus)


def rows_of(artifact: Artifact) -> dict[int, list[TrajectoryRow]]:
    found: dict[int, list[TrajectoryRow]] = defaultdict(list)
    for row in iter_rows(artifact.path):
        found[row.question].append(row)
    return found


def json_lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_every_question_has_its_trajectories(generated: Artifact) -> None:
    found = rows_of(generated)
    assert list(found) == list(range(len(QUESTIONS)))
    for number, rows in found.items():
        assert [row.trajectory for row in rows] == [0, 1, 2]
        for row in rows:
            assert row.text.startswith(QUESTIONS[number])
            assert row.tokens == len(row.text.split()) <= MAX_TOKENS
            assert row.ended == "eos" or row.tokens == MAX_TOKENS


def test_the_seed_decides_the_bytes(
    corpus: GeneratedCorpus, generated: Artifact, tmp_path: Path
) -> None:
    moved = shutil.copytree(Path(corpus.model).parent, tmp_path / "moved")
    where = corpus.questions[0].model_copy(update={"paths": (str(moved / "questions.jsonl"),)})
    elsewhere = {"model": str(moved / "model"), "questions": (where,)}
    again = generate(tmp_path, corpus)
    assert not generate(tmp_path, corpus.model_copy(update=elsewhere)).executed
    other = generate(tmp_path, corpus.model_copy(update={"seed": 1}))
    assert again.executed
    assert again.digest == generated.digest
    assert other.digest != generated.digest


def test_shards_draw_numbers_of_their_own(
    tiny_model: Callable[[str, int], PreTrainedModel],
    tiny_tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
) -> None:
    model = tiny_model("llama", 0)
    with torch.no_grad():  # every token is as likely as another, whatever was asked
        model.get_output_embeddings().weight.zero_()
    made = generate(tmp_path, tiny_generated_corpus(tmp_path, model, tiny_tokenizer))
    answers = [
        tuple(row.text.removeprefix(QUESTIONS[number]) for row in rows)
        for number, rows in rows_of(made).items()
    ]
    assert len(set(answers)) == len(QUESTIONS)


@pytest.mark.parametrize(("field", "value"), [("top_p", 1e-6), ("temperature", 1e-4)])
def test_sampling_options_reach_the_model(
    corpus: GeneratedCorpus, generated: Artifact, tmp_path: Path, field: str, value: float
) -> None:
    found = generate(tmp_path, corpus.model_copy(update={field: value}))
    different = [len({row.text for row in rows}) for rows in rows_of(found).values()]
    assert different == [1] * len(QUESTIONS), "no choice is left"
    assert max(len({row.text for row in rows}) for rows in rows_of(generated).values()) == 3


def test_a_questions_trajectories_share_a_split(
    corpus: GeneratedCorpus, generated: Artifact, tmp_path: Path
) -> None:
    made = corpus_stage(text=CorpusText(corpus), generated=generated).build(here(tmp_path))
    splits = {name: json_lines(made.path / f"{name}.jsonl") for name in ("train", "valid", "test")}
    asked = {name: Counter(row["question"] for row in rows) for name, rows in splits.items()}
    assert {name: len(counts) for name, counts in asked.items()} == {
        "train": 14,
        "valid": 4,
        "test": 2,
    }
    assert sorted(number for counts in asked.values() for number in counts) == list(range(20))
    assert {count for counts in asked.values() for count in counts.values()} == {3}


def test_a_generated_corpus_is_tokenised_like_any_other(
    corpus: GeneratedCorpus, generated: Artifact, tmp_path: Path
) -> None:
    (tmp_path / "other.txt").write_text("w9 w8 w7")
    other = {"kind": "text", "paths": [str(tmp_path / "other.txt")]}
    config = GeneratedCorpus.model_validate(
        corpus.model_dump() | {"out_of_domain": {"other": other}, "train_tokens": 50}
    )
    text, site = CorpusText(config), here(tmp_path)
    made = corpus_stage(text=text, generated=generated).build(site)
    tokenizer = NamedTokenizer(corpus.model)
    done = tokenize_stage(corpus=made, text=text, train_tokens=50, tokenizer=tokenizer).build(site)
    texts = [str(row["text"]) for row in json_lines(made.path / "valid.jsonl")]
    want = load_tokenizer(corpus.model)(texts, add_special_tokens=False)["input_ids"]
    assert tokens(done, "valid")[:].tolist() == [i for ids in want for i in ids]
    assert tokens(done, "ood_other")[:].tolist() == [9, 8, 7]
    assert len(tokens(done, "train")) == 50


def test_a_corpus_without_its_trajectories_is_refused(
    corpus: GeneratedCorpus, tmp_path: Path
) -> None:
    with pytest.raises(CorpusError, match="needs its trajectories"):
        corpus_stage(text=CorpusText(corpus)).build(here(tmp_path))
