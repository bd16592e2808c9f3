"""A run on a mixture of corpora that is killed goes on and ends with the same bytes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from support.tiny_mixture import mixture_recipe
from support.tiny_pipeline import Walk, walk, walk_until
from support.training_processes import exit_codes, start_ranks
from umim_core.config.recipe import Recipe

# The function at whose call the process kills itself, which call, when.
POINTS = {
    "half of a split is mixed": ("umim_core.text.mixing.cut_at_lines", 30, "after"),
    "two splits are mixed": ("tasks.stages.mixture.mix_documents", 2, "after"),
    "before the third step": ("umim_core.distill.train_loop.batch_indices", 3, "before"),
    "a state is saved": ("umim_core.distill.train_loop.save", 3, "after"),
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    return mixture_recipe(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def undisturbed(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Walk:
    return walk(tmp_path_factory.mktemp("root"), recipe)


@pytest.mark.full
def test_every_part_is_measured_on_its_own(undisturbed: Walk) -> None:
    (metrics,) = (call.artifact.metrics for call in undisturbed.calls if call.name == "evaluate")
    for part in ("manual", "notes"):
        for name in ("top1", "kl", "kl_se", "ppl_base", "ppl_umim", "nats_increase_se"):
            assert f"{name}_part_{part}" in metrics
    assert metrics["ppl_base_part_manual"] != metrics["ppl_base_part_notes"]


@pytest.mark.full
@pytest.mark.parametrize("point", POINTS)
def test_a_killed_run_ends_with_the_same_digests(
    undisturbed: Walk, recipe: Recipe, tmp_path: Path, point: str
) -> None:
    root = tmp_path / "root"
    run = start_ranks(tmp_path, 1, walk_until, root, recipe.model_dump_json(), *POINTS[point])
    assert exit_codes(run) == [-signal.SIGKILL], (tmp_path / "rank-0.log").read_text("utf-8")
    assert walk(root, recipe).digests() == undisturbed.digests()
