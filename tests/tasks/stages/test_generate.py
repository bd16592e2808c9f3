"""Stage ``generate`` on a tiny model: what it samples, its splits, what it refuses."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import tasks.stages.generate
from support.kills import die_at
from support.sites import here
from support.tiny_models import tiny_model
from support.training_processes import exit_codes, start_ranks
from tasks.run.stage import Artifact
from tasks.stages.corpus import CorpusText, corpus_stage, split_tokens, tokenize_stage
from tasks.stages.generate import Generation, generate_stage
from tasks.stages.named import NamedTokenizer
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.config.corpus import GeneratedCorpus
from umim_core.errors import ArtifactError
from umim_core.synthetic_corpora.questions import TrajectoryRow, iter_rows

QUESTIONS = [f"w{1 + i} w{30 - i} w5" for i in range(20)]
LONG = ["w1 w2 w3 w4 w5 w6", "w2 w2 w2 w2 w2 w2"]
MAX_TOKENS = 9
SHARDS = 5


def tiny_generated_corpus(
    folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> GeneratedCorpus:
    """Write the model and the questions, two of them too long and one twice, into a folder."""
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    path = folder / "questions.jsonl"
    asked = [*QUESTIONS[:10], *LONG, QUESTIONS[0], *QUESTIONS[10:]]
    path.write_text("".join(json.dumps({"problem": text}) + "\n" for text in asked))
    return GeneratedCorpus.model_validate(
        {
            "questions": [{"kind": "jsonl", "paths": [str(path)], "field": "problem"}],
            "model": str(folder / "model"),
            "max_tokens": MAX_TOKENS,
            "max_question_tokens": 5,
            "temperature": 1.5,
            "splits": {"train": 0.7, "valid": 0.2, "test": 0.1},
            "batch_size": 3,
            "shard_questions": 4,
        }
    )


def generate(root: Path, corpus: GeneratedCorpus) -> Artifact:
    return generate_stage(generation=Generation(corpus)).build(here(root))


def generate_until(rank: int, root: Path, corpus: str, place: str, number: int, when: str) -> None:
    """Generate a corpus, given as JSON, in a process that kills itself; see ``die_at``."""
    die_at(place, number, when)
    generate(root, GeneratedCorpus.model_validate_json(corpus))


@pytest.fixture(scope="module")
def corpus(
    tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerBase
) -> GeneratedCorpus:
    folder = tmp_path_factory.mktemp("corpus")
    return tiny_generated_corpus(folder, tiny_model(), tiny_tokenizer)


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


def test_the_seed_decides_and_no_place(
    corpus: GeneratedCorpus, generated: Artifact, tmp_path: Path
) -> None:
    moved = shutil.copytree(Path(corpus.model).parent, tmp_path / "moved")
    where = corpus.questions[0].model_copy(update={"paths": (str(moved / "questions.jsonl"),)})
    elsewhere = {"model": str(moved / "model"), "questions": (where,)}
    root = generated.path.parents[1]
    assert not generate(root, corpus.model_copy(update=elsewhere)).executed
    assert generate(root, corpus.model_copy(update={"seed": 1})).digest != generated.digest


def test_shards_draw_numbers_of_their_own(
    tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    model = tiny_model()
    with torch.no_grad():  # every token is as likely as another, whatever was asked
        model.get_output_embeddings().weight.zero_()
    made = generate(tmp_path, tiny_generated_corpus(tmp_path, model, tiny_tokenizer))
    answers = [
        tuple(row.text.removeprefix(QUESTIONS[number]) for row in rows)
        for number, rows in rows_of(made).items()
    ]
    assert len(set(answers)) == len(QUESTIONS)


def test_a_questions_trajectories_share_a_split_and_are_tokenised_like_any_text(
    corpus: GeneratedCorpus, generated: Artifact, tmp_path: Path
) -> None:
    (tmp_path / "other.txt").write_text("w9 w8 w7")
    other = {"kind": "text", "paths": [str(tmp_path / "other.txt")]}
    config = GeneratedCorpus.model_validate(
        corpus.model_dump() | {"out_of_domain": {"other": other}, "train_tokens": 50}
    )
    text, site = CorpusText(config), here(tmp_path)
    made = corpus_stage(text=text, generated=generated).build(site)
    splits = {name: json_lines(made.path / f"{name}.jsonl") for name in ("train", "valid", "test")}
    asked = {name: Counter(row["question"] for row in rows) for name, rows in splits.items()}
    sizes = {name: len(counts) for name, counts in asked.items()}
    assert sizes == {"train": 14, "valid": 4, "test": 2}
    assert sorted(number for counts in asked.values() for number in counts) == list(range(20))
    assert {count for counts in asked.values() for count in counts.values()} == {3}
    tokenizer = NamedTokenizer(corpus.model)
    done = tokenize_stage(corpus=made, text=text, train_tokens=50, tokenizer=tokenizer).build(site)
    texts = [str(row["text"]) for row in splits["valid"]]
    want = load_tokenizer(corpus.model)(texts, add_special_tokens=False)["input_ids"]
    assert split_tokens(done, "valid")[:].tolist() == [i for ids in want for i in ids]
    assert split_tokens(done, "ood_other")[:].tolist() == [9, 8, 7]
    assert len(split_tokens(done, "train")) == 50


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The shards that are written in this process, as they are; each on one thread."""
    numbers: list[int] = []
    write = tasks.stages.generate.write_shard

    def note(folder: Path, number: int, rows: list[TrajectoryRow]) -> None:
        assert torch.get_num_threads() == 1
        write(folder, number, rows)
        numbers.append(number)

    monkeypatch.setattr(tasks.stages.generate, "write_shard", note)
    return numbers


def shards_in(root: Path) -> dict[str, tuple[int, int]]:
    return {
        path.name: (path.stat().st_mtime_ns, path.stat().st_ino)
        for path in root.glob("generate/**/shards/*.jsonl")
    }


def test_a_full_disk_keeps_the_finished_shards(
    corpus: GeneratedCorpus,
    generated: Artifact,
    made: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flush, threads = os.fsync, torch.get_num_threads()
    torch.set_num_threads(3)

    def full(handle: int) -> None:
        if ".000002.jsonl." in os.readlink(f"/proc/self/fd/{handle}"):  # the third shard's scratch
            raise OSError(errno.ENOSPC, "No space left on device")
        flush(handle)

    with monkeypatch.context() as patch, pytest.raises(ArtifactError, match=r"2\.jsonl .*No space"):
        patch.setattr(os, "fsync", full)
        generate(tmp_path, corpus)
    before = shards_in(tmp_path)
    assert sorted(before) == ["000000.jsonl", "000001.jsonl"]
    assert generate(tmp_path, corpus).digest == generated.digest
    assert torch.get_num_threads() == 3
    torch.set_num_threads(threads)
    assert made == [0, 1, 2, 3, 4]
    after = shards_in(tmp_path)
    assert {name: after[name] for name in before} == before, "finished shards are not touched"


# Where the process kills itself, and how many shards are whole by then.
POINTS = {
    "nothing asked": (("tasks.stages.generate.write_selection", 1, "before"), 0),
    "nothing sampled": (("tasks.stages.generate.write_selection", 1, "after"), 0),
    "sampled": (("tasks.stages.generate.write_shard", 3, "before"), 2),
    "not renamed": (("os.fsync", 9, "after"), 2),
    "written": (("tasks.stages.generate.write_shard", 3, "after"), 3),
    "no manifest": (("umim_core.store.publication.write_manifest", 1, "before"), SHARDS),
    "stage not renamed": (("umim_core.store.publication.flush_tree", 2, "after"), SHARDS),
}


@pytest.mark.full
@pytest.mark.parametrize("name", POINTS)
def test_a_killed_run_goes_on_with_the_next_shard(
    corpus: GeneratedCorpus, generated: Artifact, made: list[int], tmp_path: Path, name: str
) -> None:
    point, whole = POINTS[name]
    root = tmp_path / "root"
    run = start_ranks(tmp_path, 1, generate_until, root, corpus.model_dump_json(), *point)
    assert exit_codes(run) == [-signal.SIGKILL], (tmp_path / "rank-0.log").read_text("utf-8")
    before = shards_in(root)
    assert len(before) == whole
    assert generate(root, corpus).digest == generated.digest
    assert made == list(range(whole, SHARDS))
    after = shards_in(root)
    assert {name: after[name] for name in before} == before, "finished shards are not touched"
