"""Artifacts in object storage: one winner, whole or absent, found by the next machine."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from support.processes import run_command
from support.s3 import Machine, environment, forget_servers
from tasks.run.stage import Artifact, StageSpec, run_stage
from tasks.run.store_commands import collect, listed, remove, verify
from tasks.storage import client_errors
from tasks.storage import remote_root as module
from umim_core.checkpoint.checkpoint_index import artifact_root, record_checkpoint
from umim_core.errors import ArtifactError

SPEC = StageSpec("count", 1, {"tau": 5}, {"tokens": "a" * 64})
NAME = f"count/{SPEC.key}"
# A stage that writes three files and, where it is asked to, kills its process while they are
# uploaded (after the first), or after it has left a training state in storage.
PROCESS = """
import os, signal, sys, time
from pathlib import Path
from tasks.storage import remote_root as module
from tasks.run.stage import StageSpec, run_stage
from umim_core.checkpoint.checkpoint_index import artifact_root

how = sys.argv[1]
module._STATE_SECONDS = 0.1
if how == "dies-uploading":
    upload = module.RemoteRoot.store_files
    def first_only(self, files):
        name = sorted(files)[0]
        upload(self, {name: files[name]})
        os.kill(os.getpid(), signal.SIGKILL)
    module.RemoteRoot.store_files = first_only

def build(out):
    for name in ("a", "b", "c"):
        (out / f"{name}.txt").write_text(name * 1000)
    return {"size": 3.0}

def train(out):
    from umim_core.training.train_state import STATE_SCHEMA, last_step
    from umim_core.store.artifacts import write_manifest
    resumed = last_step(out / "state") or 0
    if how == "dies-training":
        step = out / "state" / "step-00000007"
        step.mkdir(parents=True)
        (step / "rank-0.json").write_text("{}")
        write_manifest(step, kind="train-state", schema=STATE_SCHEMA, body={"world": 1})
        remote = module.remote_root()
        while not remote.state_files(f"train/{spec.key}"):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    (out / "result").write_text("42")
    return {"resumed": float(resumed)}

trains = "train" in how
spec = StageSpec("train" if trains else "count", 1, {"tau": 5}, {"tokens": "a" * 64}, trains)
artifact = run_stage(artifact_root(), spec, train if trains else build)
print(artifact.digest, artifact.executed, artifact.metrics, flush=True)
"""


class Build:
    def __init__(self, text: str = "x") -> None:
        self.calls, self.text = 0, text

    def __call__(self, out: Path) -> dict[str, float]:
        self.calls += 1
        (out / "folder").mkdir()
        (out / "folder" / "data.txt").write_text(self.text)
        return {"size": 1.0}


def run(build: Callable[[Path], Mapping[str, float]], spec: StageSpec = SPEC) -> Artifact:
    return run_stage(artifact_root(), spec, lambda out: dict(build(out)))


def run_process(server: dict[str, str], tmp_path: Path, scratch: str, how: str) -> list[str]:
    settings = environment(server, tmp_path.name, str(tmp_path / scratch))
    done = run_command(sys.executable, "-c", PROCESS, how, **settings)
    if how.startswith("dies"):
        assert done.returncode == -signal.SIGKILL, done.stderr
        return []
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_another_machine_finds_what_one_built(machine: Machine) -> None:
    build = Build()
    machine("first")
    built = run(build)
    machine("second")
    found = run(build)
    assert build.calls == 1
    assert built.executed and not found.executed
    assert (found.digest, found.metrics) == (built.digest, {"size": 1.0})
    assert found.path != built.path
    assert (found.path / "folder" / "data.txt").read_text() == "x"


def test_another_machine_finds_numbers_that_have_no_file(machine: Machine) -> None:
    def measure(_: Path) -> dict[str, float]:
        return {"loss": 2.0}

    machine("first")
    built = run_stage(artifact_root(), SPEC, measure)
    machine("second")
    found = run_stage(artifact_root(), SPEC, measure)
    assert not found.executed
    assert (found.digest, found.metrics) == (built.digest, {"loss": 2.0})


def test_one_of_64_creators_wins(machine: Machine) -> None:
    remote = machine("first")
    with ThreadPoolExecutor(16) as pool:
        won = list(pool.map(lambda n: remote._create("stages/a/b.json", b"%d" % n), range(64)))
    assert sum(won) == 1
    assert remote._read("stages/a/b.json") == b"%d" % won.index(True)


def test_the_first_of_two_builders_counts(machine: Machine) -> None:
    machine("first")
    first = run(Build("one"))
    remote = machine("second")
    held = remote.manifest(NAME)
    remote.remove(f"stages/{NAME}.json")

    def late(out: Path) -> dict[str, float]:  # the other one finishes while this one builds
        remote._write(f"stages/{NAME}.json", (first.path / "manifest.json").read_bytes())
        return Build("two")(out)

    second = run(late)
    assert held is not None and second.digest == first.digest and not second.executed
    assert (second.path / "folder" / "data.txt").read_text() == "one"


def test_a_second_builder_waits_for_the_first(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_POLL_SECONDS", 0.05)
    remote, begun, go = machine("first"), threading.Event(), threading.Event()
    spec, elsewhere = SPEC, {"token": "t", "renewed": 0, "host": "elsewhere", "pid": 1}
    remote._write(f"leases/{NAME}.json", json.dumps(elsewhere).encode())
    build = Build()

    def waiting() -> Artifact:
        begun.set()
        return run(build, spec)

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(waiting)
        assert begun.wait(120) and not go.wait(0.5) and build.calls == 0
        # The lease stands still for longer than it may: its holder is gone.
        monkeypatch.setattr(module, "LEASE_SECONDS", 0.2)
        assert future.result(120).executed and build.calls == 1
    assert remote._read(f"leases/{NAME}.json") is None


@pytest.mark.full
def test_a_kill_during_the_upload_leaves_nothing(
    server: dict[str, str], machine: Machine, tmp_path: Path
) -> None:
    run_process(server, tmp_path, "first", "dies-uploading")
    remote = machine("other")
    assert remote.manifest(NAME) is None and len(remote.names("objects")) == 1
    digest, executed, *_ = run_process(server, tmp_path, "first", "builds")
    assert executed == "False"  # it was whole here: only the upload was missing
    held = remote.manifest(NAME)
    assert held is not None and held["digest"] == digest
    assert verify(remote, read=True) == []
    assert run_process(server, tmp_path, "second", "builds")[:2] == [digest, "False"]


@pytest.mark.full
def test_a_training_goes_on_where_another_machine_was_killed(
    server: dict[str, str], machine: Machine, tmp_path: Path
) -> None:
    run_process(server, tmp_path, "first", "dies-training")
    answer = run_process(server, tmp_path, "second", "trains")
    assert answer[1] == "True" and answer[-1] == "7.0}"
    assert machine("third").names("states") == {}


@pytest.mark.parametrize("fault", ["altered", "missing"])
def test_a_damaged_file_is_refused(machine: Machine, fault: str) -> None:
    remote = machine("first")
    run(Build())
    (place,) = remote.names("objects")
    if fault == "altered":
        remote._write(f"objects/{place}", b"y")
    else:
        remote.remove(f"objects/{place}")
    machine("second")
    rule = "must be as it was written" if fault == "altered" else "must hold every file"
    with pytest.raises(ArtifactError, match=rule):
        run(Build())
    assert list((artifact_root() / "count").iterdir()) == []
    wrong = verify(remote, read=True)
    assert len(wrong) == 1 and wrong[0].startswith(f"{NAME}: folder/data.txt ")
    remove(remote, NAME)
    machine("third")
    assert run(Build()).executed and verify(remote, read=True) == []


def test_storage_that_creates_an_object_twice_is_refused(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = machine("first")
    monkeypatch.setattr(module, "_CONDITIONAL", set())
    monkeypatch.setattr(type(remote), "_create", lambda *_: True)  # as without If-None-Match
    with pytest.raises(ArtifactError, match="must refuse to create an object that exists"):
        run(Build())
    assert remote.names("marks") == {}


def test_every_clients_refusal_is_typed(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    class AzureError(Exception):
        pass

    remote = machine("first")
    azure = SimpleNamespace(AzureError=AzureError)
    monkeypatch.setitem(sys.modules, "azure.core.exceptions", azure)
    client_errors.refusals.cache_clear()
    remote.filesystem.cat_file = Mock(side_effect=AzureError("503"))
    try:
        with pytest.raises(ArtifactError, match="must answer, and allow"):
            remote.sees_mark("marks/none.json")
    finally:
        del remote.filesystem.cat_file
        client_errors.refusals.cache_clear()


def test_storage_that_is_away_is_a_typed_error(
    server: dict[str, str], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine("first")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("UMIM_ROOT", "s3://umim/away")
    import s3fs

    forget_servers()
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    with pytest.raises(ArtifactError, match=r"the storage s3://umim/away must answer") as caught:
        run(Build())
    assert server["AWS_SECRET_ACCESS_KEY"] not in str(caught.value)


@pytest.mark.parametrize("name", ["../../outside", "/outside", "a/../../outside", "a\0b", "."])
def test_names_in_storage_stay_inside_the_root(machine: Machine, name: str) -> None:
    remote = machine("first")
    [entry] = remote.store_files({"x": _file(artifact_root() / "x")}).values()
    manifest = json.dumps({"files": {name: entry}}).encode()
    remote.filesystem.pipe_file(f"{remote.path}/stages/mine/k.json", manifest)
    with pytest.raises(ArtifactError, match="must stay inside its root"):
        remote.fetch("mine/k", artifact_root() / "mine" / "k")
    record = json.dumps({"path": "../outside/checkpoint"}).encode()
    remote.filesystem.pipe_file(f"{remote.path}/checkpoints/own.json", record)
    assert remote.checkpoint_stages() == {}
    assert sorted(path.name for path in artifact_root().parent.rglob("outside*")) == []


def _file(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x")
    return path


def test_collection_keeps_what_a_named_checkpoint_was_made_from(machine: Machine) -> None:
    remote = machine("first")
    tokens = run(Build("tokens"), StageSpec("tokenize", 1, {}, {}))
    rules = run(
        Build("rules"), StageSpec("mine", 1, {}, {"tokens": tokens.folder_digest("folder")})
    )
    other = run(Build("other"), StageSpec("mine", 1, {"tau": 9}, {"tokens": tokens.digest}))
    trained = run(Build("module"), StageSpec("distill", 1, {}, {"rules": rules.digest}))
    record = record_checkpoint(artifact_root(), "novels/llama/wt", trained.path / "checkpoint")
    remote.store_record(record)
    assert collect(remote, 1.0).stages == ()
    assert collect(remote, 0.0).stages == (f"mine/{other.key}",)
    assert {row.name.split("/")[0] for row in listed(remote)} == {"tokenize", "mine", "distill"}
    with pytest.raises(ArtifactError, match="a stage with a named checkpoint stays"):
        remove(remote, f"distill/{trained.key[:8]}")
    assert remove(remote, f"mine/{rules.key[:8]}") == f"mine/{rules.key}"


def test_commands(
    machine: Machine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from flows.store import app

    remote = machine("first")
    trained = run(Build(), StageSpec("distill", 1, {}, {}))
    shutil.copytree(trained.path / "folder", trained.path / "checkpoint")
    remote.store_record(record_checkpoint(artifact_root(), "novels/wt", trained.path / "folder"))

    def call(*arguments: str) -> str:
        result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
        assert result.exit_code == 0
        return result.stdout

    assert "novels/wt" in call("ls") and "all files are there" in call("verify", "--read")
    machine("second")
    path = Path(call("fetch", "novels/wt").strip())
    assert path.is_relative_to(artifact_root()) and (path / "data.txt").read_text() == "x"
    with pytest.raises(ArtifactError, match=r"Did you mean 'novels/wt'\?"):
        call("fetch", "novels/wtt")
    assert json.loads(call("gc", "--older-than", "0", "--json"))["stages"] == []
