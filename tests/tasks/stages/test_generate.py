"""Stage ``generate`` on a tiny model: what it samples, its splits, what it refuses."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import tasks.stages.generate
from support.sites import here
from support.tiny_generation import (
    MAX_TOKENS,
    QUESTIONS,
    SHARDS,
    generate,
    generate_until,
    tiny_generated_corpus,
)
from support.training_processes import exit_codes, start_ranks
from support.worker_kills import WorkerKiller
from tasks.cluster.lease import ClusterLease
from tasks.run.stage import Artifact
from tasks.stages.corpus import CorpusText, corpus_stage, tokenize_stage, tokens
from tasks.stages.named import NamedTokenizer
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.config.corpus import GeneratedCorpus
from umim_core.config.recipe import ClusterConfig
from umim_core.errors import ArtifactError, CorpusError
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


# Workers


@pytest.fixture(scope="module")
def lease(two_cores: None) -> Iterator[ClusterLease]:
    with ClusterLease(ClusterConfig(cpus=2, workers=2)) as found:
        found.ensure()
        yield found


@pytest.mark.full
def test_a_killed_worker_leaves_the_bytes_alone(
    corpus: GeneratedCorpus, generated: Artifact, lease: ClusterLease, tmp_path: Path
) -> None:
    with WorkerKiller("ray::_call", ready=lambda: shards_in(tmp_path)) as killer:
        found = generate(tmp_path, corpus, lease)
    assert killer.killed, "a worker was killed"
    assert found.digest == generated.digest
