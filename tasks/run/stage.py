"""The stage contract: a stage is a function of its arguments, built once.

A stage's key is the SHA-256 of its name, its version and all its arguments: values as they are,
an artifact by its digest, a name by what it stands for (``identity``). What is not to count is
named in ``free``, with the reason; facts of the place that do count are named in ``of_run``::

    @stage(version=5, resumable=True, of_run=("device", "dtype"), free={"limit": "..."})
    def sums_stage(out: Path, site: Site, *, tokens: Artifact, limit: int) -> Metrics: ...

    sums_stage(tokens=tokens, limit=3).build(site)   # <root>/sums/<key>

It is built once (``store.publication``). Asking for a finished stage executes nothing. Times, host
facts and versions live in the manifest, outside the digest. A found stage is read whole and held
against its manifest, within ``verifying_once`` at its first use only.
"""

from __future__ import annotations

import inspect
import logging
import os
import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import (
    Any,
    Concatenate,
    Final,
    Generic,
    Literal,
    ParamSpec,
    Protocol,
    runtime_checkable,
)

from pydantic import BaseModel

from tasks.cluster.lease import ClusterLease
from tasks.cluster.ray_cluster import LOCAL, cluster_address
from tasks.storage.remote_root import fetching, remote_root
from umim_core.checkpoint.checkpoint_index import artifact_root
from umim_core.config.recipe import BackboneDtype, Device
from umim_core.errors import ArtifactError, require
from umim_core.progress import current_label
from umim_core.store.artifacts import digest_of, json_digest, read_manifest, safe_join
from umim_core.store.disk import refusals_named
from umim_core.store.locking import computing
from umim_core.store.publication import STATE, build_once, last_step

logger = logging.getLogger("umim.stage")
STAGE_SCHEMA: Final = 1
_REMEDY: Final = "Free space or set UMIM_ROOT to another place, then run the same command again."
_LIBRARIES: Final = ("umim", "torch", "transformers", "tokenizers", "numpy", "ray", "deepspeed")
Metrics = dict[str, float]
P = ParamSpec("P")
_verified: ContextVar[set[Path]] = ContextVar("verified")


@dataclass(frozen=True)
class Site:
    """Artifact root, cluster, and the data type of backbones that are measured."""

    root: Path
    lease: ClusterLease
    dtype: BackboneDtype = "float32"

    @property
    def device(self) -> Device:
        return self.lease.config.device

    @property
    def workers(self) -> int:
        """Ranks of a training; this process is one."""
        return max(1, self.lease.config.workers)

    @property
    def strategy(self) -> Literal["ddp", "deepspeed"]:
        return self.lease.config.strategy

    @property
    def machine(self) -> str:
        """Where a timing will run, as far as it is known without a cluster and without CUDA.

        On this machine these are its processor and the threads: torch's own in this process, all
        cores of the cluster on a worker. Of a cluster elsewhere it is the address.
        """
        if not self.lease.calls_leave:
            import torch

            return machine_name(torch.get_num_threads())
        config = self.lease.config
        address = cluster_address(config.address)
        return address if address != LOCAL else machine_name(config.cpus or os.cpu_count() or 1)


def machine_name(threads: int) -> str:
    """Return the name of this machine's processor, and so many threads."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.is_file() else ""
    model = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    processor = model[1] if model else platform.processor() or platform.machine()
    return f"{processor}, {threads} threads"


@dataclass(frozen=True)
class Artifact:
    """A finished stage: what tasks hand to one another."""

    stage: str  # its name
    key: str  # SHA-256 of what it was made from
    path: Path
    digest: str  # SHA-256 of its files and numbers; times, host and versions do not count
    executed: bool  # whether this process built it just now; else it was found

    @classmethod
    def of(cls, path: Path, record: Mapping[str, Any], *, executed: bool = False) -> Artifact:
        digest = json_digest([record["digest"], record["metrics"]])
        return cls(record["stage"], record["key"], path, digest, executed)

    def manifest(self) -> dict[str, Any]:
        return read_manifest(self.path, kind="stage", schema=STAGE_SCHEMA, verify=False)

    def part(self, name: str) -> Part:
        """Return one file or folder, for stages that depend on that alone."""
        return Part(self, name)

    def identity(self) -> Digest:
        return Digest(self.digest)

    @property
    def metrics(self) -> Metrics:
        return dict(self.manifest()["metrics"])


class Digest(str):
    """What tells one version of an input from another: a SHA-256, a commit, a version."""


@dataclass(frozen=True)
class Part:
    """A file or a folder of an artifact."""

    artifact: Artifact
    name: str

    @property
    def path(self) -> Path:
        return self.artifact.path / self.name

    def identity(self) -> Digest:
        """Return the SHA-256 of the file, or of the folder's files by their names."""
        files = self.artifact.manifest()["files"]
        if self.name in files:
            return Digest(files[self.name]["sha256"])
        prefix = f"{self.name}/"
        inside = {n[len(prefix) :]: files[n]["sha256"] for n in files if n.startswith(prefix)}
        rule, remedy = f"{self.artifact.path} must hold {self.name!r}", "Build the artifact again."
        require(bool(inside), ArtifactError, rule, "none", remedy)
        return Digest(digest_of(inside))


@runtime_checkable
class Identified(Protocol):
    """An argument that stands in keys by something else than its fields."""

    def identity(self) -> object:
        """Return what stands for it; it may hold others."""


@dataclass(frozen=True)
class Stage(Generic[P]):
    """A function that fills a folder, and what of its arguments and place decides the result."""

    name: str  # of its folder below the root
    body: Callable[Concatenate[Path, Site, P], Metrics]  # returns what is measured
    version: int  # raised when the same arguments shall give another result
    resumable: bool
    of_run: Sequence[str]  # facts of the site that are part of the key
    free: Mapping[str, str]  # arguments, and fields of them by path, that are not, and why
    machine: Callable[[], AbstractContextManager[None]]  # lock of those that compute, or time

    def __call__(self, *args: P.args, **arguments: P.kwargs) -> StageCall:
        """Return a call that is not built yet."""
        bound = inspect.signature(self.body).bind(None, None, *args, **arguments)
        bound.apply_defaults()
        return StageCall(self, dict(list(bound.arguments.items())[2:]))


@dataclass(frozen=True)
class StageCall:
    stage: Stage[...]
    arguments: Mapping[str, Any]

    def spec(self, site: Site) -> StageSpec:
        stage, (config, inputs) = self.stage, key_parts(self.arguments, self.stage.free)
        config |= {name: getattr(site, name) for name in stage.of_run}
        return StageSpec(
            stage.name, stage.version, config, inputs, stage.resumable, machine=stage.machine
        )

    def build(self, site: Site) -> Artifact:
        return run_stage(
            site.root, self.spec(site), lambda out: self.stage.body(out, site, **self.arguments)
        )


def stage(
    *,
    version: int,
    resumable: bool = False,
    of_run: Sequence[str] = (),
    free: Mapping[str, str] | None = None,
    machine: Callable[[], AbstractContextManager[None]] = computing,
) -> Callable[[Callable[Concatenate[Path, Site, P], Metrics]], Stage[P]]:
    """Make ``<name>_stage(out, site, *, ...)`` a stage; see :class:`Stage`."""

    def made(body: Callable[Concatenate[Path, Site, P], Metrics]) -> Stage[P]:
        name = body.__name__.removesuffix("_stage").replace("_", "-")
        return Stage(name, body, version, resumable, of_run, free or {}, machine)

    return made


def key_parts(
    arguments: Mapping[str, object], free: Mapping[str, str]
) -> tuple[dict[str, object], dict[str, str]]:
    """Return the values of arguments, without what is free, and the digests among them by path."""
    inputs: dict[str, str] = {}

    def members(named: Mapping[str, object], above: str) -> dict[str, object]:
        values = {}
        for name, value in named.items():
            path = above + name
            if path not in free and not isinstance(plain := plain_value(value, path), Digest):
                values[name] = plain
        return values

    def plain_value(value: object, path: str) -> object:
        if isinstance(value, Digest):
            inputs[path] = str(value)
            return value
        if value is None or isinstance(value, str | int | float):
            return value  # most are: whether one is Identified takes far longer to say
        if isinstance(value, Identified):
            return plain_value(value.identity(), path)
        if isinstance(value, BaseModel):
            return plain_value(value.model_dump(mode="json"), path)  # which leaves out credentials
        if is_dataclass(value) and not isinstance(value, type):
            return plain_value(
                {field.name: getattr(value, field.name) for field in fields(value)}, path
            )
        if isinstance(value, Mapping):
            named = {k if isinstance(k, str) else " | ".join(k): v for k, v in value.items()}
            return members(named, f"{path}.")
        if isinstance(value, list | tuple):
            return list(members({str(n): v for n, v in enumerate(value)}, f"{path}.").values())
        raise TypeError(f"{path}: a stage's key cannot hold {value!r}; say what it stands for")

    return members(arguments, ""), inputs


@dataclass(frozen=True)
class StageSpec:
    name: str
    version: int
    config: Mapping[str, object]
    inputs: Mapping[str, str]
    resumable: bool = False
    machine: Callable[[], AbstractContextManager[None]] = computing

    @property
    def key(self) -> str:
        parts = [self.name, self.version, dict(self.config), dict(sorted(self.inputs.items()))]
        return json_digest(parts)


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
    verified = _verified.get(set())
    if remote is None or final in verified:
        return _local(final, spec, build)
    with refusals_named(final, _REMEDY), fetching(final):
        if not remote.fetch(name, final):
            artifact = _local(final, spec, build)
            if remote.publish(name, final):
                return artifact
            remote.fetch(name, final)  # another builder was first, its result counts
        verified.add(final)  # by the fetch
        return _local(final, spec, build)


def _local(final: Path, spec: StageSpec, build: Callable[[Path], Metrics]) -> Artifact:
    """Return the artifact of a stage from its directory, building it if there is none."""
    verified, label = _verified.get(set()), current_label()
    of = f", {label}" if label else ""  # what the stage works on

    def look(directory: Path) -> Mapping[str, object]:
        new = final not in verified
        manifest = read_manifest(directory, kind="stage", schema=STAGE_SCHEMA, verify=new)
        verified.add(final)
        return manifest

    def fill(out: Path) -> dict[str, object]:
        begins = f"building {spec.key[:12]}{of}"
        if any(out.iterdir()):
            step = last_step(out / STATE)
            begins = f"resuming {spec.key[:12] if step is None else f'at step {step}'}"
        logger.info("%s: %s", spec.name, begins)
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
        logger.info("%s: built in %.1f s%s", spec.name, seconds, of)
    else:
        logger.info("%s: found %s", spec.name, spec.key[:12])
    return Artifact.of(final, built.record, executed=built.executed)


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
