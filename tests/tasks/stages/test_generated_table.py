"""Tables of generated answers: texts, sizes and reductions by question, limits, cells not run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from support.tiny_table import (
    QUESTIONS,
    TableRun,
    generated_table,
    run_table,
    tiny_table,
    write_problems,
)
from tasks.data.table_scores import read_report, read_shards
from tasks.data.table_sources import (
    HUB_COMMIT,
    check_data,
    check_limits,
    data_digests,
    question_source,
    source_facts,
)
from tasks.run.recipes import find_recipe, table_names
from tasks.run.stage import Artifact
from tasks.stages.table import TABLE
from umim_core.errors import ConfigError, CorpusError
from umim_core.evaluation.harness import UmimLM
from umim_core.evaluation.tasks.generation_task import GenerationTask
from umim_core.evaluation.tasks.question_shards import shard_seed
from umim_core.evaluation.tasks.task_runs import load_tasks, run_task
from umim_core.evaluation.text_metrics.math_answer import math_answer


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_problems(tmp_path_factory.mktemp("problems"))


@pytest.fixture(scope="module")
def whole(
    tiny_checkpoint: Path, problems: Path, tmp_path_factory: pytest.TempPathFactory
) -> TableRun:
    recipe = generated_table(tiny_checkpoint, problems)
    return run_table(tmp_path_factory.mktemp("whole"), recipe)


def shards(run: TableRun) -> list[Artifact]:
    return [artifact for artifact in run.artifacts if artifact.stage == "shards"]


def table(run: TableRun) -> dict[str, Any]:
    return read_report(run.artifacts[-1].path / TABLE)


def test_answers_and_sizes_are_kept_by_question(whole: TableRun, problems: Path) -> None:
    base, own = (read_shards(artifact.path) for artifact in shards(whole))
    assert len(own.answers) == len(own.sizes) == len(base.answers) == QUESTIONS
    assert {len(texts) for texts in own.answers} == {2}
    rows = (problems / "math" / "amc23.jsonl").read_text("utf-8").splitlines()
    wanted = [[json.loads(row)["answer"]] for row in rows]
    assert own.values["pass@1"] == [
        math_answer(texts, {"references": references})["pass@1"]
        for texts, references in zip(own.answers, wanted, strict=True)
    ]
    assert tuple(map(sum, zip(*own.sizes, strict=True))) == (*own.inputs, *own.contexts)
    assert own.values["prompt_tr"] == [1 - units / tokens for _, _, tokens, units in own.sizes]
    assert min(own.values["prompt_tr"]) > 0 and base.inputs == (0, 0)


@pytest.mark.parametrize(("number", "merge"), [(0, "none"), (1, "all")])
def test_a_shard_has_the_answers_and_figures_of_its_questions_run_alone(
    whole: TableRun, tiny_checkpoint: Path, problems: Path, number: int, merge: Any
) -> None:
    options = {"checkpoint": str(tiny_checkpoint), "task_data": str(problems)}
    options |= {"task_new_tokens": 6, "task_repeats": 2}
    task = load_tasks([{"task": "umim_amc23", "class": GenerationTask}], options)["umim_amc23"]
    with torch.random.fork_rng():
        torch.manual_seed(shard_seed(whole.recipe.seed, 0))
        _, samples = run_task(UmimLM(tiny_checkpoint, merge, batch_size=4), task, 2)
    kept = read_shards(shards(whole)[number].path)
    assert kept.answers[:2] == [list(map(str, sample["resps"][0])) for sample in samples]
    names = {"pass@1", *(("prompt_tr", "gen_kv_tr", "cumulative_kv_tr") if number else ())}
    assert set(kept.values) == names
    for name in names:
        assert kept.values[name][:2] == [sample[name] for sample in samples]


def test_limits_stand_with_the_figures(whole: TableRun) -> None:
    body = table(whole)
    assert body["limits"] == {"questions": None, "new_tokens": 6, "answers": 2, "length": None}
    for row in body["scores"]:
        limits = {name: row[name] for name in ("questions", "new_tokens", "answers", "context")}
        assert limits == {"questions": 7, "new_tokens": 6, "answers": 2, "context": 64}
    assert "pass@1_difference" in row and "prompt_tr_difference" not in row


def test_limits_of_a_recipe_raise_no_number_of_a_task(
    tiny_checkpoint: Path, problems: Path
) -> None:
    recipe = generated_table(tiny_checkpoint, problems, new_tokens=20_000)
    greedy, sampled = (
        question_source(recipe, task, {}).answers for task in ("umim_gsm8k", "umim_amc23")
    )
    assert greedy is not None and sampled is not None
    limits = {"task_seed": 0, "task_new_tokens": 512, "task_repeats": 1}
    assert dict(greedy.options) == {**limits, "task_data": str(problems)}
    assert dict(sampled.options) == {
        **limits, "task_new_tokens": 15_000, "task_repeats": 2, "task_data": str(problems)
    }  # fmt: skip


def test_another_seed_draws_other_answers(
    whole: TableRun, tiny_checkpoint: Path, problems: Path, tmp_path: Path
) -> None:
    recipe = generated_table(tiny_checkpoint, problems, questions=2, seed=1)
    pairs = zip(shards(whole), shards(run_table(tmp_path, recipe)), strict=True)
    for own, other in ([read_shards(made.path).answers[:2] for made in pair] for pair in pairs):
        assert own != other
        assert all(len(set(texts)) == 2 for texts in own)


def test_a_task_beyond_the_trained_context_is_not_run_and_says_so(
    tiny_checkpoint: Path, problems: Path, tmp_path: Path
) -> None:
    recipe = generated_table(tiny_checkpoint, problems, new_tokens=60)
    run = run_table(tmp_path, recipe)
    assert [row["not_run"] for row in table(run)["scores"]] == ["not run: context"] * 2
    assert all(artifact.metrics["questions"] == 0 for artifact in shards(run))


def test_programs_are_not_run_without_a_confirmation(tiny_checkpoint: Path, tmp_path: Path) -> None:
    recipe = generated_table(tiny_checkpoint, tmp_path, tasks=["umim_humaneval"])
    with pytest.raises(ConfigError, match=r"umim_humaneval.*--confirm-run-unsafe-code"):
        run_table(tmp_path / "root", recipe)


@pytest.mark.full
def test_confirmed_programs_are_run_and_judged_by_their_tests(tmp_path: Path) -> None:
    rows = [
        {"task_id": str(wanted), "prompt": "def f():\n    return 1\n    # ", "entry_point": "f",
         "test": f"def check(f):\n    assert f() == {wanted}\n", "canonical_solution": "1"}
        for wanted in (1, 2)
    ]  # fmt: skip
    path = tmp_path / "data" / "humaneval" / "HumanEval.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    options = {"tasks": ["umim_humaneval"], "new_tokens": 1, "confirm_run_unsafe_code": True}
    recipe = generated_table(Path("umim-docs-llama"), tmp_path / "data", **options)
    for made in shards(run_table(tmp_path / "root", recipe)):
        assert read_shards(made.path).values["pass@1"] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("task", "changes", "error"),
    [
        ("umim_gsm8k", {"task_data": "there"}, "umim_gsm8k generates.*got there.*as data_files"),
        ("umim_amc23", {}, r"umim_amc23 must name a folder of data_files with math/amc23\.jsonl"),
    ],
)
def test_data_that_a_task_cannot_read_are_refused(
    tiny_checkpoint: Path, tmp_path: Path, task: str, changes: dict[str, Any], error: str
) -> None:
    options = {"tasks": [task], "data_files": None} | changes
    with pytest.raises(ConfigError, match=error):
        run_table(tmp_path, generated_table(tiny_checkpoint, tmp_path, **options))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"tasks": ["umim_docstrings"], "new_tokens": 6}, "new_tokens is for .* generated"),
        ({"tasks": ["umim_docstrings"], "new_tokens": None}, "answers is for .*got 2 with"),
        ({"tasks": ["umim_ruler_1k"]}, "data_files is for .* whose questions are a file"),
        ({"length": 64}, "length is for .*may cut a text; got 64 with umim_amc23"),
        ({"confirm_run_unsafe_code": True}, "confirm_run_unsafe_code is for .*runs programs"),
        (
            {"tasks": [], "settings": [], "questions": 3,
             "texts": {"t": {"source": {"kind": "text", "paths": ["t.txt"]}}}},
            "questions is for tables with a task; got 3 with texts alone",
        ),
    ],
)  # fmt: skip
def test_limits_that_apply_to_no_task_are_refused(
    tiny_checkpoint: Path, tmp_path: Path, changes: dict[str, Any], error: str
) -> None:
    with pytest.raises(ConfigError, match=error):
        check_limits(generated_table(tiny_checkpoint, tmp_path, **changes))


def test_every_recipe_of_a_table_has_limits_of_its_tasks() -> None:
    for name in table_names():
        recipe: Any = find_recipe(name)
        check_limits(recipe)


def test_the_table_of_the_hub_that_questions_come_from_belongs_into_their_key(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    here = generated_table(tiny_checkpoint, tmp_path)
    there = here.model_copy(update={"data_files": None})
    assert "sources" not in source_facts(here, "umim_gsm8k", {})
    found: Any = source_facts(there, "umim_gsm8k", {})["sources"]
    assert found["hub"]["path"] == "openai/gsm8k" and found["hub"]["columns"]


def test_the_commit_of_the_hubs_table_is_in_the_key_and_read_by_workers(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    recipes = [
        generated_table(tiny_checkpoint, tmp_path, tasks=["umim_gsm8k"], data_files=None,
                        revisions={"umim_gsm8k": commit * 40})
        for commit in "ab"
    ]  # fmt: skip
    for recipe, commit in zip(recipes, "ab", strict=True):
        check_data(recipe)
        digests = data_digests(recipe, "umim_gsm8k")
        assert digests[HUB_COMMIT] == commit * 40
        read = question_source(recipe, "umim_gsm8k", digests).answers
        assert read is not None and dict(read.options)["task_revision"] == commit * 40


def test_a_table_of_the_hub_that_cannot_be_asked_for_its_commit_needs_a_revision(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    recipe = generated_table(tiny_checkpoint, tmp_path, tasks=["umim_gsm8k"], data_files=None)
    with pytest.raises(CorpusError, match=r"pinned by its revision; got openai/gsm8k"):
        data_digests(recipe, "umim_gsm8k")


@pytest.mark.parametrize("changes", [{}, {"tasks": ["umim_ruler_1k"], "data_files": None}])
def test_a_revision_of_no_table_of_the_hub_is_refused(
    tiny_checkpoint: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    recipe = generated_table(tiny_checkpoint, tmp_path, revisions={"umim_amc23": "main"}, **changes)
    with pytest.raises(ConfigError, match=r"revisions are of tasks .*got umim_amc23"):
        check_data(recipe)


def test_a_data_file_that_is_missing_is_named(tiny_checkpoint: Path, tmp_path: Path) -> None:
    recipe = generated_table(tiny_checkpoint, tmp_path)
    with pytest.raises(CorpusError, match=r"math/amc23\.jsonl"):
        run_table(tmp_path / "root", recipe)


@pytest.mark.parametrize("name", ["hub", "task_data"])
def test_a_folder_that_is_missing_is_named(
    tiny_checkpoint: Path, tmp_path: Path, name: str
) -> None:
    recipe = tiny_table(tiny_checkpoint, tmp_path).model_copy(
        update={"hub": None, "task_data": None, name: str(tmp_path / "absent")}
    )
    with pytest.raises(CorpusError, match=rf"{name} of a table must be a folder; got .*absent"):
        run_table(tmp_path / "root", recipe)
