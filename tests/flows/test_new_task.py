"""A task that is one file and a setting that is one row: from questions to the comparison."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from support.tiny_pipeline import Walk, walk
from tasks.report.comparison import comparison, comparison_rows
from tasks.run.recipes import find_recipe
from tasks.run.stage import Artifact
from umim_core import task_sets
from umim_core.adaptation import settings
from umim_core.adaptation.settings import Setting
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.config.recipe import DEFAULT_TASK, Recipe
from umim_core.errors import ConfigError
from umim_core.rules.ruleset import RuleSet
from umim_core.task_sets.spec import TASKS
from umim_core.text.token_ids import encode

_SOURCE = {"kind": "dataset", "name": "a/b", "split": "train"}
FILES_CORPUS = {"kind": "files", **dict.fromkeys(("train", "valid", "test"), _SOURCE)}
FILES = Path(__file__).parents[1] / "support" / "new_files"


NEW_ROW = Setting("WT + DPO + FT", "WT + DPO", "task", "sft")
MADE = ("task", "task-rules", "with-rules", "dpo", "sft")


@pytest.fixture(scope="module")
def run(tiny_run: Walk, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walk]:
    """A run, on a copy of a whole one's artifacts, that adapts to a new task and scores both.

    It asks for a new row of the table of settings, and for one that begins with random weights.
    """
    raw = tiny_run.recipe.model_dump(mode="json") | {"tasks": ["rhymes", DEFAULT_TASK]}
    raw["adapt"]["settings"] = [NEW_ROW.name, "Task-trained"]
    root = shutil.copytree(tiny_run.root, tmp_path_factory.mktemp("tasks") / "root")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task_sets, "__path__", [*task_sets.__path__, str(FILES)])
        patch.setattr(settings, "SETTINGS", (*settings.SETTINGS, NEW_ROW))
        yield walk(root, Recipe.model_validate(raw))
    del sys.modules["umim_core.task_sets.rhymes"], TASKS._found["rhymes"]


@pytest.fixture(scope="module")
def made(run: Walk) -> dict[str, list[Artifact]]:
    """What of the run's adaptation is there, by stage and in order."""
    return {n: [call.artifact for call in run.calls if call.name == n] for n in MADE}


@pytest.mark.full
def test_a_file_is_all_that_a_new_task_needs_and_a_row_that_a_new_setting_does(run: Walk) -> None:
    rows = {row.setting: row for row in comparison_rows(run.results, run.recipe.seed)}
    assert list(rows) == list(run.results[0].settings) == ["WT", "Task-trained", NEW_ROW.name]
    wt, own = rows["WT"], rows[NEW_ROW.name]
    assert wt.tasks == ("rhymes", DEFAULT_TASK) and own.metric("top1") is not None
    for setting in ("base", *rows):
        for metric in ("acc", "acc_tok"):
            assert 0 <= wt.score(setting, "rhymes", metric) <= 1
    assert wt.score("WT", "rhymes", "token_reduction") > 0
    assert {"rhymes_acc_umim", "rhymes_acc_tok_base", "accuracy_umim"} <= set(wt.measured())
    assert {"rhymes acc. WT", "rhymes acc. adapted"} <= set(comparison([wt, own]).headings)


@pytest.mark.full
def test_what_does_not_depend_on_the_new_task_is_found(run: Walk) -> None:
    executed = run.executed()
    assert [name for name in executed if name in MADE] == [*MADE, "sft"]
    assert executed.count("task-score") == 4  # three settings and the base model, on the new task
    assert not {"distill", "count", "filter", "benchmark"} & set(executed)


@pytest.mark.full
def test_a_setting_starts_from_another_or_from_random_weights_with_the_tasks_rules(
    run: Walk, made: dict[str, list[Artifact]]
) -> None:
    [task_rules], [rules], [preferred] = made["task-rules"], made["with-rules"], made["dpo"]
    trained, tuned = made["sft"]
    starts = {preferred: rules, trained: task_rules, tuned: preferred}
    assert all(one.manifest()["inputs"]["start"] == begun.digest for one, begun in starts.items())
    table = Path("rules/rules.parquet")
    own, mined = trained.path / "checkpoint" / table, task_rules.path / table
    assert own.read_bytes() == mined.read_bytes()
    weights = [
        (artifact.path / "checkpoint" / "model.safetensors").read_bytes()
        for artifact in run.results[0].settings.values()
    ]
    assert len({*weights}) == 3


@pytest.mark.full
def test_training_reads_the_prompt_and_merges_where_the_task_says(
    run: Walk, made: dict[str, list[Artifact]]
) -> None:
    (task,) = (artifact for artifact in made["task"] if artifact.executed)
    tokenizer = load_tokenizer(run.recipe.cells[0].backbone)
    found = RuleSet.load(made["task-rules"][0].path / "rules")
    answer = encode(tokenizer, "Answer: the")[-2:]  # a pair across the end of the prompt
    assert tuple(answer) in {tuple(row) for row in found.ids_by_order[2].tolist()}
    for sft in made["sft"]:
        asked = sft.manifest()["config"]["questions"]
        assert (asked["task"], asked["form"]["part"]) == ("rhymes", "sequence")
    assert task.manifest()["inputs"] == {"task.sources.words": "1"}


@pytest.mark.parametrize(
    ("tasks", "corpus", "adapt", "message"),
    [
        (["test-only"], None, True, "to test-only needs the splits .*; got no train and"),
        (["test-only", "of-files"], None, False, "the task of-files needs a corpus of kind files"),
        (None, FILES_CORPUS, True, f"the task {DEFAULT_TASK} needs"),
        (["test-only"], None, False, None),
        (None, FILES_CORPUS, False, None),
    ],
)
def test_a_recipe_names_tasks_that_fit(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tasks: list[str] | None,
    corpus: dict[str, object] | None,
    adapt: bool,
    message: str | None,
) -> None:
    usual = TASKS.find(DEFAULT_TASK)
    own = replace(usual, name="test-only", splits=("test",), corpus=None)
    monkeypatch.setitem(TASKS._found, "test-only", own)
    monkeypatch.setitem(TASKS._found, "of-files", replace(usual, name="of-files", corpus="files"))
    raw = find_recipe("embedded").model_dump(mode="json", exclude_unset=True)
    raw |= ({"tasks": tasks} if tasks else {}) | ({"corpus": corpus} if corpus else {})
    for cell in raw["cells"]:
        cell["adapt"] = adapt
    raw["cells"] = raw["cells"][:1]
    (tmp_path / "own.yaml").write_text(json.dumps(raw), "utf-8")
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        find_recipe(str(tmp_path / "own.yaml"))
