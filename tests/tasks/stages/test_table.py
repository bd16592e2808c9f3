"""Tables of the paper: shards of questions, found after a kill, equal however spread; refusals."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import tasks.stages.table as stage
from support.tiny_pipeline import Walk
from support.tiny_table import (
    QUESTIONS,
    generated_table,
    run_table,
    run_table_of,
    tiny_table,
    write_hub,
    write_questions,
)
from tasks.data.table_jobs import SHARDS, ModelPlace, measure_text, read_report, table_row
from umim_core.config.table_recipe import TableRecipe, TableSetting, TableText
from umim_core.errors import CheckpointError, EvaluationError
from umim_core.evaluation.perplexity import perplexity
from umim_core.evaluation.questions import ShardScores, evaluate_task
from umim_core.model.umim import UMIM
from umim_core.text.sources import source_of
from umim_core.text.tokens import first_ids


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_questions(tmp_path_factory.mktemp("questions"))


@pytest.fixture(scope="module")
def whole(tiny_checkpoint: Path, questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Walk:
    """An undisturbed run."""
    return run_table(tmp_path_factory.mktemp("whole"), tiny_table(tiny_checkpoint, questions))


def table(run: Walk) -> dict[str, Any]:
    return read_report(run.artifacts[-1].path / stage.TABLE)


def test_the_same_questions_in_another_folder_are_the_same_table(
    whole: Walk, tiny_checkpoint: Path, questions: Path, tmp_path: Path
) -> None:
    elsewhere = shutil.copytree(questions, tmp_path / "elsewhere")
    recipe = tiny_table(tiny_checkpoint, elsewhere, cluster={"workers": 0, "cpus": 1})
    assert run_table(whole.root, recipe).executed() == []


@pytest.mark.parametrize(("number", "merge"), [(0, "none"), (1, "all")])
def test_means_are_those_of_the_task_scored_at_once(
    whole: Walk, tiny_checkpoint: Path, questions: Path, number: int, merge: Any
) -> None:
    row = table(whole)["scores"][number]
    once = evaluate_task(tiny_checkpoint, merge=merge, data=questions, batch_size=4)
    assert row["questions"] == once["questions"] == QUESTIONS
    assert row["acc"]["mean"] == once["acc"] and row["acc_norm"]["mean"] == once["acc_norm"]
    assert row["acc"]["stderr"] == pytest.approx(once["acc_stderr"])
    assert (row["token_reduction"] or 0.0) == once["token_reduction"]
    base = table(whole)["scores"][0]
    assert row["acc_difference"]["mean"] == pytest.approx(row["acc"]["mean"] - base["acc"]["mean"])
    scores = [artifact.path for artifact in whole.artifacts if artifact.stage == "shards"][number]
    names = sorted(path.stem for path in (scores / SHARDS).iterdir())
    assert [tuple(map(int, name.split("-"))) for name in names] == [(0, 2), (2, 4), (4, 6), (6, 7)]


def test_token_reduction_leaves_out_prompts_that_are_scored_raw(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, task = [{"name": "own", "merge": "prompt"}], "umim_openbookqa"
    hub = write_hub(tmp_path / "hub")
    at = {"task_data": None, "hub": str(hub)}
    recipe = tiny_table(tiny_checkpoint, hub, tasks=[task], settings=own, **at)
    (row,) = table(run_table(tmp_path / "root", recipe))["scores"]
    monkeypatch.chdir(hub)
    once = evaluate_task(tiny_checkpoint, task=task, batch_size=4)
    assert row["token_reduction"] == pytest.approx(once["token_reduction"], rel=1e-12)
    assert row["token_reduction"] > 0 and row["acc_seq"]["mean"] == once["acc_seq"]


def test_a_run_cut_off_half_way_scores_the_rest_and_nothing_twice(
    whole: Walk,
    tiny_checkpoint: Path,
    questions: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scored: list[tuple[str, int]] = []
    real = stage.score_shard

    def score(place: ModelPlace, setting: TableSetting, *of: Any) -> ShardScores:
        if len(scored) == 6:  # in the middle of the second setting
            scored.append(("cut", 0))
            raise KeyboardInterrupt
        scored.append((setting.name, of[2]))
        return real(place, setting, *of)

    monkeypatch.setattr(stage, "score_shard", score)
    recipe = tiny_table(tiny_checkpoint, questions)
    with pytest.raises(KeyboardInterrupt):
        run_table(tmp_path, recipe)
    again = run_table(tmp_path, recipe)
    places = [(name, first) for name in ("base", "own") for first in (0, 2, 4, 6)]
    assert sorted(place for place in scored if place[0] != "cut") == places
    assert [a.digest for a in again.artifacts] == [a.digest for a in whole.artifacts]


def test_a_text_has_the_figures_of_its_rows(
    tiny_checkpoint: Path, questions: Path, tmp_path: Path
) -> None:
    path = str(questions / "text.txt")
    text = {"source": {"kind": "text", "paths": [path]}, "segment_length": 32}
    bare: Any = {"settings": [], "tasks": [], "task_data": None}
    for rows in (2, 3):  # the table of other rows is another one
        texts = {"t": {**text, "rows": rows}}
        run = run_table(tmp_path, tiny_table(tiny_checkpoint, questions, **bare, texts=texts))
    (found,) = table(run)["texts"]
    umim = UMIM.from_pretrained(tiny_checkpoint, dtype="float32")
    ids = first_ids(source_of((path,)), umim.backbone.tokenizer, 10**6)
    cut = ids[: len(ids) // 32 * 32].reshape(-1, 32)
    read = [cut[index * len(cut) // 3] for index in range(3)]
    assert found["ppl_umim"] == pytest.approx(perplexity(read, umim.merged_model).ppl)
    assert found["ppl_base"] == pytest.approx(perplexity(read, umim.merged_model.base()).ppl)
    assert found["rows"] == 3 and 0 < found["top1"] <= 1 and found["text"] == "t"


@pytest.fixture(params=[tiny_table, generated_table], ids=["choices", "answers"])
def table_of(
    request: pytest.FixtureRequest, tiny_checkpoint: Path, tmp_path: Path
) -> Callable[..., TableRecipe]:
    """Makes recipes of answers that are scored, then of answers that are sampled."""
    data = write_hub(write_questions(tmp_path / "data"))
    return partial(request.param, tiny_checkpoint, data)


@pytest.mark.full
@pytest.mark.parametrize("cpus", [1, 2])
def test_workers_of_a_cluster_give_the_numbers_of_one(
    table_of: Callable[..., TableRecipe], tmp_path: Path, cpus: int
) -> None:
    run = run_table(tmp_path / "there", table_of(cluster={"workers": cpus, "cpus": cpus}))
    assert table(run) == table(run_table(tmp_path / "here", table_of()))


@pytest.mark.full
def test_a_killed_run_on_a_cluster_counts_nothing_twice(
    table_of: Callable[..., TableRecipe], tmp_path: Path
) -> None:
    recipe = table_of(cluster={"workers": 1, "cpus": 1}, shard=1)
    here = run_table(tmp_path / "here", table_of(shard=1))
    tmp_path /= "there"
    process = multiprocessing.get_context("spawn").Process(
        target=run_table_of, args=(tmp_path, recipe.model_dump_json())
    )
    process.start()
    until = time.monotonic() + 1200  # Ray starts slowly on a busy machine
    while not (before := finished(tmp_path)) and time.monotonic() < until:
        time.sleep(0.01)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    before = finished(tmp_path)
    assert 0 < len(before) < 2 * QUESTIONS
    run = run_table(tmp_path, recipe)
    after = finished(tmp_path)
    assert len(after) == 2 * QUESTIONS
    assert {name: after[name] for name in before} == before
    assert table(run)["scores"] == table(here)["scores"]


def finished(root: Path) -> dict[tuple[str, str], int]:
    """When each finished shard was written, by setting's key and name."""
    return {
        (path.parents[1].name.partition(".")[0], path.name): path.stat().st_mtime_ns
        for path in (root / "shards").glob("*/shards/*.json")
    }


def test_a_checkpoint_that_another_machine_has_otherwise_is_refused(
    tiny_checkpoint: Path,
) -> None:
    place = ModelPlace(str(tiny_checkpoint), "0" * 64, "cpu", "float32", 4)
    text = TableText(source=source_of(("none.txt",)))
    with pytest.raises(CheckpointError, match=r"the same checkpoint.* instead of 000000000000"):
        measure_text(place, text)


def test_other_prompts_under_another_setting_are_refused() -> None:
    base, own = (ShardScores({"acc": [1.0]}, [prompt]) for prompt in "ab")
    with pytest.raises(EvaluationError, match="other prompts under own"):
        table_row("t", "own", own, base)
