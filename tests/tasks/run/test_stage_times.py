"""Elapsed time of a run: a line per stage that was built, the longest first."""

from __future__ import annotations

import time
from pathlib import Path

from tasks.run.stage import Artifact, StageSpec, run_stage
from tasks.run.stage_times import time_lines


def built(root: Path, name: str, number: int, seconds: float = 0.0) -> Artifact:
    def build(_: Path) -> dict[str, float]:
        time.sleep(seconds)
        return {}

    return run_stage(root, StageSpec(name, 1, {"number": number}, {}), build)


def test_stages_are_added_up_by_name_and_found_ones_left_out(tmp_path: Path) -> None:
    made = [built(tmp_path, "short", 1), built(tmp_path, "long", 1, 0.6)]
    made += [built(tmp_path, "short", 2), built(tmp_path, "long", 1)]
    assert time_lines(made, 7.4, 2) == [
        "stage  built  seconds",
        "long       1        1",
        "short      2        0",
        "elapsed: 7 s; up to 2 stages at a time, together 1 s",
    ]


def test_a_run_that_built_nothing_has_no_table(tmp_path: Path) -> None:
    built(tmp_path, "short", 1)
    assert time_lines([built(tmp_path, "short", 1)], 1.0, 1) == []
