"""Every recipe that comes with the checkout: it validates, and its dry run tells what it takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from flows.cli import app
from flows.parts import plan
from support.small_recipe import least_recipe
from tasks.plan.planner import memory_of_cells
from tasks.run.recipes import RECIPES, find_recipe, recipe_names
from umim_core.config.recipe import Recipe
from umim_core.errors import ConfigError, ResourceLimitError

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
BASELINE = {"name": "another", "merge": "prompt", "method": "truncaton"}
ADAPT = {"sft": {"max_steps": 1}, "dpo": {"max_steps": 1}}
PAPERS = ("llama-3.1-8b", "llama-3.2-1b", "gpt2-xl", "deepscaler-1.5b")  # backbones


def load(name: str) -> Recipe:
    recipe = find_recipe(name)
    assert isinstance(recipe, Recipe)
    return recipe


def dry_run(name: str, *options: str) -> Result:
    return CliRunner().invoke(app, ["run", name, "--dry-run", *options])


def write(recipe: dict[str, object], folder: Path) -> str:
    path = folder / "changed.yaml"
    path.write_text(json.dumps(recipe), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_has_the_name_of_its_file_a_plan_and_fits_its_gpus(name: str) -> None:
    recipe = find_recipe(name)
    assert recipe.name == name
    assert recipe.description
    stages = [step["stage"] for step in plan(recipe)]
    assert "tokenize" in stages and {"corpus", "mixture"} & set(stages)
    if isinstance(recipe, Recipe):
        assert stages.count("distill") == len(recipe.cells)
    cells = memory_of_cells(recipe)
    assert len(cells) == (len(recipe.cells) if recipe.cluster.use_gpu else 0)
    for cell in cells:
        cell.check()
        assert cell.fits
        assert 0 < cell.steps <= recipe.distill.max_steps


OTHERS = (*recipe_names("tables/"), *recipe_names("adaptation/"))


@pytest.mark.parametrize("name", [name for name in OTHERS if name.endswith(PAPERS)])
def test_a_table_at_the_papers_scale_has_a_dry_run_without_its_weights(name: str) -> None:
    assert dry_run(name, "--json").exit_code == 0


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_recipe_beside_its_results_is_valid_and_has_a_plan(path: Path) -> None:
    recipe = find_recipe(str(path))
    assert isinstance(recipe, Recipe)
    assert recipe.name == path.stem
    assert [step["stage"] for step in plan(recipe)].count("distill") == len(recipe.cells)


def test_a_dry_run_prints_the_bound_on_memory_for_people() -> None:
    done = dry_run("llama-3.1-8b-wikitext")
    assert done.exit_code == 0, done.output
    for text in ("8 x NVIDIA RTX A6000", "steps at most", "memory of a GPU", "of 48, fits"):
        assert text in done.output


def test_a_dry_run_has_a_line_per_kind_of_stage_however_many_cells_there_are(
    tmp_path: Path,
) -> None:
    cells = [{"backbone": "umim-docs-llama", "tau": tau} for tau in range(3, 203)]
    path = write(least_recipe(cells=cells).model_dump(mode="json", exclude_unset=True), tmp_path)
    lines = dry_run(path).output.splitlines()
    (filters,) = (line.split() for line in lines if line.startswith("filter "))
    assert filters[1] == "200" and len(lines) < 20
    steps = json.loads(dry_run(path, "--json").output)["stages"]
    assert [step["stage"] for step in steps].count("filter") == 200


def test_a_training_that_does_not_fit_is_told_and_refused(tmp_path: Path) -> None:
    raw = load("llama-3.1-8b-wikitext").model_dump(mode="json", exclude_unset=True)
    raw["hardware"]["gpu_memory_gib"] = 16
    done = dry_run(write(raw, tmp_path))
    assert "may not fit" in done.output
    assert isinstance(done.exception, ResourceLimitError)


def test_every_cell_is_shown_under_a_label_of_its_own() -> None:
    raw = load("llama-3.2-1b-wikitext").model_dump(mode="json")
    (cell,) = raw["cells"]
    ((name, shape),) = raw["hardware"]["shapes"].items()
    other = f"mirror/{name.rpartition('/')[2]}"
    sure = {"backbone": name, "source": "confidence"}
    raw["cells"] = [
        cell,
        cell | {"backbone": other},
        cell | {"rule_budget": 9000},
        cell | {"revision": "abc"},
        sure,
        sure | {"confidence_tokens": 5000},
    ]
    raw["hardware"]["shapes"][other] = shape
    assert len({cell.label for cell in memory_of_cells(Recipe.model_validate(raw))}) == 6


def test_a_shape_that_is_not_the_backbones_or_not_known_is_refused() -> None:
    raw = load("embedded").model_dump(mode="json")
    hardware = load("llama-3.2-1b-wikitext").model_dump(mode="json")["hardware"]
    (other,) = hardware["shapes"].values()
    raw["distill"]["batch_size"] = 8
    raw |= {"cluster": {"workers": 8, "use_gpu": True}, "adapt": None, "benchmark": None}
    raw |= {"cells": [{"backbone": "umim-docs-llama"}]}
    raw |= {"hardware": hardware | {"shapes": {"umim-docs-llama": other}}}
    with pytest.raises(ConfigError, match="must agree with the configuration of umim-docs-llama"):
        memory_of_cells(Recipe.model_validate(raw))
    bare = load("llama-3.2-1b-wikitext").model_dump(mode="json")
    bare["hardware"]["shapes"] = {}
    with pytest.raises(ConfigError, match="must tell the shape of a backbone that is not on this"):
        memory_of_cells(Recipe.model_validate(bare))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("tables/humaneval-qwen", {"settings": [BASELINE]}, "Did you mean 'truncation'"),
        ("embedded", {"adapt": {**ADAPT, "settings": ["WT + Rulse"]}}, r"mean 'WT \+ Rules'"),
    ],
)
def test_settings_that_do_not_exist_are_refused(
    name: str, change: dict[str, object], message: str, tmp_path: Path
) -> None:
    recipe = yaml.safe_load((RECIPES / f"{name}.yaml").read_text("utf-8"))
    with pytest.raises(ConfigError, match=message):
        find_recipe(write(recipe | change, tmp_path))
