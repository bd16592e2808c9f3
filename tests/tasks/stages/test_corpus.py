from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support.s3 import arrow_address, s3_files, s3_server
from support.sites import here
from tasks.run.stage import Artifact
from tasks.stages import corpus as corpus_stages
from tasks.stages.corpus import CorpusText, corpus_stage, tokenize_stage, tokens
from tasks.stages.named import NamedTokenizer
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.config.corpus import SPLITS, FilesCorpus
from umim_core.errors import CorpusError

if TYPE_CHECKING:
    from s3fs import S3FileSystem

NAME = "umim-docs-gpt2"
SECRET = "sEcReTwOrD"


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    with s3_server() as settings:
        yield settings


@pytest.fixture
def store(server: dict[str, str]) -> S3FileSystem:
    files = s3_files(server)
    for split in SPLITS:
        files.pipe(f"umim/{split}.txt", f"Return the {split} array.".encode())
    return files


@pytest.fixture
def config(server: dict[str, str], store: S3FileSystem) -> FilesCorpus:
    credentials = f"AKID:{SECRET}"
    paths = {split: arrow_address(server, f"{split}.txt", credentials) for split in SPLITS}
    return FilesCorpus.model_validate(
        {split: {"kind": "text", "paths": [path]} for split, path in paths.items()}
    )


def made(config: FilesCorpus, root: Path) -> Artifact:
    return corpus_stage(text=CorpusText(config)).build(here(root))


def tokenize(config: FilesCorpus, corpus: Artifact, root: Path) -> Artifact:
    text, tokenizer = CorpusText(config), NamedTokenizer(NAME)
    call = tokenize_stage(corpus=corpus, text=text, train_tokens=None, tokenizer=tokenizer)
    return call.build(here(root))


def test_a_remote_corpus_is_tokenised_and_leaves_no_credentials(
    tmp_path: Path, config: FilesCorpus
) -> None:
    done = tokenize(config, made(config, tmp_path), tmp_path)
    expected = load_tokenizer(NAME).encode("Return the valid array.", add_special_tokens=False)
    assert tokens(done, "valid")[:].tolist() == expected
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 6
    assert all(SECRET.encode() not in path.read_bytes() for path in files)


def test_remote_files_that_change_under_the_pipeline_are_refused(
    tmp_path: Path, config: FilesCorpus, store: S3FileSystem
) -> None:
    corpus = made(config, tmp_path)
    store.pipe("umim/valid.txt", b"Return the other array.")
    with pytest.raises(CorpusError, match="must stay as they are while the pipeline runs"):
        tokenize(config, corpus, tmp_path)


def test_remote_files_that_change_while_they_are_tokenised_are_not_published(
    tmp_path: Path,
    config: FilesCorpus,
    store: S3FileSystem,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    corpus = made(config, tmp_path)
    tokenize_splits = corpus_stages.tokenize_splits

    def change(*args: Any) -> Any:
        store.pipe("umim/valid.txt", b"Return the other array.")
        return tokenize_splits(*args)

    monkeypatch.setattr(corpus_stages, "tokenize_splits", change)
    with pytest.raises(CorpusError, match="must stay as they are while the pipeline runs"):
        tokenize(config, corpus, tmp_path)
    assert not [path for path in (tmp_path / "tokenize").glob("*") if path.suffix == ""]
