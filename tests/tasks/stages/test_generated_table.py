"""Tables of generated answers: texts, sizes and reductions by question, limits, cells not run."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from support.tiny_pipeline import Walk
from support.tiny_table import QUESTIONS, generated_table, run_table, write_hub
from tasks.data.table_jobs import read_report, read_shards
from tasks.run.stage import Artifact
from tasks.stages.table import TABLE
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.checkpoint.checkpoint_files import resolve_checkpoint
from umim_core.errors import ConfigError
from umim_core.evaluation.harness import UmimLM
from umim_core.evaluation.questions import shard_seed
from umim_core.evaluation.sizes import Sizes
from umim_core.evaluation.tasks.lm_eval_tasks import load_tasks, run_task
from umim_core.evaluation.text_metrics import contest_answer
from umim_core.task_sets.generation_spec import GENERATION_TASKS, TaskOptions, make_rows


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hub(tmp_path_factory.mktemp("problems"))


@pytest.fixture(scope="module")
def whole(tiny_checkpoint: Path, problems: Path, tmp_path_factory: pytest.TempPathFactory) -> Walk:
    return run_table(tmp_path_factory.mktemp("whole"), generated_table(tiny_checkpoint, problems))


def shards(run: Walk) -> list[Artifact]:
    return [artifact for artifact in run.artifacts if artifact.stage == "shards"]


def table(run: Walk) -> dict[str, Any]:
    return read_report(run.artifacts[-1].path / TABLE)


def test_answers_and_sizes_are_kept_by_question(whole: Walk, problems: Path) -> None:
    base, own = (read_shards(artifact.path) for artifact in shards(whole))
    assert len(own.answers) == len(own.sizes) == len(base.answers) == QUESTIONS
    assert {len(texts) for texts in own.answers} == {2}
    rows = (problems / "math-ai" / "amc23" / "test.jsonl").read_text("utf-8").splitlines()
    wanted = [[json.loads(row)["answer"]] for row in rows]
    assert own.values["pass@1"] == [
        contest_answer(texts, {"references": references})["pass@1"]
        for texts, references in zip(own.answers, wanted, strict=True)
    ]
    assert sum(own.sizes, Sizes()) == own.total
    assert own.values["prompt_tr"] == [
        1 - sizes.context_units / sizes.context_tokens for sizes in own.sizes
    ]
    assert min(own.values["prompt_tr"]) > 0 and base.total == Sizes()


@pytest.mark.parametrize(("number", "merge"), [(0, "none"), (1, "all")])
def test_a_shard_has_the_answers_and_figures_of_its_questions_run_alone(
    whole: Walk, tiny_checkpoint: Path, problems: Path, number: int, merge: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(problems)
    task = load_tasks(["umim_amc23"])["umim_amc23"]
    task.set_config("generation_kwargs", task.get_config("generation_kwargs") | {"max_gen_toks": 6})
    task.set_config("repeats", 2)
    with torch.random.fork_rng():
        torch.manual_seed(shard_seed(whole.recipe.seed, 0))
        _, samples = run_task(UmimLM(tiny_checkpoint, merge, batch_size=4), task, range(2))
    kept = read_shards(shards(whole)[number].path)
    assert kept.answers[:2] == [list(map(str, sample["resps"][0])) for sample in samples]
    names = {"pass@1", *(("prompt_tr", "gen_kv_tr", "cumulative_kv_tr") if number else ())}
    assert set(kept.values) == names
    for name in names:
        assert kept.values[name][:2] == [sample[name] for sample in samples]


def test_limits_stand_with_the_figures(whole: Walk) -> None:
    body = table(whole)
    assert body["limits"] == {"questions": None, "new_tokens": 6, "answers": 2}
    for row in body["scores"]:
        limits = {name: row[name] for name in ("questions", "new_tokens", "answers")}
        assert limits == {"questions": 7, "new_tokens": 6, "answers": 2}
    assert "pass@1_difference" in row and "prompt_tr_difference" not in row


def test_a_task_beyond_the_trained_context_is_not_run_and_says_so(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    recipe = generated_table(tiny_checkpoint, tmp_path, tasks=["umim_ruler_1k"], hub=None)
    run = run_table(tmp_path, recipe.model_copy(update={"answers": None}))
    assert [row["not_run"] for row in table(run)["scores"]] == ["not run: context"] * 2
    assert all(artifact.metrics["questions"] == 0 for artifact in shards(run))


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder that stands for the hub, with two functions, of which one is right at once."""
    rows = [
        {"task_id": str(wanted), "prompt": "def f():\n    return 1\n    # ", "entry_point": "f",
         "test": f"def check(f):\n    assert f() == {wanted}\n", "canonical_solution": "1"}
        for wanted in (1, 2)
    ]  # fmt: skip
    path = tmp_path / "data" / "openai" / "openai_humaneval" / "test.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return tmp_path / "data"


def test_programs_are_not_run_without_a_confirmation(
    tiny_checkpoint: Path, programs: Path, tmp_path: Path
) -> None:
    recipe = generated_table(tiny_checkpoint, programs, tasks=["umim_humaneval"])
    with pytest.raises(ConfigError, match=r"umim_humaneval.*--confirm-run-unsafe-code"):
        run_table(tmp_path / "root", recipe)


@pytest.mark.full
def test_confirmed_programs_are_run_and_judged_by_their_tests(
    programs: Path, tmp_path: Path
) -> None:
    options = {"tasks": ["umim_humaneval"], "new_tokens": 1, "confirm_run_unsafe_code": True}
    recipe = generated_table(Path("umim-docs-llama"), programs, **options, answers=1)
    for made in shards(run_table(tmp_path / "root", recipe)):
        assert read_shards(made.path).values["pass@1"] == [1.0, 0.0]


@pytest.mark.full  # lm-eval reads thousands of files to know its tasks
def test_unconfined_programs_are_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    options = {"tasks": ["humaneval"], "hub": None, "confirm_run_unsafe_code": True}
    with pytest.raises(ConfigError, match=r"run confined in a table.*got humaneval"):
        run_table(tmp_path / "root", generated_table(tiny_checkpoint, tmp_path, **options))


@pytest.mark.full
def test_a_setting_may_have_rules_of_prompts_that_are_not_scored(tmp_path: Path) -> None:
    settings = [
        {"name": "base", "merge": "none"},
        {"name": "shipped", "merge": "prompt"},
        {"name": "mined", "merge": "prompt", "mine_tau": 50},
    ]
    limits = {"questions": 2, "new_tokens": 4, "answers": None, "hub": None, "settings": settings}
    recipe = generated_table(Path("umim-docs-llama"), tmp_path, tasks=["umim_ruler_1k"], **limits)
    run = run_table(tmp_path, recipe)
    (mined,) = (artifact for artifact in run.artifacts if artifact.stage == "mined")
    shipped = Checkpoint.load(resolve_checkpoint("umim-docs-llama"))
    own = Checkpoint.load(mined.path / "checkpoint")
    assert own.config.backbone == shipped.config.backbone
    tokenizer = load_tokenizer(own.config.backbone)
    task, options = GENERATION_TASKS.find("umim_ruler_1k"), TaskOptions(0, task_new_tokens=4)
    pairs: Counter[tuple[int, ...]] = Counter()
    for row in make_rows(task, options, tokenizer, "train"):
        ids = tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
        pairs.update(itertools.pairwise(ids))
    rules = set(map(tuple, own.rules.ids_by_order[2].tolist()))
    assert rules and rules < {pair for pair, count in pairs.items() if count >= 50}
    saved = {row["setting"]: row["context_token_reduction"] for row in table(run)["scores"]}
    assert saved["mined"] > saved["shipped"] + 0.05


@pytest.mark.parametrize(
    ("task", "tau", "message"),
    [
        ("umim_amc23", 5, "mine_tau is for generated tasks: .*; got umim_amc23"),
        pytest.param(
            "umim_ruler_1k",
            10**6,
            "a count that spans of umim_ruler_1k reach; got 1000000",
            marks=pytest.mark.full,
        ),
    ],
)
def test_rules_that_cannot_be_mined_are_refused(
    tmp_path: Path, task: str, tau: int, message: str
) -> None:
    settings = [{"name": "mined", "merge": "prompt", "mine_tau": tau}]
    limits = {"questions": 1, "answers": None, "settings": settings}
    recipe = generated_table(Path("umim-docs-llama"), write_hub(tmp_path), tasks=[task], **limits)
    with pytest.raises(ConfigError, match=message):
        run_table(tmp_path / "root", recipe)
