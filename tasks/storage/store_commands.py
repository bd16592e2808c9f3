"""``python -m flows store``: artifacts in object storage, listed, checked, fetched and cleaned."""

from __future__ import annotations

import time
from typing import Annotated, Final

import typer

from tasks.storage.remote_root import RemoteRoot, fetching, modified, remote_root
from umim_core.checkpoint.checkpoint_index import artifact_root, own_checkpoint
from umim_core.cli.console_output import JsonFlag, emit
from umim_core.cli.documented import command
from umim_core.errors import ArtifactError, ConfigError, did_you_mean, require
from umim_core.store.artifacts import MANIFEST, safe_join
from umim_core.store.disk import write_bytes

app = typer.Typer(no_args_is_help=True, help="Work on the object storage that UMIM_ROOT names.")
_GIB: Final = 1 << 30
_DAY: Final = 86_400.0
_CLOCK_SECONDS: Final = 3600.0  # by which the clocks of storage and machine may differ


def _stored_root() -> RemoteRoot:
    remote = remote_root()
    if remote is None:
        rule = "`flows store` works on object storage"
        found = "UMIM_ROOT is a directory or not set"
        remedy = "Set UMIM_ROOT=s3://bucket/prefix; a local root is read with ls and rm."
        raise ConfigError(rule, found, remedy)
    return remote


@app.command()
def ls(as_json: JsonFlag = False) -> None:
    """List the finished stages: size, age, and the checkpoints that they hold."""
    remote = _stored_root()
    checkpoints = remote.checkpoint_stages()
    stages, lines = [], []
    for name, objects in remote.stages().items():
        if MANIFEST in objects:
            size = sum(entry["size"] for entry in objects.values())
            days = max(0.0, time.time() - modified(objects[MANIFEST])) / _DAY
            named = [called for called, stage in checkpoints.items() if stage == name]
            row = {"name": name, "size": size, "files": len(objects) - 1, "days": days}
            stages.append(row | {"checkpoints": named})
            line = f"{name[:40]:<40} {size / _GIB:9.3f} GiB {days:7.1f} days  {', '.join(named)}"
            lines.append(line.rstrip())
    emit({"stages": stages}, lines or ["nothing is stored"], as_json)


@app.command()
@command
def verify(read: bool = False, as_json: JsonFlag = False) -> None:
    """Check that every file of every stage is there, with its size; exit status 1 if not.

    Options:
        read: Read every file and compare its SHA-256, too.
    """
    remote = _stored_root()
    wrong = []
    for name, objects in remote.stages().items():
        if MANIFEST not in objects:
            continue
        try:
            manifest = remote.manifest(name)
        except ArtifactError as error:
            wrong.append(f"{name}: {error}")
            continue
        for file, entry in manifest.files.items():
            size = objects.get(f"{manifest.digest}/{file}", {}).get("size", "none")
            if size != entry.size:
                wrong.append(f"{name}: {file} must have {entry.size} bytes; {size} are there")
            elif read and entry.sha256 != remote.sha256(f"stages/{name}/{manifest.digest}/{file}"):
                wrong.append(f"{name}: {file} has another SHA-256")
    emit({"wrong": wrong}, wrong or ["all files are there"], as_json)
    rule = f"{remote.address} must hold every file of its stages"
    remedy = "Remove those stages with `flows store rm` and run their recipes again."
    require(not wrong, ArtifactError, rule, f"{len(wrong)} that are missing or altered", remedy)


@app.command()
@command
def rm(stage: str, as_json: JsonFlag = False) -> None:
    """Remove one stage.

    Options:
        stage: <stage>/<first digits of its key>, as `flows store ls` shows.
    """
    remote = _stored_root()
    names = [name for name in remote.stages() if name.startswith(stage)]
    rule = "one stage must be named, as <stage>/<first digits of its key>"
    found = f"{stage!r}, which {len(names)} stages begin with"
    remedy = "`python -m flows store ls` lists them."
    require(len(names) == 1 and "/" in stage, ArtifactError, rule, found, remedy)
    stages = {holder: called for called, holder in remote.checkpoint_stages().items()}
    called = stages.get(names[0])
    rule, found = "a stage with a named checkpoint stays", f"{names[0]}, checkpoint {called}"
    remedy = f"Remove checkpoints/{called}.json under {remote.address} first."
    require(called is None, ArtifactError, rule, found, remedy)
    remote.remove_folder(f"stages/{names[0]}")
    emit({"removed": names[0]}, [f"removed {names[0]}"], as_json)


@app.command()
@command
def gc(older_than: Annotated[float, typer.Option()], as_json: JsonFlag = False) -> None:
    """Remove old stages without a named checkpoint, and what killed runs left.

    Ages are by the storage's clock, which this machine's must confirm. An upload that is not
    finished is left alone for a day, as it may be under way.

    Options:
        older_than: Days since a stage was stored.
    """
    require(older_than >= 0, ConfigError, "--older-than must be at least 0 days", older_than)
    remote = _stored_root()
    now, named = remote.now(), set(remote.checkpoint_stages().values())
    apart = now - time.time()
    rule = f"the clocks of this machine and of {remote.address} must agree, since ages decide"
    found, remedy = f"{apart:.0f} s between them", "Set the clock that is wrong."
    require(abs(apart) < _CLOCK_SECONDS, ArtifactError, rule, found, remedy)
    removed, size = [], 0
    for name, objects in remote.stages().items():
        days = older_than if MANIFEST in objects else max(1.0, older_than)
        if name not in named and now - max(map(modified, objects.values())) >= days * _DAY:
            remote.remove_folder(f"stages/{name}")
            removed.append(name)
            size += sum(entry["size"] for entry in objects.values())
    line = f"removed {len(removed)} stages, {size / _GIB:.3f} GiB"
    emit({"stages": removed, "size": size}, [line], as_json)


@app.command()
@command
def fetch(checkpoint: str, as_json: JsonFlag = False) -> None:
    """Bring a named checkpoint here; print its directory.

    Options:
        checkpoint: Name of a checkpoint, as `ls` shows.
    """
    remote = _stored_root()
    stages = remote.checkpoint_stages()
    rule = f"a checkpoint of {remote.address} must be named"
    remedy = did_you_mean(checkpoint, list(stages)) or "`python -m flows store ls` lists them."
    require(checkpoint in stages, ArtifactError, rule, checkpoint, remedy)
    final = artifact_root() / stages[checkpoint]
    with fetching(final):
        held = remote.fetch(stages[checkpoint], final)
    rule = f"{remote.address} must hold the stage of a named checkpoint"
    remedy = "It was removed, or stored by an older version of umim: run its recipe again."
    require(held, ArtifactError, rule, f"no {stages[checkpoint]}", remedy)
    record = f"checkpoints/{checkpoint}.json"
    write_bytes(safe_join(artifact_root(), record), remote.read(record) or b"{}")
    path = str(own_checkpoint(checkpoint))
    emit({"path": path}, [path], as_json)
