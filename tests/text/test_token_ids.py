from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from support.pickle_bomb import PickleBomb, write_bomb
from umim_core.errors import CorpusError
from umim_core.text.sources import TokenIds
from umim_core.text.tokens import iter_token_ids


def read_ids(path: str) -> list[int]:
    return [int(i) for chunk in iter_token_ids(TokenIds(path=path)) for i in chunk]


def save(path: Path, array: np.ndarray) -> str:
    np.save(path, array, allow_pickle=True)
    return str(path)


@pytest.mark.parametrize("dtype", ["u1", "<u2", ">u2", "u4", "u8"])
def test_unsigned_ids_are_used_as_they_are(tmp_path: Path, dtype: str) -> None:
    ids = np.array([0, 5, 255, 7], dtype=dtype)
    chunks = list(iter_token_ids(TokenIds(path=save(tmp_path / "a.npy", ids))))
    assert np.concatenate(chunks).tolist() == [0, 5, 255, 7]
    assert all(chunk.dtype == np.int32 for chunk in chunks)


def test_ids_longer_than_a_chunk_come_whole(tmp_path: Path) -> None:
    ids = (np.arange(2**20 + 3) % 2**18).astype(np.uint32)
    chunks = list(iter_token_ids(TokenIds(path=save(tmp_path / "a.npy", ids))))
    assert len(chunks) == 2
    assert np.array_equal(np.concatenate(chunks), ids)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([1, 2]), r"unsigned integer type; got shape \(2,\), dtype int64"),
        (np.zeros((2, 3), np.uint16), r"shape \(2, 3\), dtype uint16"),
        (np.zeros(0, np.uint16), r"shape \(0,\)"),
        (np.array([2**64 - 1], np.uint64), "got 18446744073709551615 at position 0"),
    ],
)
def test_arrays_that_are_no_token_ids_are_refused(
    tmp_path: Path, array: np.ndarray, message: str
) -> None:
    with pytest.raises(CorpusError, match=message):
        read_ids(save(tmp_path / "a.npy", array))


@pytest.mark.parametrize("how", ["raw", "array"])
def test_a_pickle_named_npy_is_refused_and_not_run(tmp_path: Path, how: str) -> None:
    mark, path = tmp_path / "ran", tmp_path / "a.npy"
    payload = PickleBomb(mark)
    write_bomb(path, payload, how)
    with pytest.raises(CorpusError, match="plain integers"):
        read_ids(str(path))
    assert not mark.exists()
    # The payload works: had it been loaded, the mark would be there.
    pickle.loads(pickle.dumps(payload))  # noqa: S301
    assert mark.exists()


@pytest.mark.parametrize("keep", [0, 5, 40, -1])
def test_a_torn_npy_file_is_refused(tmp_path: Path, keep: int) -> None:
    path = Path(save(tmp_path / "a.npy", np.arange(100, dtype=np.uint16)))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CorpusError, match=r"a\.npy: token ids must be a whole \.npy file"):
        read_ids(str(path))


def test_a_missing_npy_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="No such file or directory"):
        read_ids(str(tmp_path / "a.npy"))
