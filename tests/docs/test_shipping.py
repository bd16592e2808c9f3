"""A trained checkpoint on its way into the package: its form, its results, page and card."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from docs.make import shipped_model
from docs.make.results import documents_of
from docs.make.shipping import results_of, store, write_sums
from support.tiny_mixture import mixture_recipe
from support.tiny_pipeline import walk
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.errors import ConfigError
from umim_core.store.artifacts import sha256_file


def test_a_stored_checkpoint_is_the_same_rounded_and_without_tables(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    for _ in range(2):  # what lies there is replaced
        store(tiny_checkpoint, tmp_path / "shipped")
    before, after = Checkpoint.load(tiny_checkpoint), Checkpoint.load(tmp_path / "shipped")
    assert after.config == before.config
    assert after.rules.digest == before.rules.digest
    assert not (tmp_path / "shipped" / "rules" / "matcher").exists()
    stored = load_file(tmp_path / "shipped" / "model.safetensors")
    for name, value in before.module.state_dict().items():
        assert torch.equal(stored[name], value.bfloat16())
        assert torch.equal(after.module.state_dict()[name], value.bfloat16().float())


def test_the_module_can_be_kept_as_it_is(tiny_checkpoint: Path, tmp_path: Path) -> None:
    store(tiny_checkpoint, tmp_path / "shipped", "float32")
    before, after = Checkpoint.load(tiny_checkpoint), Checkpoint.load(tmp_path / "shipped")
    for name, value in before.module.state_dict().items():
        assert torch.equal(after.module.state_dict()[name], value)


def test_the_list_of_digests_names_every_file(tmp_path: Path) -> None:
    (tmp_path / "assets" / "b").mkdir(parents=True)
    for name in ("b/x.json", "a.md"):
        (tmp_path / "assets" / name).write_text(name, encoding="utf-8")
    write_sums(tmp_path / "assets", tmp_path / "sums")
    expected = [f"{sha256_file(tmp_path / 'assets' / n)}  {n}\n" for n in ("a.md", "b/x.json")]
    assert (tmp_path / "sums").read_text(encoding="utf-8") == "".join(expected)


@pytest.mark.full
def test_page_and_card_show_what_the_run_measured(tmp_path: Path) -> None:
    recipe = mixture_recipe(tmp_path)
    run = walk(tmp_path / "root", recipe)
    (distilled,) = (call.artifact.path for call in run.calls if call.name == "distill")
    checkpoint, shipped = distilled / "checkpoint", tmp_path / "umim-tiny" / "checkpoint"
    store(checkpoint, shipped)
    results = json.loads(json.dumps(results_of(checkpoint, shipped, recipe, "0123456789abcdef")))
    (tmp_path / "tiny.json").write_text(json.dumps(results), encoding="utf-8")
    (page,) = documents_of(tmp_path / "tiny.json")
    (metrics,) = (call.artifact.metrics for call in run.calls if call.name == "evaluate")
    for text in (page.make(), shipped_model.card(results)):
        for suffix in ("", "_part_manual", "_part_notes"):
            top1, error = metrics[f"top1{suffix}"], metrics[f"top1_se{suffix}"]
            assert f"{top1:.3f} ± {error:.3f}" in text
            assert f"{metrics[f'ppl_umim{suffix}']:.2f}" in text
        for words in ("CC0-1.0", "manual-train.txt", "4 steps of 2 rows", "0123456789ab"):
            assert words in text
        assert str(tmp_path / "manual") not in text
    scored = {"acc_tok": 0.5, "acc_tok_stderr": 0.04, "token_reduction": 0.25}
    with_task = results | {"task": {"base": scored | {"token_reduction": 0.0}, "umim": scored}}
    assert "50.0 ± 4.0 | 25.0%" in shipped_model.card(with_task)
    other = recipe.model_copy(
        update={"evaluate": recipe.evaluate.model_copy(update={"alignment_rows": 2})}
    )
    with pytest.raises(ConfigError, match="must have been evaluated as the recipe tiny-mixture"):
        results_of(checkpoint, shipped, other, None)
