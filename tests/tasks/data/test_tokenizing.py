"""The tokenise stage: exact tokens whatever the workers and the order of the files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerBase

from support.kills import WorkerKiller
from tasks.cluster.lease import ClusterLease
from tasks.data.tokenizing import (
    Tokenized,
    TokenizerRef,
    TokenJob,
    tokenize_file,
    tokenize_splits,
)
from tasks.run.stage import Artifact, Site
from tasks.stages.corpus import (
    CorpusText,
    corpus_stage,
    split_tokens,
    splits_with,
    tokenize_stage,
)
from tasks.stages.named import NamedTokenizer
from umim_core.backbone.tokenizer_files import load_tokenizer, tokenizer_fingerprint
from umim_core.config.corpus import OOD, FilesCorpus
from umim_core.config.recipe import ClusterConfig
from umim_core.errors import ArtifactError, CorpusError, TokenizerMismatchError
from umim_core.store.artifacts import directory_digest, payload_files, sha256_file
from umim_core.text.sources import JsonLines, Source, TextFiles
from umim_core.text.tokens import TokenFiles, join_tokens

NAME = "umim-docs-gpt2"
TEXTS = {
    "a.txt": "Return the sum of the elements over an axis.\n",
    "b.txt": "Größe über null; 10000 km.\r\n" * 9,
    "c.txt": "",
    "d.txt": "def f(x):\n    return x\n",
    "e.txt": "The quick brown fox " * 30,
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(NAME)


@pytest.fixture(scope="module")
def reference(tokenizer: PreTrainedTokenizerBase) -> TokenizerRef:
    return TokenizerRef(NAME, None, tokenizer_fingerprint(tokenizer))


@pytest.fixture(scope="module")
def lease(two_cores: None) -> Iterator[ClusterLease]:
    with ClusterLease(ClusterConfig(cpus=2, workers=0)) as found:
        yield found


@pytest.fixture(scope="module")
def here() -> Iterator[ClusterLease]:
    """A lease that must not start anything."""
    with ClusterLease(ClusterConfig(address="203.0.113.1:1")) as found:
        yield found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in TEXTS.items():
        (tmp_path / name).write_text(text, encoding="utf-8", newline="")
    return tmp_path


def ids_of(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def sums(directory: Path) -> dict[str, str]:
    return {name: sha256_file(path) for name, path in payload_files(directory).items()}


@pytest.fixture
def tokenize(reference: TokenizerRef, lease: ClusterLease) -> Callable[..., Tokenized]:
    """Tokenises a split into a folder, on the cluster if it has several files."""

    def run(source: Source, out: Path, limit: int | None = None) -> Tokenized:
        sources, limits = {out.name: source}, {out.name: limit}
        return tokenize_splits(sources, out.parent, reference, lease, limits)[out.name]

    return run


# Files of a split


def test_what_a_dead_worker_left_is_replaced_or_removed(
    folder: Path, tokenize: Callable[..., Tokenized]
) -> None:
    source = TextFiles(paths=(f"{folder}/*.txt",))
    tokenize(source, folder / "x")
    clean = sums(folder / "x")
    for name in ("00000/tokens.npy", "00002/ends.npy", "tokens.npy"):
        (folder / "x" / name).parent.mkdir(exist_ok=True)
        (folder / "x" / name).write_bytes(b"garbage" * 999)
    tokenize(source, folder / "x")
    assert sums(folder / "x") == clean


@pytest.mark.parametrize(
    "limit", [None, 60, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 100, 10**6))]
)
def test_limits_and_order_of_the_names_leave_the_bytes_alone(
    folder: Path,
    tokenize: Callable[..., Tokenized],
    tokenizer: PreTrainedTokenizerBase,
    limit: int | None,
) -> None:
    found = []
    for number, names in enumerate([sorted(TEXTS), sorted(TEXTS, reverse=True)]):
        source = TextFiles(paths=tuple(str(folder / name) for name in names))
        tokenize(source, folder / f"out{number}", limit)
        found.append(sums(folder / f"out{number}"))
    assert found[0] == found[1]
    whole = TokenFiles.open(folder / "out0")
    expected = [token for name in sorted(TEXTS) for token in ids_of(TEXTS[name], tokenizer)]
    assert whole.ids.tolist() == expected[:limit]
    # The same documents one after the other in one process: the slow way.
    one = folder / "one.jsonl"
    lines = [json.dumps({"text": TEXTS[name]}) + "\n" for name in sorted(TEXTS)]
    one.write_text("".join(lines), encoding="utf-8")
    tokenize(JsonLines(paths=(str(one),)), folder / "one", limit)
    alone = TokenFiles.open(folder / "one")
    assert whole.ids.tolist() == alone.ids.tolist()
    assert whole.ends.tolist() == alone.ends.tolist()


def test_one_file_per_split_starts_no_cluster(
    folder: Path, tokenizer: PreTrainedTokenizerBase, reference: TokenizerRef, here: ClusterLease
) -> None:
    files = {"train": folder / "a.txt", "valid": folder / "b.txt"}
    sources: dict[str, Source] = {s: TextFiles(paths=(str(file),)) for s, file in files.items()}
    tokenize_splits(sources, folder, reference, here, {})
    assert TokenFiles.open(folder / "valid").ids.tolist() == ids_of(TEXTS["b.txt"], tokenizer)


def test_the_first_broken_file_is_named_whichever_worker_fails_first(
    folder: Path, tokenize: Callable[..., Tokenized]
) -> None:
    (folder / "b.txt").write_bytes(b"text " * 200_000 + b"\0")
    (folder / "d.txt").write_bytes(b"\xff")
    with pytest.raises(CorpusError) as caught:
        tokenize(TextFiles(paths=(f"{folder}/*.txt",)), folder / "out")
    assert caught.value.rule.endswith("b.txt: text must not hold NUL")
    assert caught.value.value == "NUL at byte 1000000"


def test_bad_rows_are_counted_over_all_files(
    tmp_path: Path, tokenize: Callable[..., Tokenized]
) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.jsonl").write_text('{"text": "good"}\n{\n')
    source = JsonLines(paths=(f"{tmp_path}/*.jsonl",), max_bad=3)
    bad = tokenize(source, tmp_path / "x").bad
    assert bad.count == 3 and bad.first.startswith(f"{tmp_path}/a.jsonl:2: ")
    with pytest.raises(CorpusError, match=r"at most 2 rows.*a\.jsonl:2: .*; got 3 bad rows"):
        tokenize(source.model_copy(update={"max_bad": 2}), tmp_path / "y")


def test_another_tokenizer_on_a_worker_is_refused(folder: Path) -> None:
    other = TokenizerRef(NAME, None, "0" * 64)
    source = TextFiles(paths=(f"{folder}/a.txt",))
    job = TokenJob("x", None, source, folder / "x", other, None)
    with pytest.raises(TokenizerMismatchError, match="every machine must load the same tokenizer"):
        tokenize_file(job)


# The stage


def corpus_of(folder: Path, **fields: object) -> FilesCorpus:
    pq.write_table(pa.table({"text": list(TEXTS.values())}), folder / "valid.parquet")
    splits = {
        "train": {"kind": "text", "paths": [str(folder / "?.txt")]},
        "valid": {"kind": "parquet", "paths": [str(folder / "valid.parquet")]},
        "test": {"kind": "text", "paths": [str(folder / "e.txt")]},
        "out_of_domain": {"code": {"kind": "text", "paths": [str(folder / "d.txt")]}},
    }
    return FilesCorpus.model_validate(splits | fields)


def stage(root: Path, lease: ClusterLease, config: FilesCorpus) -> Artifact:
    site, text, tokenizer = Site(root, lease), CorpusText(config), NamedTokenizer(NAME)
    corpus, limit = corpus_stage(text=text).build(site), config.train_tokens
    call = tokenize_stage(corpus=corpus, text=text, train_tokens=limit, tokenizer=tokenizer)
    return call.build(site)


def test_every_split_becomes_a_folder_of_shards_with_a_digest_of_its_own(
    folder: Path, tokenizer: PreTrainedTokenizerBase, lease: ClusterLease
) -> None:
    done = stage(folder / "root", lease, corpus_of(folder, train_tokens=20))
    everything = [ids_of(TEXTS[name], tokenizer) for name in sorted(TEXTS)]
    flat = [token for ids in everything for token in ids]
    assert split_tokens(done, "train")[:].tolist() == flat[:20]
    assert split_tokens(done, "valid")[:].tolist() == flat
    documents = len(TokenFiles.open(done.path / "valid").ends)
    assert documents == 4  # the empty one is left out
    assert splits_with(done, OOD) == ["ood_code"]
    assert done.metrics["tokens_test"] == len(everything[-1])
    assert not (done.path / "state").exists()
    first = stage(folder / "root", lease, corpus_of(folder))
    assert done.part("valid").identity() == first.part("valid").identity()
    assert done.part("train").identity() != first.part("train").identity()
    assert first.part("train").identity() == directory_digest(first.path / "train")
    with pytest.raises(ArtifactError, match="must hold 'other'; got none"):
        first.part("other").identity()


def test_ready_ids_of_another_tokenizer_are_refused(folder: Path, here: ClusterLease) -> None:
    np.save(folder / "ids.npy", np.array([1, 2**17], np.uint32))
    ids = {"kind": "ids", "path": str(folder / "ids.npy")}
    config = corpus_of(folder, train={"kind": "text", "paths": [f"{folder}/a.txt"]}, test=ids)
    with pytest.raises(
        CorpusError, match=r"'test' must lie in 0\.\.8191, the tokenizer's vocabulary; got 131"
    ):
        stage(folder / "root", here, config)


@pytest.mark.full
def test_a_killed_worker_leaves_the_bytes_alone(
    tmp_path: Path,
    reference: TokenizerRef,
    lease: ClusterLease,
    tokenize: Callable[..., Tokenized],
) -> None:
    jobs = []
    for number in range(12):
        file = tmp_path / f"{number:02}.txt"
        file.write_text(f"Return axis {number} of it. " * 40_000)
        one = TextFiles(paths=(str(file),))
        jobs.append(TokenJob("x", number, one, tmp_path / "one", reference, None))
        tokenize_file(jobs[-1])
    join_tokens(tmp_path / "joined", [job.place for job in jobs])
    directory = tmp_path / "two"

    def shards_of_other_jobs() -> bool:
        return len(list(directory.glob("*/tokens.npy"))) >= 2

    lease.ensure()
    with WorkerKiller("ray::_call", ready=shards_of_other_jobs) as killer:
        tokenize(TextFiles(paths=(f"{tmp_path}/*.txt",)), directory)
    assert killer.killed, "a worker was killed"
    assert sums(directory) == sums(tmp_path / "joined")
