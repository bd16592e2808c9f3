from __future__ import annotations

from pathlib import Path

import pytest

from tasks.run.stage import StageSpec, run_stage, verifying_once
from umim_core.errors import ArtifactError

SPEC = StageSpec("count", 1, {}, {})


def build(out: Path) -> dict[str, float]:
    (out / "data.txt").write_text("x")
    return {}


def never(out: Path) -> dict[str, float]:
    pytest.fail("the stage was built again")


def alter(root: Path) -> None:
    """Change a byte, but neither size nor manifest: only reading the file shows it."""
    (root / "count" / SPEC.key / "data.txt").write_text("y")


def test_files_are_read_at_the_first_use_of_a_run_only(tmp_path: Path) -> None:
    run_stage(tmp_path, SPEC, build)
    with verifying_once():
        first = run_stage(tmp_path, SPEC, never)
        alter(tmp_path)
        assert run_stage(tmp_path, SPEC, never) == first
    with verifying_once(), pytest.raises(ArtifactError, match="must"):
        run_stage(tmp_path, SPEC, never)


def test_a_damaged_artifact_is_refused_at_every_use_of_a_run(tmp_path: Path) -> None:
    run_stage(tmp_path, SPEC, build)
    alter(tmp_path)
    with verifying_once():
        for _ in range(2):
            with pytest.raises(ArtifactError, match="must"):
                run_stage(tmp_path, SPEC, never)


def test_an_artifact_that_lost_a_file_is_refused_within_the_run(tmp_path: Path) -> None:
    path = run_stage(tmp_path, SPEC, build).path
    with verifying_once():
        run_stage(tmp_path, SPEC, never)
        (path / "data.txt").unlink()
        with pytest.raises(ArtifactError, match="must"):
            run_stage(tmp_path, SPEC, never)
