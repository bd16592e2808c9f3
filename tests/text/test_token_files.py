"""Token files: round trips, document borders, slices, cuts, and everything that can be torn."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.processes import output_of
from umim_core.errors import ArtifactError, ConfigError
from umim_core.text.token_ids import TokenPiece
from umim_core.text.tokens import INDEX, TokenFiles, cut_part, write_index, write_part, write_tokens

Documents = list[list[int]]
DOCUMENTS = st.lists(st.lists(st.integers(0, 2**18 - 1), max_size=9), max_size=9)


def pieces(documents: Documents, size: int = 3) -> Iterator[TokenPiece]:
    for document in documents:
        for start in range(0, len(document), size):
            yield np.array(document[start : start + size], np.int64), False
        yield np.zeros(0, np.int64), True


def write(directory: Path, *parts: Documents, size: int = 3) -> TokenFiles:
    written = [write_part(directory, pieces(part, size), i) for i, part in enumerate(parts)]
    write_index(directory, written)
    return TokenFiles.open(directory)


def sums(directory: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in directory.iterdir()}


@given(
    parts=st.lists(DOCUMENTS, max_size=4),
    size=st.integers(1, 5),
    start=st.none() | st.integers(-40, 40),
    stop=st.none() | st.integers(-40, 40),
)
def test_documents_survive_the_disk_and_slices_are_those_of_the_array(
    tmp_path_factory: pytest.TempPathFactory,
    parts: list[Documents],
    size: int,
    start: int | None,
    stop: int | None,
) -> None:
    files = write(tmp_path_factory.mktemp("tokens"), *parts, size=size)
    documents = list(chain.from_iterable(parts))
    flat = list(chain.from_iterable(documents))
    ends = np.cumsum([len(document) for document in documents], dtype=np.int64)
    assert files[:].tolist() == flat
    assert files[start:stop].tolist() == flat[start:stop]
    assert files.document_ends().tolist() == ends.tolist()
    assert (files[:].dtype, files.document_ends().dtype) == (np.int32, np.int64)
    found = len(files), files.num_documents, files.max_id
    assert found == (len(flat), len(documents), max(flat, default=-1))
    with pytest.raises(ConfigError, match="sliced without a step"):
        files[::2]


def test_a_long_slice_is_a_view_and_short_ones_that_are_kept_hold_no_file(tmp_path: Path) -> None:
    many = (1 << 20) + 1
    files = write_tokens(tmp_path, [(np.zeros(many, np.int32), True)])
    whole = files[:]
    assert not whole.flags.owndata and not whole.flags.writeable
    before = psutil.Process().num_fds()
    kept = [files[at : at + 2] for at in range(300)]
    assert len(kept) == 300 and psutil.Process().num_fds() == before


def test_threads_share_token_files(tmp_path: Path) -> None:
    files = write(tmp_path, [[0, 1, 2]], [[3, 4, 5, 6]])
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda _: [files[at : at + 2].tolist() for at in range(6)], range(200))
        assert all(slices == [[at, at + 1] for at in range(6)] for slices in found)


def test_the_same_tokens_give_the_bytes_of_numpy_in_any_pieces(tmp_path: Path) -> None:
    documents = [[1, 2, 3, 4, 5, 6, 7], [], [8]]
    for size in (1, 2, 7):
        write(tmp_path / str(size), documents, size=size)
    assert sums(tmp_path / "1") == sums(tmp_path / "2") == sums(tmp_path / "7")
    names = ["00000.ends.npy", "00000.tokens.npy", INDEX]
    assert sorted(sums(tmp_path / "1")) == names
    for name, values in zip(names, ([7, 7, 8], range(1, 9)), strict=False):
        assert np.load(tmp_path / "1" / name).tolist() == list(values)


@given(documents=DOCUMENTS, data=st.data())
def test_a_cut_part_is_one_that_was_written_with_that_limit(
    tmp_path_factory: pytest.TempPathFactory, documents: Documents, data: st.DataObject
) -> None:
    flat = list(chain.from_iterable(documents))
    if not flat:
        return
    base = tmp_path_factory.mktemp("tokens")
    limit = data.draw(st.integers(1, len(flat)))
    cut = cut_part(base / "cut", write_part(base / "cut", pieces(documents)), limit)
    assert cut == write_part(base / "limited", pieces(documents, 4), limit=limit)
    assert sums(base / "cut") == sums(base / "limited")
    write_index(base / "cut", [cut])
    assert TokenFiles.open(base / "cut")[:].tolist() == flat[:limit]


# Damage


def torn(directory: Path) -> None:
    """Two parts, of the documents 1 2 3 4 and 5 6 7."""
    write(directory, [[1, 2, 3, 4]], [[5], [6, 7]])


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


def _other(name: str, array: np.ndarray) -> Callable[[Path], None]:
    """Write another array padded or cut to the size that the index gives the file."""

    def apply(directory: Path) -> None:
        size = (directory / name).stat().st_size
        np.save(directory / name, array)
        with (directory / name).open("r+b") as stream:
            stream.truncate(size)

    return apply


TOKENS, ENDS = "00001.tokens.npy", "00001.ends.npy"
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no index": (lambda d: (d / INDEX).unlink(), r"index\.json must exist"),
    "torn index": (_cut(INDEX, 9), "must be readable JSON"),
    "other kind": (_edit(lambda i: i.update(kind="x")), "must be an index of token files"),
    "older": (_edit(lambda i: i.update(schema_version=1)), "schema_version: Input should be 2"),
    "list": (lambda d: (d / INDEX).write_text("[]"), "must be an index of token files"),
    "float": (_edit(lambda i: i["parts"][0].update(tokens=4.0)), r"parts\.0\.tokens"),
    "id": (_edit(lambda i: i["parts"][0].update(max_id=2**18)), r"parts\.0\.max_id"),
    "twice": (_edit(lambda i: i["parts"].append(i["parts"][0])), "once and in order"),
    "more tokens": (
        _edit(lambda i: i["parts"][1].update(tokens=4)),
        "must hold 4 values of type int32",
    ),
    "no part": (lambda d: (d / TOKENS).unlink(), rf"{TOKENS} must be .*; got .*No such file"),
    "torn part": (_cut(TOKENS), rf"{TOKENS} must be an \.npy array"),
    "torn ends": (_cut(ENDS), rf"{ENDS} must be an \.npy array"),
    "type": (_other(TOKENS, np.zeros(3, np.float32)), "must hold 3 values of type int32"),
    "shape": (_other(TOKENS, np.zeros((3, 1), np.int32)), "must hold 3 values of type int32"),
    "noise": (lambda d: (d / TOKENS).write_bytes(b"x" * 140), r"must be an \.npy array"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_folder_is_refused_when_it_is_opened(tmp_path: Path, case: str) -> None:
    torn(tmp_path)
    break_it, message = BROKEN[case]
    break_it(tmp_path)
    with pytest.raises(ArtifactError, match=message):
        TokenFiles.open(tmp_path)


ALTERED = {
    **{
        f"ids {ids}": (_other(TOKENS, np.array(ids, np.int32)), rf"in 0\.\.7; got ids from {got}")
        for ids, got in (([1, 2, 99], "1 to 99"), ([1, 2, -1], "-1 to 2"))
    },
    **{
        f"ends {ends}": (_other(ENDS, np.array(ends, np.int64)), "must rise to 3, the last token")
        for ends in ([-1, 3], [2, 9], [1, 1], [3, 1])
    },
    "type, later": (_other(TOKENS, np.zeros(3, np.float32)), TOKENS),
    "torn, later": (_cut(TOKENS), TOKENS),
}


@pytest.mark.parametrize("case", ALTERED)
def test_what_is_altered_is_refused_when_it_is_read(tmp_path: Path, case: str) -> None:
    torn(tmp_path)
    files = TokenFiles.open(tmp_path)
    change, message = ALTERED[case]
    change(tmp_path)
    assert files[:4].tolist() == [1, 2, 3, 4], "the part before it is whole"
    with pytest.raises(ArtifactError, match=message):
        files.document_ends() if "ends" in case else files[4:]


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
import numpy as np
from umim_core.errors import ArtifactError
from umim_core.text.tokens import write_part
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))
try:
    write_part(Path(sys.argv[1]), ((np.zeros(1024, np.int32), False) for _ in range(9)))
except ArtifactError as error:
    print(error)
"""


def test_a_disk_that_refuses_is_an_error_with_path_and_bytes(tmp_path: Path) -> None:
    message = output_of(sys.executable, "-c", FULL_DISK, tmp_path)
    assert "00000.tokens.npy (" in message and "must be writable; got File too large" in message
    assert list(tmp_path.iterdir()) == [], "nothing half-written stays"


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match="must be writable; got Not a directory"):
        write_tokens(tmp_path / "file" / "tokens", pieces([[1]]))
