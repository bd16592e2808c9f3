"""Tables of the paper: shards found after a kill and equal however spread; answers; baselines."""

from __future__ import annotations

import itertools
import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import tasks.stages.table as stage
from support.kills import kill_once
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
from tasks.data.table_jobs import (
    SHARDS,
    ModelPlace,
    measure_text,
    read_shards,
    score_shard,
    table_row,
)
from tasks.run.stage import Artifact
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.checkpoint.checkpoint_files import resolve_checkpoint
from umim_core.config.recipe import DEFAULT_TASK
from umim_core.config.table_recipe import TableRecipe, TableSetting, TableText
from umim_core.errors import BackboneError, CheckpointError, ConfigError, EvaluationError
from umim_core.evaluation.harness import UmimLM
from umim_core.evaluation.perplexity import perplexity
from umim_core.evaluation.questions import (
    QuestionScores,
    QuestionSet,
    QuestionSource,
    score_range,
    shard_seed,
)
from umim_core.evaluation.sizes import Sizes
from umim_core.evaluation.tasks.lm_eval_tasks import load_tasks, run_task
from umim_core.evaluation.text_metrics import contest_answer
from umim_core.model.umim import UMIM
from umim_core.store.artifacts import directory_digest, read_json
from umim_core.task_sets.generation_spec import GENERATION_TASKS, TaskOptions, make_rows
from umim_core.text.sources import source_of
from umim_core.text.tokens import first_ids

MERGES = [(0, "none"), (1, "all")]  # of the settings of a tiny table, by number


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions and a text, and what stands for the hub."""
    return write_hub(write_questions(tmp_path_factory.mktemp("data")))


@pytest.fixture(scope="module")
def scored(tiny_checkpoint: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Walk:
    """An undisturbed run of given answers, and of a text."""
    text = {"kind": "text", "paths": [str(data / "text.txt")]}
    texts = {"t": {"source": text, "segment_length": 32, "rows": 3}}
    return run_table(
        tmp_path_factory.mktemp("whole"), tiny_table(tiny_checkpoint, data, texts=texts)
    )


@pytest.fixture(scope="module")
def generated(tiny_checkpoint: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Walk:
    """A run of sampled answers."""
    return run_table(tmp_path_factory.mktemp("answers"), generated_table(tiny_checkpoint, data))


def table(run: Walk) -> dict[str, Any]:
    found: Any = read_json(run.artifacts[-1].path / stage.TABLE)
    return found


def shards(run: Walk) -> list[Artifact]:
    return [artifact for artifact in run.artifacts if artifact.stage == "shards"]


# Given answers, and a text


def test_the_same_questions_in_another_folder_are_the_same_table(
    scored: Walk, data: Path, tmp_path: Path
) -> None:
    changes = {"task_data": str(shutil.copytree(data, tmp_path / "elsewhere"))}
    changes["cluster"] = scored.recipe.cluster.model_copy(update={"cpus": 1})
    assert run_table(scored.root, scored.recipe.model_copy(update=changes)).executed() == []


def at_once(checkpoint: Path, merge: str, task: str, options: dict[str, str]) -> dict[str, float]:
    """The figures of a task whose questions are one shard."""
    settings = {"dtype": "float32", "batch_size": 4, "raw_tail": 0}
    model = UmimLM(checkpoint, merge, **settings).sharing_contexts()
    loaded = load_tasks([task], options)[task]
    return score_range(model, loaded, range(len(loaded.eval_docs))).figures()


@pytest.mark.parametrize(("number", "merge"), MERGES)
def test_means_are_those_of_the_task_scored_at_once(
    scored: Walk, tiny_checkpoint: Path, data: Path, number: int, merge: Any
) -> None:
    row, base = table(scored)["scores"][number], table(scored)["scores"][0]
    once = at_once(tiny_checkpoint, merge, DEFAULT_TASK, {"task_data": str(data)})
    assert row["questions"] == once["questions"] == QUESTIONS
    assert row["acc"]["mean"] == once["acc"] and row["acc_norm"]["mean"] == once["acc_norm"]
    assert row["acc"]["stderr"] == pytest.approx(once["acc_stderr"])
    assert (row["token_reduction"] or 0.0) == once["token_reduction"]
    assert row["acc_difference"]["mean"] == pytest.approx(row["acc"]["mean"] - base["acc"]["mean"])
    names = sorted(path.stem for path in (shards(scored)[number].path / SHARDS).iterdir())
    assert [tuple(map(int, name.split("-"))) for name in names] == [(0, 2), (2, 4), (4, 6), (6, 7)]


def test_a_text_has_the_figures_of_its_rows(
    scored: Walk, tiny_checkpoint: Path, data: Path
) -> None:
    (found,) = table(scored)["texts"]
    umim = UMIM.from_pretrained(tiny_checkpoint, dtype="float32")
    ids = first_ids(source_of((str(data / "text.txt"),)), umim.backbone.tokenizer, 10**6)
    cut = ids[: len(ids) // 32 * 32].reshape(-1, 32)
    read = [cut[index * len(cut) // 3] for index in range(3)]
    assert found["ppl_umim"] == pytest.approx(perplexity(read, umim.merged_model).ppl)
    assert found["ppl_base"] == pytest.approx(perplexity(read, umim.merged_model.base()).ppl)
    assert found["rows"] == 3 and 0 < found["top1"] <= 1 and found["text"] == "t"


def test_token_reduction_leaves_out_prompts_that_are_scored_raw(
    tiny_checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = "umim_openbookqa"
    own = {"settings": [{"name": "own", "merge": "prompt"}], "tasks": [task]}
    recipe = tiny_table(tiny_checkpoint, data, **own, task_data=None, hub=str(data))
    (row,) = table(run_table(tmp_path, recipe))["scores"]
    monkeypatch.chdir(data)
    once = at_once(tiny_checkpoint, "prompt", task, {})
    assert row["token_reduction"] == pytest.approx(once["token_reduction"], rel=1e-12)
    assert row["token_reduction"] > 0 and row["acc_seq"]["mean"] == once["acc_seq"]


def test_a_run_cut_off_half_way_scores_the_rest_and_nothing_twice(
    scored: Walk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int]] = []

    def score(place: ModelPlace, setting: TableSetting, *of: Any) -> QuestionScores:
        if len(asked) == 6:  # in the middle of the second setting
            asked.append(("cut", 0))
            raise KeyboardInterrupt
        asked.append((setting.name, of[2]))
        return score_shard(place, setting, *of)

    monkeypatch.setattr(stage, "score_shard", score)
    with pytest.raises(KeyboardInterrupt):
        run_table(tmp_path, scored.recipe)
    again = run_table(tmp_path, scored.recipe)
    places = [(name, first) for name in ("base", "own") for first in (0, 2, 4, 6)]
    assert sorted(place for place in asked if place[0] != "cut") == places
    assert [a.digest for a in again.artifacts] == [a.digest for a in scored.artifacts]


# Sampled answers


def test_answers_sizes_and_limits_are_kept_by_question(generated: Walk, data: Path) -> None:
    base, own = (read_shards(artifact.path) for artifact in shards(generated))
    assert len(own.answers) == len(own.sizes) == len(base.answers) == QUESTIONS
    assert {len(texts) for texts in own.answers} == {2}
    rows = (data / "math-ai" / "amc23" / "test.jsonl").read_text("utf-8").splitlines()
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
    body = table(generated)
    assert body["limits"] == {"questions": None, "new_tokens": 6, "answers": 2}
    for row in body["scores"]:
        assert (row["questions"], row["new_tokens"], row["answers"]) == (QUESTIONS, 6, 2)
    assert "pass@1_difference" in row and "prompt_tr_difference" not in row


@pytest.mark.parametrize(("number", "merge"), MERGES)
def test_a_shard_has_the_answers_and_figures_of_its_questions_run_alone(
    generated: Walk, tiny_checkpoint: Path, data: Path, number: int, merge: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(data)
    task = load_tasks(["umim_amc23"])["umim_amc23"]
    task.set_config("generation_kwargs", task.get_config("generation_kwargs") | {"max_gen_toks": 6})
    task.set_config("repeats", 2)
    with torch.random.fork_rng():
        torch.manual_seed(shard_seed(generated.recipe.seed, 0))
        _, samples = run_task(UmimLM(tiny_checkpoint, merge, batch_size=4), task, range(2))
    kept = read_shards(shards(generated)[number].path)
    assert kept.answers[:2] == [list(map(str, sample["resps"][0])) for sample in samples]
    reductions = {"prompt_tr", "gen_kv_tr", "cumulative_kv_tr"} if number else set()
    names = {"pass@1"} | reductions
    assert set(kept.values) == names
    for name in names:
        assert kept.values[name][:2] == [sample[name] for sample in samples]


def test_a_task_beyond_the_trained_context_is_not_run_and_says_so(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    changes = {"tasks": ["umim_ruler_1k"], "hub": None, "answers": None}
    run = run_table(tmp_path, generated_table(tiny_checkpoint, tmp_path, **changes))
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


@pytest.mark.full
def test_confirmed_programs_are_run_and_judged_by_their_tests(
    programs: Path, tmp_path: Path
) -> None:
    options = {"tasks": ["umim_humaneval"], "new_tokens": 1, "confirm_run_unsafe_code": True}
    recipe = generated_table(Path("umim-docs-llama"), programs, **options, answers=1)
    for made in shards(run_table(tmp_path / "root", recipe)):
        assert read_shards(made.path).values["pass@1"] == [1.0, 0.0]


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
    task, options = (
        GENERATION_TASKS.find("umim_ruler_1k"),
        TaskOptions(task_new_tokens=4),
    )
    pairs: Counter[tuple[int, ...]] = Counter()
    for row in make_rows(task, options, tokenizer, "train"):
        ids = tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
        pairs.update(itertools.pairwise(ids))
    rules = set(map(tuple, own.rules.ids_by_order[2].tolist()))
    assert rules and rules < {pair for pair, count in pairs.items() if count >= 50}
    saved = {row["setting"]: row["context_token_reduction"] for row in table(run)["scores"]}
    assert saved["mined"] > saved["shipped"] + 0.05


# Baselines

SETTINGS: list[dict[str, Any]] = [
    {"name": "base", "merge": "none"},
    {"name": "own", "merge": "prompt"},
    {"name": "matched", "merge": "prompt", "method": "truncation"},
    {"name": "target", "merge": "prompt", "method": "truncation", "target_tr": 0.5},
    {"name": "evicted", "merge": "prompt", "method": "span-eviction-0"},
    {"name": "kept", "merge": "prompt", "method": "truncation", "target_tr": 0.5, "raw_tail": 99},
]


@pytest.mark.parametrize("make", [tiny_table, generated_table], ids=["scored", "generated"])
def test_baselines_drop_what_the_rules_save_or_what_they_are_asked_for(
    tiny_checkpoint: Path, data: Path, tmp_path: Path, make: Callable[..., TableRecipe]
) -> None:
    options = {"questions": 2, "settings": SETTINGS}
    options |= {"answers": 1} if make is generated_table else {}
    run = run_table(tmp_path, make(tiny_checkpoint, data, **options))
    found = {row["setting"]: row for row in table(run)["scores"]}
    prompts = {name: row["context_token_reduction"] for name, row in found.items()}
    assert prompts["base"] is None
    assert prompts["matched"] == prompts["own"] > 0.0 == prompts["evicted"]
    assert prompts["target"] == pytest.approx(0.5, abs=0.05)  # half a token of each prompt
    assert prompts["kept"] == 0.0  # a raw tail as long as the prompts must stay
    caches = {name: row["cache_reduction"] for name, row in found.items()}
    assert 0.0 < caches.pop("evicted") < prompts["own"]  # the first token's column always stays
    assert set(caches.values()) == {None}
    over = {name: row["shortfall"] for name, row in found.items()}
    assert over["base"] is over["own"] is None
    assert over["matched"] == over["target"] == 0.0 < over["evicted"]
    assert over["kept"] == pytest.approx(0.5, abs=0.05)
    # Of a span that begins a prompt the first column stays: what eviction lacks to the rules.
    assert over["evicted"] == pytest.approx(prompts["own"] - found["evicted"]["cache_reduction"])


# Workers


@pytest.fixture(params=[tiny_table, generated_table], ids=["choices", "answers"])
def table_of(
    request: pytest.FixtureRequest, tiny_checkpoint: Path, data: Path
) -> Callable[..., TableRecipe]:
    """Makes recipes of answers that are scored, then of answers that are sampled."""
    return partial(request.param, tiny_checkpoint, data)


@pytest.mark.full
def test_a_killed_run_on_a_cluster_counts_nothing_twice(
    table_of: Callable[..., TableRecipe], tmp_path: Path
) -> None:
    recipe = table_of(cluster={"workers": 1, "cpus": 1}, shard=1)
    here = run_table(tmp_path / "here", table_of(shard=1))
    tmp_path /= "there"
    kill_once(partial(finished, tmp_path), run_table_of, tmp_path, recipe.model_dump_json())
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


def test_what_another_machine_has_otherwise_is_refused(tiny_checkpoint: Path, data: Path) -> None:
    place = ModelPlace(str(tiny_checkpoint), "0" * 64, "cpu", "float32", 4)
    text = TableText(source=source_of((str(data / "text.txt"),)))
    with pytest.raises(CheckpointError, match=r"the same checkpoint.* instead of 000000000000"):
        measure_text(place, text)
    place = replace(place, digest=directory_digest(tiny_checkpoint))
    source = QuestionSource("umim_docstrings", folder=str(data))
    setting = TableSetting(name="a", merge="prompt", method="truncation")
    with pytest.raises(BackboneError, match=r"truncation \(o/c@commit\); got truncation"):
        score_shard(place, setting, source, QuestionSet(1, "", ("acc",)), 0, 1, "o/c@commit")
    base, own = (QuestionScores({"acc": [1.0]}, [prompt]) for prompt in "ab")
    with pytest.raises(EvaluationError, match="other prompts under own"):
        table_row("t", "own", own, base)


# Refusals


def mined(task: str, tau: int) -> dict[str, Any]:
    settings = [{"name": "mined", "merge": "prompt", "mine_tau": tau}]
    return {"tasks": [task], "questions": 1, "answers": None, "settings": settings}


FOREIGN = {"tasks": ["humaneval"], "hub": None, "confirm_run_unsafe_code": True}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": ["umim_humaneval"]}, r"umim_humaneval.*--confirm-run-unsafe-code"),
        # lm-eval reads thousands of files to know its tasks
        pytest.param(FOREIGN, r"run confined in a table.*got humaneval", marks=pytest.mark.full),
        (mined("umim_amc23", 5), "mine_tau is for generated tasks: .*; got umim_amc23"),
        pytest.param(
            mined("umim_ruler_1k", 10**6), "umim_ruler_1k reach; got 10000", marks=pytest.mark.full
        ),
    ],
)
def test_programs_that_nobody_confirmed_and_rules_that_cannot_be_mined_are_refused(
    programs: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    recipe = generated_table(Path("umim-docs-llama"), programs, **changes)
    with pytest.raises(ConfigError, match=message):
        run_table(tmp_path / "root", recipe)
