"""Artifacts in object storage: one winner, whole or absent, found by the next machine."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from support.processes import run_command
from support.s3 import Machine, environment, forget_servers, s3_server
from tasks.run.stage import Artifact, StageSpec, run_stage
from tasks.storage import remote_root as module
from tasks.storage.remote_root import RemoteRoot
from tasks.storage.store_commands import app
from umim_core.checkpoint.checkpoint_index import artifact_root, record_checkpoint
from umim_core.errors import ArtifactError, ConfigError, LockError
from umim_core.store.artifacts import write_manifest
from umim_core.store.locking import directory_lock

SPEC = StageSpec("count", 1, {"tau": 5}, {"tokens": "a" * 64})
NAME = f"count/{SPEC.key}"


# A stage of three files; where it is asked to, its process is killed once the first is uploaded.
PROCESS = """
import os, signal, sys
from tasks.run.stage import StageSpec, run_stage
from tasks.storage.remote_root import RemoteRoot
from umim_core.checkpoint.checkpoint_index import artifact_root

put = RemoteRoot._put
def first_only(self, files, folder):
    name = sorted(files)[0]
    put(self, {name: files[name]}, folder)
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "dies":
    RemoteRoot._put = first_only

def build(out):
    for name in ("a", "b", "c"):
        (out / f"{name}.txt").write_text(name * 1000)
    return {"size": 3.0}

spec = StageSpec("count", 1, {"tau": 5}, {"tokens": "a" * 64})
artifact = run_stage(artifact_root(), spec, build)
print(artifact.digest, artifact.executed, flush=True)
"""


@pytest.fixture(scope="module", params=["moto", pytest.param("seaweedfs", marks=pytest.mark.full)])
def server(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    with s3_server(request.param) as settings:
        forget_servers()
        yield settings
        forget_servers()


@pytest.fixture
def machine(server: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Make this process a machine with a scratch folder of its own, on one storage a test."""

    def become(name: str) -> RemoteRoot:
        wanted = environment(server, tmp_path.name, str(tmp_path / name))
        for key in (*server, "UMIM_ROOT", "UMIM_SCRATCH"):
            monkeypatch.setenv(key, wanted[key])
        remote = module.remote_root()
        assert remote is not None
        return remote

    return become


def run(text: str = "x", meanwhile: Callable[[], object] = lambda: None) -> Artifact:
    """Ask for a stage of one file, or of none; something else may happen while it is built."""

    def build(out: Path) -> dict[str, float]:
        meanwhile()
        if text:
            (out / "folder").mkdir()
            (out / "folder" / "data.txt").write_text(text)
        return {"size": 1.0}

    return run_stage(artifact_root(), SPEC, build)


def stored(remote: RemoteRoot, name: str, checkpoint: str = "") -> str:
    """Store a stage by its name, and give its folder the name of a checkpoint."""
    final = artifact_root() / name / ("0" * 64)
    (final / "checkpoint").mkdir(parents=True)
    (final / "checkpoint" / "data.txt").write_text(name)
    write_manifest(final, kind="stage", schema=1, body={})
    assert remote.publish(f"{name}/{'0' * 64}", final)
    if checkpoint:
        record = record_checkpoint(artifact_root(), checkpoint, final / "checkpoint")
        remote.store_record(record)
    return f"{name}/{'0' * 64}"


def call(*arguments: str) -> Any:
    result = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    return json.loads(result.stdout)


@pytest.mark.parametrize("text", ["x", ""], ids=["a file", "numbers alone"])
def test_another_machine_finds_what_one_built(machine: Machine, text: str) -> None:
    machine("first")
    built = run(text)
    machine("second")
    found = run(text)
    assert built.executed and not found.executed and found.path != built.path
    assert (found.digest, found.metrics) == (built.digest, {"size": 1.0})
    for path in built.path.rglob("*"):
        if path.is_file():
            assert (found.path / path.relative_to(built.path)).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("damage", ["y", None], ids=["altered", "missing"])
def test_a_damaged_copy_is_fetched_again(machine: Machine, damage: str | None) -> None:
    machine("first")
    run()
    machine("second")
    copy = run().path / "folder" / "data.txt"
    copy.unlink() if damage is None else copy.write_text(damage)
    assert not run("another").executed and copy.read_text() == "x"


@pytest.mark.parametrize("conditional", [True, False])
def test_of_two_builders_one_counts_and_its_files_are_whole(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, conditional: bool
) -> None:
    if not conditional:  # as a server that ignores If-None-Match: the last one counts
        monkeypatch.setattr(RemoteRoot, "_create", lambda *args: RemoteRoot.write(*args) is None)

    def elsewhere() -> None:
        machine("first")
        run("one")
        machine("second")

    machine("second")
    ours = run("two", meanwhile=elsewhere)
    remote = machine("third")
    found = run("three")
    assert ours.executed is not conditional and not found.executed
    expected = "one" if conditional else "two"
    assert (found.path / "folder" / "data.txt").read_text() == expected
    assert (ours.path / "folder" / "data.txt").read_text() == expected
    assert len(remote.stages()[NAME]) == 3  # the manifest and both files
    assert call("verify", "--read") == {"wrong": []}


@pytest.mark.full
def test_a_kill_during_the_upload_leaves_nothing(
    server: dict[str, str], machine: Machine, tmp_path: Path
) -> None:
    def process(scratch: str, how: str) -> list[str]:
        settings = environment(server, tmp_path.name, str(tmp_path / scratch))
        done = run_command(sys.executable, "-c", PROCESS, how, **settings)
        assert done.returncode == (-signal.SIGKILL if how == "dies" else 0), done.stderr
        return done.stdout.split()

    process("first", "dies")
    remote = machine("other")
    [[left]] = remote.stages().values()
    assert left.endswith("/a.txt") and call("ls") == {"stages": []}
    assert call("gc", "--older-than", "0") == {"stages": [], "size": 0}
    digest, executed = process("first", "ends")
    assert executed == "False"  # it was whole here: only the upload was missing
    assert call("verify", "--read") == {"wrong": []}
    assert process("second", "ends") == [digest, "False"]


def altered(remote: RemoteRoot, place: str, value: object) -> None:
    remote.write(place, value if isinstance(value, bytes) else json.dumps(value).encode())


@pytest.mark.parametrize(
    "fault", ["a byte", "a size", "a missing file", "another manifest", "no manifest", "nested"]
)
def test_a_damaged_stage_is_refused_named_and_built_again_once_removed(
    machine: Machine, fault: str
) -> None:
    remote = machine("first")
    run()
    place, manifest = f"stages/{NAME}", f"stages/{NAME}/manifest.json"
    file = f"{place}/{remote.manifest(NAME).digest}/folder/data.txt"
    record = json.loads(remote.read(manifest) or b"")
    change = {
        "a byte": lambda: altered(remote, file, b"y"),
        "a size": lambda: altered(remote, file, b"xx"),
        "a missing file": lambda: remote.remove(file),
        "another manifest": lambda: altered(remote, manifest, record | {"metrics": {"size": 2.0}}),
        "no manifest": lambda: altered(remote, manifest, {"files": {"x": 3}}),
        "nested": lambda: altered(remote, manifest, b"[" * 100_000),
    }
    change[fault]()
    machine("second")
    with pytest.raises(ArtifactError, match="as it was written"):
        run()
    assert list((artifact_root() / "count").iterdir()) == []
    if fault != "another manifest":  # `ls` and `verify` read no seal
        checked = CliRunner().invoke(app, ["verify", "--read", "--json"])
        [wrong] = json.loads(checked.stdout)["wrong"]
        assert checked.exit_code == 1 and wrong.startswith(f"{NAME}: ")
    assert call("rm", NAME[:14]) == {"removed": NAME}
    machine("third")
    assert run().executed and call("verify", "--read") == {"wrong": []}


@pytest.mark.parametrize("name", ["../../outside", "/outside", "a\0b"])
def test_names_in_storage_stay_inside_the_root(machine: Machine, name: str) -> None:
    remote = machine("first")
    entry = {"bytes": 1, "sha256": "0" * 64}
    manifest = {"digest": "0" * 64, "schema": 1, "files": {name: entry}}
    altered(remote, "stages/mine/k/manifest.json", manifest)
    with pytest.raises(ArtifactError, match="must stay inside its root"):
        remote.fetch("mine/k", artifact_root() / "mine" / "k")
    altered(remote, "checkpoints/own.json", {"path": "../outside/checkpoint"})
    assert remote.checkpoint_stages() == {}
    assert sorted(path.name for path in artifact_root().parent.rglob("outside*")) == []


def test_storage_that_refuses_is_a_typed_error_without_secrets(
    server: dict[str, str], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    class AzureError(Exception):
        pass

    def refusing(_: str) -> bytes:
        raise AzureError("503")

    remote = machine("first")
    azure = SimpleNamespace(AzureError=AzureError)  # its package is not installed
    monkeypatch.setitem(sys.modules, "azure.core.exceptions", azure)
    module.refusals.cache_clear()
    other = RemoteRoot(remote.address, SimpleNamespace(cat_file=refusing))  # type: ignore[arg-type]  # one call of it
    try:
        with pytest.raises(ArtifactError, match=r"must answer, and allow .* AzureError: 503"):
            other.read("none")
    finally:
        module.refusals.cache_clear()
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("UMIM_ROOT", "s3://umim/away")
    import s3fs

    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    for endpoint in ("http://127.0.0.1:9", "no-address"):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        forget_servers()
        try:
            with pytest.raises(ArtifactError, match="s3://umim/away must answer") as caught:
                run()
        finally:
            forget_servers()
        assert server["AWS_SECRET_ACCESS_KEY"] not in str(caught.value)


def test_a_collection_removes_what_is_old_and_has_no_name(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = machine("first")
    named, other = stored(remote, "distill", "novels/wt"), stored(remote, "mine")
    altered(remote, "stages/mine/cut/0/data.txt", b"of an upload under way")
    altered(remote, f"stages/mine/{'0' * 64}.json", b"of a former version")
    nothing = {"stages": [], "size": 0}
    assert call("gc", "--older-than", "1") == nothing
    true_entry, now = module.modified, time.time()

    def dated(days: float) -> None:
        """Let all objects, and none of the clocks, be written so many days ago."""
        ago = timedelta(days=days).total_seconds()
        monkeypatch.setattr("tasks.storage.store_commands.modified", lambda e: true_entry(e) - ago)

    dated(-1)  # the storage's clock was ahead when they were written
    assert call("gc", "--older-than", "0") == nothing
    dated(0)
    for jump in (-7200, 7200, 315_360_000):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("time.time", lambda jump=jump: now + jump)
            with pytest.raises(ArtifactError, match=r"clocks of this machine and of .* must agree"):
                call("gc", "--older-than", "0")
    assert {*remote.stages()} == {named, other, "mine/cut"}
    assert call("gc", "--older-than", "0")["stages"] == [other]
    dated(1.5)
    done = call("gc", "--older-than", "1")
    assert done["stages"] == ["mine/cut"] and {*remote.stages()} == {named}
    assert remote.read(f"stages/mine/{'0' * 64}.json") is not None
    with pytest.raises(ConfigError, match="must be at least 0 days"):
        call("gc", "--older-than", "nan")
    with pytest.raises(ArtifactError, match="a stage with a named checkpoint stays"):
        call("rm", named[:16])
    with pytest.raises(ArtifactError, match="which 0 stages begin with"):
        call("rm", other)


def test_a_stage_that_is_removed_while_it_is_fetched_is_built(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(remote: RemoteRoot, folder: str, names: Collection[str], directory: Path) -> None:
        remote.remove_folder(f"stages/{NAME}")
        read(remote, folder, names, directory)

    read = RemoteRoot._get
    machine("first")
    run()
    machine("second")
    monkeypatch.setattr(RemoteRoot, "_get", get)
    assert run().executed


def test_commands_list_and_fetch_a_named_checkpoint(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = RemoteRoot.fetch

    def alone(remote: RemoteRoot, name: str, final: Path) -> bool:
        held = directory_lock(final.with_name(f"{final.name}.fetch"), wait_seconds=0)
        with pytest.raises(LockError), held:  # as a run's that brings the stage, too
            pass
        return fetch(remote, name, final)

    monkeypatch.setattr(RemoteRoot, "fetch", alone)
    remote = machine("first")
    name = stored(remote, "distill", "novels/wt")
    [row] = call("ls")["stages"]
    assert (row["name"], row["files"], row["checkpoints"]) == (name, 1, ["novels/wt"])
    assert row["size"] > 0 and 0 <= row["days"] < 0.1
    machine("second")
    path = Path(call("fetch", "novels/wt")["path"])
    assert path.is_relative_to(artifact_root()) and (path / "data.txt").read_text() == "distill"
    with pytest.raises(ArtifactError, match=r"Did you mean 'novels/wt'\?"):
        call("fetch", "novels/wtt")
    altered(remote, "checkpoints/old.json", {"path": "distill/none/checkpoint"})
    with pytest.raises(ArtifactError, match="stored by an older version of umim"):
        call("fetch", "old")
