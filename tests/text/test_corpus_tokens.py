"""A corpus as token files and whole segments."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from support.token_artifacts import write_documents
from umim_core.errors import ArtifactError, CorpusError
from umim_core.text import token_ids
from umim_core.text.sources import TextFiles, TokenIds
from umim_core.text.token_files import TokenFiles
from umim_core.text.token_ids import UniformOffsets, ids_digest
from umim_core.text.tokens import tokenized_corpus, whole_segments


def shards(directory: Path, ids: list[int]) -> TokenFiles:
    return write_documents(directory, np.array(ids, dtype=np.int64))


def test_documents_keep_their_borders(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    for number, text in enumerate(("w1 w2 w3", "", "w4", "w5 w6")):
        (tmp_path / f"{number}.txt").write_text(text)
    source = TextFiles(paths=(f"{tmp_path}/*.txt",))
    with tokenized_corpus(source, tiny_tokenizer, tmp_path) as found:
        assert found[:].tolist() == [1, 2, 3, 4, 5, 6]
        assert found.document_ends().tolist() == [3, 4, 6]
        assert len(list(tmp_path.glob(".umim-tokens.*"))) == 1
    assert list(tmp_path.glob(".umim-tokens.*")) == []


@pytest.mark.parametrize("beside", ["ids.npy", "ids.npy/x", "dangling", "dangling/x"])
def test_a_place_that_is_no_folder_is_refused(tmp_path: Path, beside: str) -> None:
    np.save(tmp_path / "ids.npy", np.arange(9, dtype=np.uint16))
    (tmp_path / "dangling").symlink_to("nowhere")
    source = TokenIds(path=str(tmp_path / "ids.npy"))
    with (
        pytest.raises(ArtifactError, match="must be a folder that can be written; got N"),
        tokenized_corpus(source, None, tmp_path / beside),
    ):
        pytest.fail("it was made")


@pytest.mark.parametrize(("size", "count"), [(10, 1), (19, 1), (20, 2)])
def test_the_remainder_is_no_segment(tmp_path: Path, size: int, count: int) -> None:
    assert whole_segments(shards(tmp_path, [1] * size), None, 10) == UniformOffsets(10, count)


def test_ids_that_the_tokenizer_does_not_have_are_refused(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    assert whole_segments(shards(tmp_path / "known", [31, 31]), tiny_tokenizer, 2).count == 1
    with pytest.raises(CorpusError, match=r"0\.\.31, the tokenizer's vocabulary; got 32"):
        whole_segments(shards(tmp_path / "unknown", [31, 32]), tiny_tokenizer, 2)


@pytest.mark.parametrize("step", [1, 7, 1 << 20])
def test_the_digest_is_that_of_the_ids_in_whole_segments(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_ids, "_HASHED_TOKENS", step)
    ids = list(range(25))
    want = hashlib.sha256(np.array(ids[:20], dtype="<i4").tobytes()).hexdigest()
    assert ids_digest(shards(tmp_path / "a", ids), UniformOffsets(10, 2)) == want
    assert ids_digest(shards(tmp_path / "b", [*ids[:19], 99]), UniformOffsets(10, 2)) != want
