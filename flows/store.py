"""``python -m flows store``: artifacts in object storage, listed, checked, fetched and cleaned."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from umim_core.cli.console_output import JsonFlag, emit
from umim_core.errors import ArtifactError

app = typer.Typer(no_args_is_help=True, help="Work on the object storage that UMIM_ROOT names.")
_GIB = 1 << 30


@app.command()
def ls(as_json: JsonFlag = False) -> None:
    """List the finished stages: size, age, and the checkpoints that they hold."""
    from tasks.run.store_commands import listed, stored_root

    rows = listed(stored_root())
    lines = [
        f"{row.name[:40]:<40} {row.size / _GIB:9.3f} GiB {row.days:7.1f} days"
        f"  {', '.join(row.checkpoints)}".rstrip()
        for row in rows
    ]
    emit({"stages": [asdict(row) for row in rows]}, lines or ["nothing is stored"], as_json)


@app.command()
def verify(
    read: Annotated[
        bool, typer.Option("--read", help="Read every file and compare its SHA-256, too.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Check that every file of every stage is there, with its size; exit status 1 if not."""
    from tasks.run.store_commands import stored_root
    from tasks.run.store_commands import verify as check

    remote = stored_root()
    wrong = check(remote, read=read)
    emit({"wrong": wrong}, wrong or ["all files are there"], as_json)
    if wrong:
        raise ArtifactError(
            f"{remote} must hold every file of its stages",
            f"{len(wrong)} that are missing or altered",
            "Remove those stages with `flows store rm` and run their recipes again.",
        )


@app.command()
def rm(
    stage: Annotated[
        str, typer.Argument(help="<stage>/<first digits of its key>, as `flows store ls` shows.")
    ],
    as_json: JsonFlag = False,
) -> None:
    """Remove one stage, and its files that are damaged; `gc` removes the others."""
    from tasks.run.store_commands import remove, stored_root

    name = remove(stored_root(), stage)
    emit({"removed": name}, [f"removed {name}"], as_json)


@app.command()
def gc(
    older_than: Annotated[float, typer.Option(help="Days since a stage was stored.")],
    as_json: JsonFlag = False,
) -> None:
    """Remove old stages that no named checkpoint was made from, and files that nothing names."""
    from tasks.run.store_commands import collect, stored_root

    done = collect(stored_root(), older_than)
    line = f"removed {len(done.stages)} stages, {done.objects} files, {done.size / _GIB:.3f} GiB"
    emit(asdict(done), [line], as_json)


@app.command()
def fetch(
    checkpoint: Annotated[str, typer.Argument(help="Name of a checkpoint, as `ls` shows.")],
    as_json: JsonFlag = False,
) -> None:
    """Bring a named checkpoint here; print its directory."""
    from tasks.run.store_commands import stored_root
    from umim_core.checkpoint.checkpoint_index import artifact_root, own_checkpoint
    from umim_core.errors import did_you_mean
    from umim_core.store.locking import directory_lock

    remote = stored_root()
    stages = remote.checkpoint_stages()
    if checkpoint not in stages:
        raise ArtifactError(
            f"a checkpoint of {remote} must be named",
            checkpoint,
            did_you_mean(checkpoint, list(stages)) or "`python -m flows store ls` lists them.",
        )
    remote.fetch_records()
    name = stages[checkpoint]
    final = artifact_root() / name
    final.parent.mkdir(parents=True, exist_ok=True)
    with directory_lock(final, wait_seconds=None):
        remote.fetch(name, final)
    path: Path | None = own_checkpoint(checkpoint)
    emit({"path": str(path)}, [str(path)], as_json)
