"""The stage contract: a stage is a function of its configuration and its inputs, built once.

A stage's key is the SHA-256 of its name, version, configuration and input digests; it is built once
(``store.publication``) as ``<root>/<stage>/<key>``. Asking for a finished stage executes nothing.
Times, host facts and versions live in the manifest, outside the digest. A found stage is read whole
and held against its manifest, within ``verifying_once`` at its first use only.
"""

from __future__ import annotations

import logging
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from tasks.storage.remote_root import remote_root
from umim_core.checkpoint.checkpoint_index import artifact_root
from umim_core.errors import ArtifactError
from umim_core.progress import current_label
from umim_core.store.artifacts import (
    canonical_json,
    digest_of,
    read_manifest,
    safe_join,
    sha256_bytes,
)
from umim_core.store.disk import refusals_named
from umim_core.store.locking import computing, directory_lock
from umim_core.store.publication import STATE, build_once
from umim_core.training.train_state import last_step

logger = logging.getLogger("umim.stage")
STAGE_SCHEMA: Final = 1
_REMEDY: Final = "Free space or set UMIM_ROOT to another place, then run the same command again."
_LIBRARIES: Final = ("umim", "torch", "transformers", "tokenizers", "numpy", "ray", "deepspeed")
Metrics = dict[str, float]
_verified: ContextVar[set[Path] | None] = ContextVar("verified", default=None)


@dataclass(frozen=True)
class Artifact:
    """A finished stage: what tasks hand to one another."""

    stage: str  # its name
    key: str  # SHA-256 of what it was made from
    path: Path
    digest: str  # SHA-256 of what it holds
    executed: bool  # whether this process built it just now; else it was found

    def manifest(self) -> dict[str, Any]:
        """Return the stage's manifest (configuration, inputs, metrics, facts)."""
        return read_manifest(self.path, kind="stage", schema=STAGE_SCHEMA, verify=False)

    def file_digest(self, name: str) -> str:
        """Return the SHA-256 of one file, for stages that depend on that file alone."""
        return str(self.manifest()["files"][name]["sha256"])

    def folder_digest(self, name: str) -> str:
        """Return the SHA-256 of one folder, for stages that depend on that folder alone."""
        files = self.manifest()["files"].items()
        prefix = f"{name}/"
        sums = {
            file[len(prefix) :]: entry["sha256"] for file, entry in files if file.startswith(prefix)
        }
        if not sums:
            raise ArtifactError(
                f"{self.path} must hold a folder {name!r}", "none", "Build the artifact again."
            )
        return digest_of(sums)

    @property
    def metrics(self) -> Metrics:
        """The numbers the stage recorded."""
        return dict(self.manifest()["metrics"])


@dataclass(frozen=True)
class StageSpec:
    """Identity of a stage: name, version, configuration and inputs."""

    name: str
    version: int
    config: Mapping[str, object]
    inputs: Mapping[str, str]
    resumable: bool = False
    machine: Callable[[], AbstractContextManager[None]] = computing

    @property
    def key(self) -> str:
        """SHA-256 of name, version, configuration and input digests."""
        parts = [self.name, self.version, dict(self.config), dict(sorted(self.inputs.items()))]
        return sha256_bytes(canonical_json(parts).encode())


@contextmanager
def verifying_once() -> Iterator[None]:
    """Verify the files of every artifact at most once while the block runs."""
    token = _verified.set(set())
    try:
        yield
    finally:
        _verified.reset(token)


def run_stage(root: Path, spec: StageSpec, build: Callable[[Path], Metrics]) -> Artifact:
    """Return the artifact of a stage, building it if it does not exist.

    A second launch of the same stage waits for the first and then finds it.
    """
    name = f"{spec.name}/{spec.key}"
    final = safe_join(root, name)
    remote = remote_root() if root.resolve() == artifact_root() else None
    if remote is None:
        return _local(final, spec, build)
    fetching = directory_lock(final.with_name(f"{final.name}.fetch"), wait_seconds=None)
    with refusals_named(final, _REMEDY), fetching:
        if not remote.fetch(name, final):
            artifact = _local(final, spec, build)
            if remote.publish(name, final):
                return artifact
            remote.fetch(name, final)  # another builder was first, its result counts
        return _local(final, spec, build)


def _local(final: Path, spec: StageSpec, build: Callable[[Path], Metrics]) -> Artifact:
    """Return the artifact of a stage from its directory, building it if there is none."""
    verified = _verified.get()

    def look(directory: Path) -> Mapping[str, object]:
        new = verified is None or final not in verified
        manifest = read_manifest(directory, kind="stage", schema=STAGE_SCHEMA, verify=new)
        if verified is not None:
            verified.add(final)
        return manifest

    def fill(out: Path) -> dict[str, object]:
        logger.info("%s: %s", spec.name, _beginning(out, spec.key[:12]))
        began = time.monotonic()
        with spec.machine():
            metrics = build(out)
        return {
            "stage": spec.name,
            "version": spec.version,
            "config": dict(spec.config),
            "inputs": dict(spec.inputs),
            "metrics": metrics,
            "facts": _facts(time.monotonic() - began),
        }

    built = build_once(
        final,
        spec.key,
        fill,
        kind="stage",
        schema=STAGE_SCHEMA,
        look=look,
        resumable=spec.resumable,
        rebuild="torn",
        remedy=_REMEDY,
    )
    if built.executed:
        seconds = built.record["facts"]["seconds"]
        logger.info("%s: built in %.1f s%s", spec.name, seconds, _of())
    else:
        logger.info("%s: found %s", spec.name, spec.key[:12])
    return Artifact(spec.name, spec.key, final, str(built.record["digest"]), built.executed)


def _beginning(partial: Path, key: str) -> str:
    """Say whether a build begins or goes on."""
    step = last_step(partial / STATE)
    if step is not None:
        return f"resuming at step {step}"
    return f"resuming {key}" if any(partial.iterdir()) else f"building {key}{_of()}"


def _of() -> str:
    """Return what the stage works on, for its log lines."""
    label = current_label()
    return f", {label}" if label else ""


def _facts(seconds: float) -> dict[str, object]:
    return {
        "seconds": round(seconds, 3),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _LIBRARIES},
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def time_lines(artifacts: Sequence[Artifact], elapsed: float, at_a_time: int) -> list[str]:
    """Return a table of what was built in a run, the longest first; nothing if nothing was."""
    seconds = defaultdict[str, list[float]](list)
    for artifact in artifacts:
        if artifact.executed:
            seconds[artifact.stage].append(float(artifact.manifest()["facts"]["seconds"]))
    if not seconds:
        return []
    ordered = sorted(seconds.items(), key=lambda item: -sum(item[1]))
    lines = [
        f"{name:<18}{built:>5}{took:>9}"
        for name, built, took in (
            ("stage", "built", "seconds"),
            *((name, len(times), f"{sum(times):.0f}") for name, times in ordered),
        )
    ]
    total = sum(map(sum, seconds.values()))
    side_by_side = f"; up to {at_a_time} stages at a time, together {total:.0f} s"
    shared = side_by_side if at_a_time > 1 else ""
    return [*lines, f"elapsed: {elapsed:.0f} s{shared}"]
