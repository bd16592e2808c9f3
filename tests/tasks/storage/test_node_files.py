"""A node without the driver's disk reads finished stages from storage."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest

from support.s3 import Machine
from support.sites import made
from tasks.cluster.nodes import _answer
from tasks.run.stage import Artifact
from tasks.storage.remote_root import fetch_inputs, local_copy
from umim_core.checkpoint.checkpoint_index import artifact_root
from umim_core.text.sources import TextFiles


@dataclass(frozen=True)
class Job:
    tokenized: Artifact
    texts: tuple[TextFiles, ...]
    rules: str
    elsewhere: Path


def built(name: str, text: str = "x") -> Artifact:
    return made(artifact_root(), name, lambda out: (out / "a.txt").write_text(text))


def seen_from(node: Path, driver: Path, path: Path) -> Path:
    return node / path.relative_to(driver)


def test_what_a_job_names_is_fetched_and_nothing_else(machine: Machine, tmp_path: Path) -> None:
    machine("driver")
    stages = {name: built(name, name) for name in ("tokenize", "corpus", "filter", "count")}
    machine("node")
    here = {
        name: seen_from(tmp_path / "node", tmp_path / "driver", stage.path)
        for name, stage in stages.items()
    }
    job = Job(
        replace(stages["tokenize"], path=here["tokenize"]),
        (TextFiles(paths=(str(here["corpus"] / "a.txt"),)),),
        str(here["filter"] / "rules"),
        tmp_path / "driver" / "of another",
    )
    fetch_inputs(partial(print, job))
    for name in ("tokenize", "corpus", "filter"):
        assert (here[name] / "a.txt").read_text() == name
    assert not here["count"].exists()
    assert local_copy(here["count"] / "a.txt").read_text() == "count"


def test_a_stage_that_is_being_built_is_not_looked_for(machine: Machine, tmp_path: Path) -> None:
    machine("node")
    path = artifact_root() / "tokenize" / f"{'0' * 64}.partial" / "train"
    assert local_copy(path) == path and not (tmp_path / "node").exists()


def test_a_node_says_why_it_cannot_read_the_storage(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote, folder = machine("driver"), str(tmp_path / "driver" / "look")
    with remote.mark() as mark:
        assert _answer(folder, mark)[1:] == (False, "")
        assert _answer(str(tmp_path), mark)[1:] == (True, "")
    assert _answer(folder, mark)[1:] == (False, "another storage")
    monkeypatch.setenv("UMIM_ROOT", "nowhere://umim")
    assert "umim[s3]" in _answer(folder, mark)[2]
