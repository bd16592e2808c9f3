"""Array files: mapped read-only, nothing but arrays opened, written whole or not at all."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from umim_core.errors import ArtifactError
from umim_core.store.arrays import open_array, save_array


@pytest.mark.parametrize("shape", [(0,), (5,), (2, 3), ()])
def test_an_array_comes_back_read_only(tmp_path: Path, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape, dtype=int), dtype=np.int32).reshape(shape)
    np.save(tmp_path / "x.npy", array, allow_pickle=False)
    found = open_array(tmp_path / "x.npy")
    assert type(found) is np.ndarray
    assert (found.dtype, found.shape, found.tolist()) == (array.dtype, shape, array.tolist())
    assert not found.flags.writeable


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"x\.npy must be an \.npy array; got .*No such file"):
        open_array(tmp_path / "x.npy")


@pytest.mark.parametrize("cut", [0, 5, 9, 40, 127, 130])
def test_a_torn_file_is_refused(tmp_path: Path, cut: int) -> None:
    np.save(tmp_path / "x.npy", np.arange(9), allow_pickle=False)
    (tmp_path / "x.npy").write_bytes((tmp_path / "x.npy").read_bytes()[:cut])
    with pytest.raises(ArtifactError, match=r"must be an \.npy array"):
        open_array(tmp_path / "x.npy")


def _declare(shape: str) -> bytes:
    header = f"{{'descr': '<u8', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(640)


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize(
    "content",
    [
        b"PK\x03\x04 an archive",
        _declare(f"({1 << 60},)"),
        _declare(f"({1 << 70},)"),
        _declare("(5"),
        _declare("(5,), 7: 8"),
        b"\x93NUMPY\x01\x00\xff\xffshort",
    ],
)
def test_a_file_that_is_no_array_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.npy").write_bytes(content)
    with pytest.raises(ArtifactError, match=r"x\.npy must be an \.npy array"):
        open_array(tmp_path / "x.npy")


def test_objects_and_archives_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "archive.npz", a=np.arange(3))
    for name in ("objects.npy", "archive.npz"):
        with pytest.raises(ArtifactError, match=r"must be an \.npy array"):
            open_array(tmp_path / name)


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64, np.uint64, np.float32, np.bool_])
@pytest.mark.parametrize("shape", [(0,), (7,), (3, 4), (2, 0)])
def test_the_bytes_are_those_of_numpy(
    tmp_path: Path, dtype: type[np.generic], shape: tuple[int, ...]
) -> None:
    array = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    np.save(tmp_path / "numpy.npy", array)
    save_array(tmp_path / "ours.npy", array)
    assert (tmp_path / "ours.npy").read_bytes() == (tmp_path / "numpy.npy").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["numpy.npy", "ours.npy"]


def test_a_file_that_cannot_be_written_is_named_with_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ArtifactError, match=r"file/a\.npy \(152 bytes\) must be writable; got Not a directory"
    ):
        save_array(tmp_path / "file" / "a.npy", np.zeros(3))
