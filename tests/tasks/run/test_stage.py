"""The stage contract (reliability 39 and 40 at the level of a stage)."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import pytest

from tasks.run.stage import StageSpec, run_stage, verifying_once
from umim_core.errors import ArtifactError

SPEC = StageSpec("count", 1, {"tau": 5, "excluded": [1, 2]}, {"tokens": "a" * 64})


def build(out: Path, text: str = "x", loss: float = 0.25) -> dict[str, float]:
    (out / "data.txt").write_text(text)
    return {"size": 1.0, "loss": loss}


def never(out: Path) -> dict[str, float]:
    pytest.fail("the stage was built again")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_stage_is_built_once_and_then_found(tmp_path: Path) -> None:
    first, second = (run_stage(tmp_path, SPEC, make) for make in (build, never))
    assert (first.executed, second.executed) == (True, False)
    assert dataclasses.replace(first, executed=False) == second
    assert second.path == tmp_path.resolve() / "count" / SPEC.key
    assert names(tmp_path / "count") == {SPEC.key}
    assert names(second.path) == {"data.txt", "manifest.json"}


def test_files_and_numbers_count_in_what_depends_on_a_stage_and_times_do_not(
    tmp_path: Path,
) -> None:
    one, two = (run_stage(tmp_path / name, SPEC, build) for name in ("a", "b"))
    assert one.digest == two.digest == one.identity()
    for name, change in (("c", {"text": "y"}), ("d", {"loss": 0.5})):
        assert run_stage(tmp_path / name, SPEC, partial(build, **change)).digest != one.digest


def test_whatever_a_stage_is_made_from_is_in_its_key() -> None:
    config, inputs = {"tau": 6, "excluded": [1, 2]}, {"tokens": "b" * 64}
    changes = ({"name": "recount"}, {"version": 2}, {"config": config}, {"inputs": inputs})
    assert len({SPEC.key, *(dataclasses.replace(SPEC, **change).key for change in changes)}) == 5


@pytest.mark.parametrize("name", ["../out", "/etc", "a/../../b"])
def test_a_stage_cannot_leave_the_root(tmp_path: Path, name: str) -> None:
    with pytest.raises(ArtifactError, match="stay inside its root"):
        run_stage(tmp_path / "root", dataclasses.replace(SPEC, name=name), never)
    assert names(tmp_path) == set()


def test_within_a_run_files_are_read_once_and_looked_for_at_every_use(tmp_path: Path) -> None:
    file = run_stage(tmp_path, SPEC, build).path / "data.txt"
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


@pytest.mark.parametrize("resumable", [False, True])
def test_a_failing_build_publishes_nothing_and_keeps_what_can_be_resumed(
    tmp_path: Path, resumable: bool
) -> None:
    spec = dataclasses.replace(SPEC, resumable=resumable)

    def fail(out: Path) -> dict[str, float]:
        (out / "state" / "step-7").mkdir(parents=True)
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        run_stage(tmp_path, spec, fail)
    assert names(tmp_path / "count") == ({f"{spec.key}.partial"} if resumable else set())
    resume = lambda out: build(out) | {"found": float((out / "state" / "step-7").exists())}  # noqa: E731
    artifact = run_stage(tmp_path, spec, resume)
    assert artifact.metrics["found"] == resumable
    assert names(tmp_path / "count") == {spec.key}
    assert names(artifact.path) == {"data.txt", "manifest.json"}


def test_a_directory_without_a_manifest_does_not_exist_and_is_set_aside(tmp_path: Path) -> None:
    first = run_stage(tmp_path, SPEC, build)
    (first.path / "manifest.json").unlink()
    again = run_stage(tmp_path, SPEC, build)
    assert again.executed and again.digest == first.digest
    (torn,) = first.path.parent.glob("*.torn-*")
    assert names(torn) == {"data.txt"}
