"""The stage contract (reliability 39 and 40 at the level of a stage)."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.source_tree import ROOT
from tasks.run.stage import StageSpec, run_stage, verifying_once
from umim_core.errors import ArtifactError
from umim_core.store.artifacts import read_json, write_json

SPEC = StageSpec("count", 1, {"tau": 5, "excluded": [1, 2]}, {"tokens": "a" * 64})
# Builds a stage slowly and writes one line per build into a log beside the root.
SLOW = """
import os, sys, time
from pathlib import Path
from tasks.run.stage import StageSpec, run_stage

root, resumable = Path(sys.argv[1]), sys.argv[2] == "resumable"

def build(out):
    with (root.parent / "log").open("a") as log:
        log.write(f"{os.getpid()}\\n")
    (out / "state").mkdir(exist_ok=True)
    (out / "state" / "step").write_text("1")
    (out / "result").write_text("42")
    print("building", flush=True)
    time.sleep(float(sys.argv[3]))
    return {"size": 2.0}

spec = StageSpec("slow", 1, {}, {}, resumable=resumable)
artifact = run_stage(root, spec, build)
print(artifact.digest, artifact.executed, flush=True)
"""
SLOW_KEY = StageSpec("slow", 1, {}, {}).key


class Build:
    """Write one file and count how often that was asked for."""

    def __init__(self, text: str = "x") -> None:
        self.calls = 0
        self.text = text

    def __call__(self, out: Path) -> dict[str, float]:
        self.calls += 1
        (out / "data.txt").write_text(self.text)
        return {"size": 1.0, "loss": 0.25}


def never(out: Path) -> dict[str, float]:
    pytest.fail("the stage was built again")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def start(root: Path, resumable: str, seconds: float) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, str(root), resumable, str(seconds)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    return process


def finish(process: subprocess.Popen[str]) -> list[str]:
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0
    return output.split()


def test_a_stage_is_built_once_and_then_found(tmp_path: Path) -> None:
    build = Build()
    first, second = (run_stage(tmp_path, SPEC, build) for _ in range(2))
    assert build.calls == 1
    assert (first.executed, second.executed) == (True, False)
    assert dataclasses.replace(first, executed=False) == second
    assert second.path == tmp_path.resolve() / "count" / SPEC.key
    assert names(tmp_path / "count") == {SPEC.key}
    assert names(second.path) == {"data.txt", "manifest.json"}


def test_files_and_numbers_count_in_what_depends_on_a_stage_and_times_do_not(
    tmp_path: Path,
) -> None:
    one, two = (run_stage(tmp_path / name, SPEC, Build()) for name in ("a", "b"))
    assert one.digest == two.digest == one.identity()
    assert run_stage(tmp_path / "c", SPEC, Build("y")).digest != one.digest
    counted = run_stage(tmp_path / "d", SPEC, lambda out: Build()(out) | {"loss": 0.5})
    assert counted.digest != one.digest


@pytest.mark.parametrize(
    "change",
    [
        {"name": "recount"},
        {"version": 2},
        {"config": {"tau": 6, "excluded": [1, 2]}},
        {"config": {"tau": 5, "excluded": [1]}},
        {"config": {"tau": 5}},
        {"inputs": {"tokens": "b" * 64}},
        {"inputs": {"ids": "a" * 64}},
        {"inputs": {}},
    ],
)
def test_whatever_a_stage_is_made_from_is_in_its_key(
    tmp_path: Path, change: dict[str, object]
) -> None:
    run_stage(tmp_path, SPEC, Build())
    other = dataclasses.replace(SPEC, **change)
    assert other.key != SPEC.key
    assert run_stage(tmp_path, other, Build()).executed
    assert not run_stage(tmp_path, SPEC, never).executed


@pytest.mark.parametrize("name", ["../out", "/etc", "a/../../b"])
def test_a_stage_cannot_leave_the_root(tmp_path: Path, name: str) -> None:
    with pytest.raises(ArtifactError, match="stay inside its root"):
        run_stage(tmp_path / "root", dataclasses.replace(SPEC, name=name), never)
    assert names(tmp_path) == set()


def _tell_other_metrics(path: Path) -> None:
    text = (path / "manifest.json").read_text()
    assert text.count('"loss":0.25') == 1
    (path / "manifest.json").write_text(text.replace('"loss":0.25', '"loss":0.24'))


@pytest.mark.parametrize(
    "change",
    [
        lambda path: (path / "data.txt").write_text("y"),
        lambda path: (path / "data.txt").write_text("xx"),
        lambda path: (path / "more").write_text(""),
        lambda path: (path / "data.txt").unlink(),
        _tell_other_metrics,
    ],
    ids=["altered", "longer", "one more", "one less", "other metrics"],
)
def test_an_altered_artifact_is_refused(tmp_path: Path, change: object) -> None:
    artifact = run_stage(tmp_path, SPEC, Build())
    assert callable(change)
    change(artifact.path)
    with pytest.raises(ArtifactError, match="must"):
        run_stage(tmp_path, SPEC, never)


def test_within_a_run_files_are_read_once_and_looked_for_at_every_use(tmp_path: Path) -> None:
    file = run_stage(tmp_path, SPEC, Build()).path / "data.txt"
    with verifying_once():
        first = run_stage(tmp_path, SPEC, never)
        file.write_text("y")  # neither size nor manifest: only reading the file shows it
        assert run_stage(tmp_path, SPEC, never) == first
        file.unlink()
        with pytest.raises(ArtifactError, match="must"):
            run_stage(tmp_path, SPEC, never)
    file.write_text("y")
    with verifying_once():
        for _ in range(2):
            with pytest.raises(ArtifactError, match="must"):
                run_stage(tmp_path, SPEC, never)


def test_an_artifact_moved_to_another_key_is_refused(tmp_path: Path) -> None:
    other = dataclasses.replace(SPEC, version=2)
    artifact = run_stage(tmp_path, SPEC, Build())
    artifact.path.rename(artifact.path.with_name(other.key))
    with pytest.raises(ArtifactError, match="must be the result of this very call"):
        run_stage(tmp_path, other, never)


def test_a_stage_of_an_unknown_schema_is_refused(tmp_path: Path) -> None:
    path = run_stage(tmp_path, SPEC, Build()).path / "manifest.json"
    write_json(path, {**dict(read_json(path)), "schema": 9})
    with pytest.raises(ArtifactError, match="must have schema 1; got 9"):
        run_stage(tmp_path, SPEC, never)


@pytest.mark.parametrize("resumable", [False, True])
def test_a_failing_build_publishes_nothing_and_keeps_what_can_be_resumed(
    tmp_path: Path, resumable: bool
) -> None:
    spec = dataclasses.replace(SPEC, resumable=resumable)

    def fail(out: Path) -> dict[str, float]:
        (out / "state").mkdir()
        (out / "state" / "step").write_text("7")
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        run_stage(tmp_path, spec, fail)
    kept = {f"{spec.key}.partial"} if resumable else set()
    assert names(tmp_path / "count") == kept

    def resume(out: Path) -> dict[str, float]:
        found = (out / "state" / "step").exists()
        (out / "data.txt").write_text("x")
        return {"found": float(found)}

    artifact = run_stage(tmp_path, spec, resume)
    assert artifact.metrics == {"found": float(resumable)}
    assert names(tmp_path / "count") == {spec.key}
    assert names(artifact.path) == {"data.txt", "manifest.json"}


def test_metrics_that_are_not_finite_fail_the_stage(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="only finite numbers"):
        run_stage(tmp_path, SPEC, lambda out: {"loss": float("nan")})
    assert names(tmp_path / "count") == set()


def test_a_root_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match=r"file.* must be writable; got .*set UMIM_ROOT"):
        run_stage(tmp_path / "file", SPEC, never)


@pytest.mark.parametrize("resumable", [pytest.param("fresh", marks=pytest.mark.full), "resumable"])
def test_a_killed_build_leaves_nothing_final_and_is_built_again(
    tmp_path: Path, resumable: str
) -> None:
    root = tmp_path / "root"
    with start(root, resumable, 600) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "building\n"
        process.send_signal(signal.SIGKILL)
        assert process.wait(timeout=240) == -signal.SIGKILL
    (left,) = names(root / "slow") - {f".{SLOW_KEY}.lock"}
    assert (left == f"{SLOW_KEY}.partial") == (resumable == "resumable")
    assert (root / "slow" / left / "whole" / "state" / "step").exists()

    seen: list[bool] = []

    def build(out: Path) -> dict[str, float]:
        seen.append((out / "state" / "step").exists())
        (out / "result").write_text("42")
        return {}

    spec = StageSpec("slow", 1, {}, {}, resumable=resumable == "resumable")
    assert run_stage(root, spec, build).executed
    assert seen == [resumable == "resumable"]
    assert names(root / "slow") == {SLOW_KEY}
    assert names(root / "slow" / SLOW_KEY) == {"result", "manifest.json"}


@pytest.mark.full  # quickly in store/test_locking.py, and of two builders in test_remote_root.py
def test_two_processes_that_launch_one_stage_build_it_once(tmp_path: Path) -> None:
    root = tmp_path / "root"
    first, second = (start(root, "fresh", 1.0) for _ in range(2))
    outputs = sorted([finish(first), finish(second)], key=len)
    (digest, executed), (_, same, built) = outputs
    assert (executed, built, digest) == ("False", "True", same)
    assert len((tmp_path / "log").read_text().splitlines()) == 1
    assert names(root / "slow") == {SLOW_KEY}


def test_a_directory_without_a_manifest_does_not_exist_and_is_set_aside(tmp_path: Path) -> None:
    first = run_stage(tmp_path, SPEC, Build())
    (first.path / "manifest.json").unlink()
    build = Build()
    again = run_stage(tmp_path, SPEC, build)
    assert build.calls == 1
    assert again.digest == first.digest
    (torn,) = first.path.parent.glob("*.torn-*")
    assert names(torn) == {"data.txt"}
