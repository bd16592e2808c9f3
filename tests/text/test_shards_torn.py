"""Token shards that are torn, altered, or refused by the disk."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from support.processes import output_of
from support.token_artifacts import write_documents
from umim_core.errors import ArtifactError
from umim_core.text.shard_files import INDEX
from umim_core.text.shards import ShardWriter, TokenShards


def write(directory: Path) -> None:
    """Two documents in two shards: 1 2 3 4 | 5, 6 7."""
    write_documents(directory, np.arange(1, 6), np.array([6, 7]), shard_tokens=4)


def _edit(change: Callable[[dict[str, object]], object]) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        index = json.loads((directory / INDEX).read_text())
        change(index)
        (directory / INDEX).write_text(json.dumps(index))

    return apply


def _cut(name: str, count: int = 1) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        (directory / name).write_bytes((directory / name).read_bytes()[:-count])

    return apply


TOKENS = "00000-00001.tokens.npy"
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no index": (lambda d: (d / INDEX).unlink(), r"index\.json must exist"),
    "torn index": (_cut(INDEX, 9), "must be readable JSON"),
    "no json": (lambda d: (d / INDEX).write_text("{"), "must be readable JSON"),
    "other kind": (_edit(lambda i: i.update(kind="x")), "must be an index of token shards"),
    "newer": (_edit(lambda i: i.update(schema_version=2)), "schema_version: Input should be 1"),
    "list": (lambda d: (d / INDEX).write_text("[]"), "must be an index of token shards"),
    "float": (_edit(lambda i: i["shards"][0].update(tokens=4.0)), r"shards\.0\.tokens"),
    "negative": (_edit(lambda i: i["shards"][0].update(tokens=-1)), r"shards\.0\.tokens"),
    "id": (_edit(lambda i: i["shards"][0].update(max_id=2**18)), r"shards\.0\.max_id"),
    "twice": (_edit(lambda i: i["shards"].append(i["shards"][0])), "once and in order"),
    "order": (_edit(lambda i: i["shards"].reverse()), "once and in order"),
    "more tokens": (_edit(lambda i: i["shards"][1].update(tokens=4)), "must have 144 bytes; got"),
    "no shard": (lambda d: (d / TOKENS).unlink(), rf"{TOKENS} must exist, for the index names it"),
    "torn shard": (_cut(TOKENS), rf"{TOKENS} must have 140 bytes; got 139"),
    "torn ends": (_cut("00000-00001.documents.npy"), "must have 144 bytes; got 143"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_directory_is_refused_when_it_is_opened(tmp_path: Path, case: str) -> None:
    write(tmp_path)
    break_it, message = BROKEN[case]
    break_it(tmp_path)
    with pytest.raises(ArtifactError, match=message):
        TokenShards.open(tmp_path)


def _other_array(name: str, array: np.ndarray) -> Callable[[Path], None]:
    """Write another array padded or cut to the size that the index gives the file."""

    def apply(directory: Path) -> None:
        size = (directory / name).stat().st_size
        np.save(directory / name, array)
        with (directory / name).open("r+b") as stream:
            stream.truncate(size)

    return apply


LENGTHS = "00000-00001.documents.npy"
ALTERED = {
    "type": (_other_array(TOKENS, np.zeros(3, np.float32)), "3 values of type int32; got shape"),
    "shape": (_other_array(TOKENS, np.zeros((3, 1), np.int32)), r"got shape \(3, 1\)"),
    "noise": (lambda d: (d / TOKENS).write_bytes(b"x" * 140), r"must be an \.npy array"),
    "id": (_other_array(TOKENS, np.array([1, 2, 99], np.int32)), r"0\.\.7; got ids from 1 to 99"),
    "minus": (_other_array(TOKENS, np.array([1, 2, -1], np.int32)), r"0\.\.7; got ids from -1"),
}


@pytest.mark.parametrize("case", ALTERED)
def test_an_altered_shard_is_refused_when_it_is_read(tmp_path: Path, case: str) -> None:
    write(tmp_path)
    break_it, message = ALTERED[case]
    break_it(tmp_path)
    shards = TokenShards.open(tmp_path)
    assert shards[:4].tolist() == [1, 2, 3, 4], "the shard before it is whole"
    with pytest.raises(ArtifactError, match=message):
        shards[4:]


@pytest.mark.parametrize("lengths", [[-1, 2], [2, 9], [1, 1]])
def test_altered_document_lengths_are_refused(tmp_path: Path, lengths: list[int]) -> None:
    write(tmp_path)
    _other_array(LENGTHS, np.array(lengths, np.int64))(tmp_path)
    with pytest.raises(ArtifactError, match=r"must divide 3 tokens|must end with the last"):
        TokenShards.open(tmp_path).document_ends()


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
import numpy as np
from umim_core.errors import ArtifactError
from umim_core.text.shards import ShardWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
writer = ShardWriter(Path(sys.argv[1]), 1024)
try:
    for _ in range(3):
        writer.add(np.zeros(1024, np.int32))
except ArtifactError as error:
    print(error)
"""


def test_a_disk_that_refuses_is_an_error_with_path_and_bytes(tmp_path: Path) -> None:
    message = output_of(sys.executable, "-c", FULL_DISK, tmp_path)
    assert "00000-00000.tokens.npy (4224 bytes) must be writable; got File too large" in message
    assert list(tmp_path.iterdir()) == [], "nothing half-written stays"


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match="must be writable; got Not a directory"):
        ShardWriter(tmp_path / "file" / "shards")
