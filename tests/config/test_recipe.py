"""Recipes: shipped ones validate, wrong ones are refused with file, field, value and rule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.parts import plan
from tasks.report.paper import paper_tables
from tasks.run.pipeline import open_pipeline
from tasks.run.recipes import find_recipe, recipe_names
from umim_core.config.recipe import PreferenceConfig, Recipe
from umim_core.config.recipe_files import load_any_recipe
from umim_core.config.table_recipe import TableRecipe
from umim_core.errors import ConfigError

TRAIN = {"max_steps": 4, "batch_size": 4}
GOOD: dict[str, Any] = {
    "name": "small",
    "corpus": {"kind": "docstrings"},
    "cells": [{"backbone": "umim-docs-llama", "tau": 5, "adapt": True}],
    "distill": TRAIN,
    "adapt": {"sft": TRAIN, "dpo": TRAIN},
}


def write(path: Path, raw: object) -> Path:
    path.write_text(yaml.safe_dump(raw), encoding="utf-8")
    return path


def changed(where: str, value: object, good: dict[str, Any] = GOOD) -> dict[str, Any]:
    """A copy of a good recipe with one field set, or removed (...); ``where`` ends in its name."""
    raw = json.loads(json.dumps(good))
    *outer, last = [int(part) if part.isdigit() else part for part in where.split(".")]
    node: Any = raw
    for part in outer:
        node = node[part] if isinstance(part, int) else node.setdefault(part, {})
    if value is ...:
        del node[last]
    else:
        node[last] = value
    return raw


@pytest.mark.parametrize("bf16", [True, False])
def test_a_backbone_is_measured_as_it_is_distilled(bf16: bool) -> None:
    for use_gpu, device in ((False, "cpu"), (True, "cuda")):
        raw = changed("distill.bf16", bf16) | {"cluster": {"use_gpu": use_gpu}}
        dtype = "bfloat16" if use_gpu and bf16 else "float32"
        recipe = Recipe.model_validate(raw)
        assert recipe.cluster.device == device
        assert recipe.distill.backbone_dtype(device) == dtype
        assert PreferenceConfig(max_steps=1).backbone_dtype(device) == "float32"


HARDWARE = {"name": "test GPU", "gpus": 2, "gpu_memory_gib": 48}
SHAPE = {
    **{"hidden_size": 8, "intermediate_size": 16, "layers": 1, "heads": 2, "kv_heads": 1},
    **{"head_dim": 4, "vocab_size": 32, "tied": True, "gated_mlp": True},
}
ON_GPUS = GOOD | {"cluster": {"workers": 2, "use_gpu": True}, "hardware": HARDWARE}
QUESTIONS = [{"kind": "dataset", "name": "a/b", "field": "problem"}]
GENERATED = GOOD | {"corpus": {"kind": "generated", "questions": QUESTIONS, "model": "m"}}
DOCS = {"kind": "docstrings"}
FILES = {
    "kind": "files",
    **{split: {"kind": "text", "paths": ["a.txt"]} for split in ("train", "valid", "test")},
}
NAMED_SO = FILES | {"train": {"kind": "text", "text": ["a.txt"]}}  # as its kind
EMPTY = FILES | {"train": {"kind": "text", "paths": []}}
MIXTURE = GOOD | {"corpus": {"kind": "mixture", "parts": {"a": FILES, "b": DOCS}}}
ROWED = GOOD | {"cells": [{"backbone": "a", "rule_rows": 2}], "adapt": None}
TABLE = {
    **{"name": "x", "kind": "table", "table": "tab:QA", "checkpoint": "umim-docs-llama"},
    **{"settings": [{"name": "base", "merge": "none"}], "tasks": ["piqa"]},
}
SHORTENED = {"name": "a", "merge": "prompt", "method": "truncation"}
CURVES = {"name": "c", "kind": "adaptation", "questions": DOCS, "taus": [5], **GOOD["adapt"]}
CURVES |= {"checkpoints": ["umim-docs-llama"]}
REFUSED: dict[str, tuple[dict[str, Any], list[tuple[str, object, str]]]] = {
    "pipeline": (
        GOOD,
        [
            *(
                (field, ..., f"{field} must be given; got no")
                for field in ("name", "corpus", "distill")
            ),
            ("name", "Big Name!", "name must match .*; got Big Name!"),
            ("kind", "tabel", r"kind must be one of .*; got tabel\. Did you mean 'table'"),
            ("cells", [], "cells must have 1 or more entries"),
            ("cells.0.overlap", "all", r"cells\.0\.overlap must be 'greedy' or 'none'; got all"),
            ("corpus.kind", "web", "corpus must have a 'kind' .* of 'docstrings', .*; got web"),
            ("corpus", {"train_tokens": 5}, r"corpus must have a 'kind'; got nothing\. Add it"),
            ("corpus", EMPTY, r"corpus\.train\.paths must have 1 or more entries; got \[\]"),
            ("corpus", NAMED_SO, r"corpus\.train\.paths must be given; got nothing"),
            ("distill.max_steps", 0, r"distill\.max_steps must be at least 1; got 0"),
            ("distill.learning_rate", 2, r"distill\.learning_rate must be at most 1\.0; got 2"),
            ("distill.clip_norm", float("inf"), "clip_norm must be a finite number; got inf"),
            ("adapt.dpo.bf16", True, r"adapt\.dpo\.bf16 must be a known field; got True"),
            ("adapt.settings", ["WT + FT", "WT + FT"], "settings must all be different"),
            ("adapt", None, "a cell asks for adaptation, but the recipe has no 'adapt' section"),
            ("task", None, "a cell asks for adaptation, but the recipe has no 'task' section"),
            ("cluster.workers", 3, r"cluster\.workers must divide every batch_size"),
            ("cluster", {"address": "h:1", "object_store_gib": 2}, "is of a cluster started here"),
            ("cluster", {"strategy": "deepspeed", "workers": 0}, "deepspeed needs workers"),
            ("cells", [{"backbone": "a"}, {"backbone": "a", "tau": 5}], "cells must all be"),
            ("distill", {"max_steps": 5, "prompt_rows": 0.6, "copy_rows": 0.6}, "add up to 1 at"),
            ("cluster", {"use_gpu": True, "workers": 0, "parallel_stages": 2}, "share no GPU"),
            ("cells.0", {"backbone": "a", "kind": "linear", "depth": 3}, r"cells\.0: a linear mer"),
            ("distill.row_rate", 4.0, r"distill\.row_rate needs a cell with rule_rows .*; got 4"),
            ("adapt.sft.row_rate", 4.0, r"sft\.row_rate needs a cell with rule_rows .*; got 4"),
        ],
    ),
    "rule rows": (
        ROWED,
        [("cluster", {"workers": 1, "strategy": "deepspeed"}, "ZeRO-2 cannot move single rows")],
    ),
    "hardware": (
        ON_GPUS,
        [
            ("cluster", {"workers": 2}, "needs use_gpu true, workers 2"),
            ("cluster", {"workers": 1, "use_gpu": True}, "needs use_gpu true, workers 2"),
            ("hardware.shapes", {"other": SHAPE}, "no cell has the backbone 'other'"),
        ],
    ),
    "generated corpus": (
        GENERATED,
        [
            ("corpus.max_tokens", 200, "max_question_tokens must be below max_tokens"),
            ("corpus.splits", {"train": 0.95}, "train, valid and test must add up to 1"),
            ("corpus.template", "asks nothing", "template must contain {question}"),
        ],
    ),
    "mixture": (
        MIXTURE,
        [
            ("corpus.parts", {"a": DOCS, "b": DOCS}, "must be one part at most"),
            ("corpus.parts", {"a b": FILES}, "must match"),
            (
                "corpus.parts",
                {"a": FILES | {"train": {"kind": "ids", "path": "x.npy"}}},
                "'text', 'jsonl', 'parquet'",
            ),
        ],
    ),
    "table": (
        TABLE | {"task_data": "d"},
        [
            ("settings", [], "tasks and settings come together"),
            ("settings.0.mine_tau", 5, "makes rules to merge by"),
            ("settings.0.protect", ["digits"], "protect keeps tokens from being merged"),
            ("settings.0.target_tr", 0.2, "target_tr is the budget of a baseline"),
            ("settings", [{"name": "a", "merge": "all", "raw_tail": 2}], "contexts that are matc"),
            ("settings", [{"name": "a", "merge": "all", "method": "truncation"}], "prompts only"),
            ("settings", [SHORTENED | {"protect": ["digits"]}], "of the checkpoint's own rules"),
            ("settings", [SHORTENED, SHORTENED], "settings must all be different"),
            ("tasks", ["piqa", "copa"], "data of one choice task"),
            ("hub", "h", "hub and task_data both say"),
        ],
    ),
    "table of texts": (
        TABLE | {"tasks": [], "settings": [], "texts": {"a": {"source": FILES["train"]}}},
        [
            ("texts", {}, "name tasks with settings, or texts"),
        ],
    ),
    "adaptation": (
        CURVES,
        [
            ("taus", [5, 5], "taus must all be different"),
            ("taus", [0], "taus"),
            ("checkpoints", [], "checkpoints"),
            ("part", "sequence", "leave out part"),
            ("seed", 5, "name them as seeds, not as seed"),
            ("cluster", {"workers": 3}, "cluster.workers must divide"),
        ],
    ),
}
CASES = [(kind, *case) for kind, (_, cases) in REFUSED.items() for case in cases]


@pytest.mark.parametrize("kind", REFUSED)
def test_a_recipe_survives_being_saved(tmp_path: Path, kind: str) -> None:
    recipe = load_any_recipe(write(tmp_path / "a.yaml", REFUSED[kind][0]))
    assert load_any_recipe(write(tmp_path / "b.yaml", recipe.model_dump(mode="json"))) == recipe


@pytest.mark.parametrize(("kind", "where", "value", "message"), CASES)
def test_a_field_out_of_bounds_is_named(
    tmp_path: Path, kind: str, where: str, value: object, message: str
) -> None:
    path = write(tmp_path / "mine.yaml", changed(where, value, REFUSED[kind][0]))
    with pytest.raises(ConfigError, match=rf"^mine\.yaml: .*{message}.*"):
        load_any_recipe(path)


@pytest.mark.parametrize(
    ("raw", "remedy"),
    [
        (GOOD | {"segment_lenght": 64}, "Did you mean 'segment_length'?"),
        (
            GOOD | {"corpus": {"kind": "docstrings", "train_token": 5}},
            "Did you mean 'train_tokens'?",
        ),
        (changed("corpus.parts.a.licens", "", MIXTURE), "Did you mean 'licence'?"),
        (changed("cells.0.depht", 1), "Did you mean 'depth'?"),
        (GOOD | {"distill": {"max_stesp": 5}}, "Did you mean 'max_steps'?"),
        (GOOD | {"max_step": 5}, "'max_steps' is a field of distill, adapt.sft, adapt.dpo."),
        (changed("distill.seed", 5), "'seed' is a field of the recipe itself, corpus."),
        (changed("distill.sed", 5), "'seed' is a field of the recipe itself, corpus."),
        (
            GOOD | {"corpus": {"kind": "docstrings", "model": 1}},
            "'model' is a field of corpus of another kind.",
        ),
        (GOOD | {"nonsense": 5}, "Leave it out."),
    ],
)
def test_a_misspelt_field_is_told_the_right_name(tmp_path: Path, raw: object, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_any_recipe(write(tmp_path / "x.yaml", raw))
    assert caught.value.remedy == remedy


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("embedded", TableRecipe, "flow f needs a recipe of kind table; got embedded, of kind"),
        ("tables/humaneval-smollm2", Recipe, "flow f needs a recipe of kind pipeline; got tables"),
    ],
)
def test_a_flow_refuses_recipes_of_another_kind(
    name: str, kind: type[Recipe] | type[TableRecipe], message: str
) -> None:
    with pytest.raises(ConfigError, match=message), open_pipeline(name, "f", kind):
        pass


LABELS = {table.label for table in paper_tables()}


@pytest.mark.parametrize("name", recipe_names("tables/"))
def test_a_table_recipe_is_valid_and_of_a_table_of_the_paper(name: str) -> None:
    recipe = find_recipe(name)
    assert isinstance(recipe, TableRecipe) and not recipe.confirm_run_unsafe_code
    assert name == f"tables/{recipe.name}" and recipe.table in LABELS
    steps = [step["stage"] for step in plan(recipe)]
    cells = len(recipe.tasks) * len(recipe.settings)
    expected = ["questions"] * len(recipe.tasks) + ["shards"] * cells + ["text"] * len(recipe.texts)
    assert [step for step in steps if step != "mined"] == [*expected, "table"]
    mined = len({setting.mine_tau for setting in recipe.settings} - {None})  # settings share them
    assert steps.count("mined") == len(recipe.tasks) * mined
    if not name.endswith(("-smollm2", "-qwen")):  # one of the paper's own backbones
        assert recipe.cluster.use_gpu and recipe.checkpoint.partition("/")[0] in recipe_names()


def test_shipped_recipes_are_named_as_their_files_and_every_table_has_a_small_variant() -> None:
    assert all(find_recipe(name).name == name for name in recipe_names())
    names = [name.removeprefix("tables/") for name in recipe_names("tables/")]
    kinds = {name.removesuffix("-smollm2") for name in names if name.endswith("-smollm2")}
    assert all(any(name.startswith(f"{kind}-") for kind in kinds) for name in names)
    with pytest.raises(ConfigError, match=r"Did you mean 'tables/perplexity-smollm2'\?"):
        find_recipe("tables/perplexity-smollm")
