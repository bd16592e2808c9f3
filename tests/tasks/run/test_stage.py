"""The stage contract (reliability 39 and 40 at the level of a stage)."""

from __future__ import annotations

import dataclasses
import signal
import sys
from pathlib import Path

import pytest

from support.processes import run_command
from support.source_tree import ROOT
from tasks.run.stage import StageSpec, run_stage, verifying_once
from umim_core.errors import ArtifactError
from umim_core.store.artifacts import read_json, write_json

SPEC = StageSpec("count", 1, {"tau": 5, "excluded": [1, 2]}, {"tokens": "a" * 64})
SLOW = StageSpec("slow", 1, {}, {}, resumable=True)
KILLED = """
import os, signal, sys
from pathlib import Path
from tasks.run.stage import StageSpec, run_stage

def build(out):
    (out / "state").mkdir()
    (out / "state" / "step").write_text("1")
    os.kill(os.getpid(), signal.SIGKILL)

run_stage(Path(sys.argv[1]), StageSpec("slow", 1, {}, {}, resumable=True), build)
"""


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
        {"inputs": {"tokens": "b" * 64}},
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
        _tell_other_metrics,
    ],
    ids=["altered", "other metrics"],
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


def test_a_killed_build_leaves_nothing_final_and_goes_on(tmp_path: Path) -> None:
    root = tmp_path / "root"
    killed = run_command(sys.executable, "-c", KILLED, root, PYTHONPATH=str(ROOT))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    (left,) = names(root / "slow") - {f".{SLOW.key}.lock"}
    assert left == f"{SLOW.key}.partial"
    assert (root / "slow" / left / "whole" / "state" / "step").exists()

    seen: list[bool] = []

    def build(out: Path) -> dict[str, float]:
        seen.append((out / "state" / "step").exists())
        (out / "result").write_text("42")
        return {}

    assert run_stage(root, SLOW, build).executed
    assert seen == [True]
    assert names(root / "slow") == {SLOW.key}
    assert names(root / "slow" / SLOW.key) == {"result", "manifest.json"}


def test_a_directory_without_a_manifest_does_not_exist_and_is_set_aside(tmp_path: Path) -> None:
    first = run_stage(tmp_path, SPEC, Build())
    (first.path / "manifest.json").unlink()
    build = Build()
    again = run_stage(tmp_path, SPEC, build)
    assert build.calls == 1
    assert again.digest == first.digest
    (torn,) = first.path.parent.glob("*.torn-*")
    assert names(torn) == {"data.txt"}
