"""Write one record of the spool to the tracking store; writing it twice changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, get_args

from tasks.tracking.compare_view import shared_view
from tasks.tracking.mlflow_store import Store
from tasks.tracking.spool import Record
from tasks.tracking.tracking_values import RunInput, Status, StoredRun, fit_name
from umim_core.errors import TrackingError


def replay(store: Store, record: Record) -> None:
    """Write a record.

    Raises:
        TrackingError: If the store refuses it, a file that it names is gone, its kind is unknown,
            or it lacks a field.
    """
    kind = record.get("kind")
    if not isinstance(kind, str) or kind not in _WRITERS:
        raise TrackingError(f"a record must be one of {', '.join(_WRITERS)}", kind)
    write, fields = _WRITERS[kind]
    missing = [name for name in ("pipeline", "time_ms", *fields.split()) if name not in record]
    if missing:
        raise TrackingError(f"a record of kind {kind} must have {', '.join(missing)}", record)
    write(store, {"owner": {}, **record})  # records of releases before owners belong to nobody


def _pipeline(store: Store, record: Record) -> StoredRun:
    key, name = record["pipeline"], record.get("name") or f"pipeline {record['pipeline'][:8]}"
    return store.ensure("pipeline", key, name, record["owner"], time_ms=record["time_ms"])


def _open(store: Store, record: Record) -> None:
    run = _pipeline(store, record)
    params = {} if run.status == "FINISHED" else record["params"]
    store.log(run.run_id, params=params, tags=record["tags"])
    if run.status not in ("FINISHED", "RUNNING"):
        store.set_status(run.run_id, "RUNNING", record["time_ms"])


def _named(record: Record) -> list[tuple[str, int, float]]:
    """Return the points of a record under names that the store takes."""
    return [(fit_name(name), step, value) for name, step, value in record["points"]]


def _points(store: Store, record: Record) -> None:
    store.log(_pipeline(store, record).run_id, points=_named(record), time_ms=record["time_ms"])


def _stage(store: Store, record: Record) -> None:
    parent = _pipeline(store, record).run_id
    stage, key = record["stage"], record["key"]
    tags = {"umim.stage": stage, "mlflow.parentRunId": parent, **record["tags"]}
    name = f"{stage} {key[:8]}"
    run = store.ensure("stage", key, name, record["owner"], tags, time_ms=record["time_ms"])
    # A stage shared by several pipelines has one run; each pipeline says which.
    store.log(parent, tags={f"umim.stage.{stage}.{key[:8]}": run.run_id})
    if run.status == "FINISHED":
        return
    _describe(store, run, record)
    store.log_inputs(run.run_id, [RunInput(**entry) for entry in record["inputs"]])
    store.set_status(run.run_id, "FINISHED", record["time_ms"])


def _comparison(store: Store, record: Record) -> None:
    tags = dict(record["tags"])
    if record["pipeline"] is not None:
        tags["umim.pipeline"] = _pipeline(store, record | {"name": None}).run_id
    of = record["key"], record["name"], record["owner"]
    run = store.ensure("comparison", *of, tags, time_ms=record["time_ms"])
    if run.status != "FINISHED":
        _describe(store, run, record)
        store.set_status(run.run_id, "FINISHED", record["time_ms"])
    view = shared_view({name for name, _, _ in record["points"]}, record["params"])
    if view is not None:
        store.share_view(*view)


def _describe(store: Store, run: StoredRun, record: Record) -> None:
    """Write parameters and points; their time is the run's start, so that it never changes."""
    store.log(run.run_id, record["params"], _named(record), time_ms=run.start_time_ms)


def _files(store: Store, record: Record) -> None:
    key = record.get("key")
    run = _pipeline(store, record) if key is None else _recorded_stage(store, record)
    store.log_files(run.run_id, _present(record["files"]))


def _status(store: Store, record: Record) -> None:
    status, known = record["status"], get_args(Status)
    if status not in known:
        raise TrackingError(f"a status must be one of {', '.join(known)}", status)
    run = _pipeline(store, record)
    if run.status != "FINISHED":  # a later try of the same pipeline only found what there was
        store.set_status(run.run_id, status, record["time_ms"])


def _recorded_stage(store: Store, record: Record) -> StoredRun:
    run = store.find("stage", record["key"], record["owner"])
    if run is None:
        raise TrackingError("files must belong to a stage that is recorded", record["key"])
    return run


def _checkpoint(store: Store, record: Record) -> None:
    run = _recorded_stage(store, record)
    (directory,) = _present([record["directory"]])
    given = record["alias"]
    # An earlier release kept the folder's name as the alias, and gave one to every checkpoint.
    folder, alias = (given, True) if isinstance(given, str) else (record["folder"], given)
    of = record["digest"], record["backbone"]
    store.register(run.run_id, directory, folder, *of, alias=alias)


def _present(files: list[str]) -> list[Path]:
    missing = [name for name in files if not Path(name).exists()]
    if missing:
        raise TrackingError("files to be kept with a run must still be there", missing[0])
    return [Path(name) for name in files]


# How a record of a kind is written, and the fields that it must have.
_WRITERS: Final[Mapping[str, tuple[Callable[[Store, Record], None], str]]] = {
    "open": (_open, "params tags"),
    "points": (_points, "points"),
    "stage": (_stage, "stage key params points inputs tags"),
    "comparison": (_comparison, "key name params points tags"),
    "files": (_files, "files"),
    "status": (_status, "status"),
    "checkpoint": (_checkpoint, "key directory alias digest backbone"),
}
