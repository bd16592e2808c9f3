"""Token shards: round trips, document borders, slices, and everything that can be torn."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from umim_core.text.shard_files import INDEX, first_tokens, read_index
from umim_core.text.shards import ShardWriter, TokenShards

DOCUMENTS = st.lists(st.lists(st.integers(0, 2**18 - 1), max_size=9), max_size=9)


def write(
    directory: Path, documents: list[list[int]], shard_tokens: int = 4, piece: int = 3
) -> TokenShards:
    writer = ShardWriter(directory, shard_tokens)
    for document in documents:
        for start in range(0, len(document), piece):
            writer.add(np.array(document[start : start + piece], np.int64))
        writer.end_document()
    writer.close()
    return TokenShards.open(directory)


def sums(directory: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in directory.iterdir()}


@given(documents=DOCUMENTS, shard_tokens=st.integers(1, 12), piece=st.integers(1, 5))
def test_documents_survive_the_disk(
    tmp_path_factory: pytest.TempPathFactory,
    documents: list[list[int]],
    shard_tokens: int,
    piece: int,
) -> None:
    shards = write(tmp_path_factory.mktemp("shards"), documents, shard_tokens, piece)
    flat = [token for document in documents for token in document]
    assert len(shards) == len(flat)
    assert shards[:].tolist() == flat
    assert shards[:].dtype == np.int32
    assert shards.num_documents == len(documents)
    ends = np.cumsum([len(document) for document in documents], dtype=np.int64)
    assert shards.document_ends().tolist() == ends.tolist()
    assert shards.document_ends().dtype == np.int64
    assert shards.max_id == max(flat, default=-1)


@given(
    shard_tokens=st.integers(1, 30),
    start=st.none() | st.integers(-30, 30),
    stop=st.none() | st.integers(-30, 30),
)
def test_slices_are_those_of_the_array(
    tmp_path_factory: pytest.TempPathFactory,
    shard_tokens: int,
    start: int | None,
    stop: int | None,
) -> None:
    ids = np.arange(23)
    shards = write(tmp_path_factory.mktemp("shards"), [ids.tolist()], shard_tokens)
    assert shards[start:stop].tolist() == ids[start:stop].tolist()


def test_a_slice_inside_one_shard_is_a_view_of_the_file(tmp_path: Path) -> None:
    shards = write(tmp_path, [list(range(10))])
    assert not shards[4:8].flags.owndata
    assert not shards[4:8].flags.writeable
    assert shards[3:5].flags.owndata


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    """Let threads take turns after every few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hasty_threads")
def test_threads_share_more_shards_than_maps_are_kept(tmp_path: Path) -> None:
    shards = write(tmp_path, [list(range(24))], shard_tokens=1)

    def read(first: int) -> list[int]:
        return [shards[at : at + 1].item() for _ in range(60) for at in (*range(first, 24), 0)]

    with ThreadPoolExecutor(8) as pool:
        for first, found in enumerate(pool.map(read, range(8))):
            assert found == [*range(first, 24), 0] * 60


def test_the_same_tokens_give_the_same_bytes_in_any_pieces(tmp_path: Path) -> None:
    documents = [[1, 2, 3, 4, 5, 6, 7], [], [8]]
    for piece in (1, 2, 7):
        write(tmp_path / str(piece), documents, piece=piece)
    assert sums(tmp_path / "1") == sums(tmp_path / "2") == sums(tmp_path / "7")
    assert sorted(sums(tmp_path / "1")) == [
        "00000-00000.documents.npy",
        "00000-00000.tokens.npy",
        "00000-00001.documents.npy",
        "00000-00001.tokens.npy",
        INDEX,
    ]


@given(documents=DOCUMENTS, shard_tokens=st.integers(1, 12), data=st.data())
def test_the_first_tokens_are_what_a_writer_that_stops_there_leaves(
    tmp_path_factory: pytest.TempPathFactory,
    documents: list[list[int]],
    shard_tokens: int,
    data: st.DataObject,
) -> None:
    flat = list(chain.from_iterable(documents))
    if not flat:
        return
    base = tmp_path_factory.mktemp("shards")
    count = data.draw(st.integers(1, len(flat)))
    write(base / "cut", documents, shard_tokens)
    kept = first_tokens(base / "cut", read_index(base / "cut"), count)
    names = {name for shard in kept for name in shard.files}
    writer, total = ShardWriter(base / "stopped", shard_tokens), 0
    for document in documents:
        if total == count:
            break
        writer.add(np.array(document[: count - total], np.int64))
        writer.end_document()
        total += len(document[: count - total])
    writer.close()
    assert {n: d for n, d in sums(base / "cut").items() if n in names} == {
        n: d for n, d in sums(base / "stopped").items() if n != INDEX
    }
