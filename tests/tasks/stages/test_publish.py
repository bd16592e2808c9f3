"""Examples of the report: of the best checkpoint, where the recipe measures; keys of scores."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from support.tiny_pipeline import Walk
from tasks.run.stage import Artifact, StageSpec, run_stage
from tasks.stages.corpus import tokens
from tasks.stages.evaluate import task_score_stage
from tasks.stages.publish import report_data
from umim_core import UMIM
from umim_core.config.recipe import Recipe
from umim_core.evaluation.surrogate_similarity import surrogate_similarity

pytestmark = pytest.mark.full  # a whole run is in its fixture


def evaluation(root: Path, **metrics: float) -> Artifact:
    return run_stage(root, StageSpec("evaluate", 1, metrics, {}), lambda _: metrics)


@pytest.mark.parametrize("measured", ["top1_states", "top1"])
def test_examples_are_of_the_checkpoint_that_agrees_most_with_its_base_model(
    tiny_run: Walk, tmp_path: Path, measured: str
) -> None:
    (made,), _ = tiny_run.results
    cells = [
        replace(
            made,
            cell=made.cell.model_copy(update={"tau": tau}),
            evaluations={
                "WT": evaluation(tmp_path, **{measured: value, "ppl_umim": 9.0 + tau}),
                "WT + FT": evaluation(tmp_path, **{measured: 0.99}),  # adapted to another text
            },
        )
        for tau, value in ((3, 0.2), (4, 0.7), (5, 0.6))
    ]
    data = report_data(tiny_run.recipe, cells, [], {})
    label = "backbone, τ 4 on held-out text (highest Top-1 of 3 checkpoints)"
    assert [example.label for example in data.examples] == [label]
    assert data.attention is not None and data.attention.label.startswith(label)


def test_examples_are_measured_where_the_recipe_measures(
    tiny_run: Walk, monkeypatch: pytest.MonkeyPatch
) -> None:
    (made,), _ = tiny_run.results
    ids = np.array(tokens(made.tokenized, "test")[:4096], np.int64)
    found = {}
    for dtype in ("float32", "bfloat16"):
        umim = UMIM.from_pretrained(made.settings["WT"].path / "checkpoint", dtype=dtype)
        cut = zip(*umim.matcher.segment(ids), strict=True)
        spans = sorted({tuple(ids[s : s + n].tolist()) for s, n in cut if n > 1})
        found[dtype] = [row.mean for row in surrogate_similarity(spans, umim.compressed)]
        monkeypatch.setattr(Recipe, "placement", ("cpu", dtype))
        data = report_data(tiny_run.recipe, [made], [], {})
        assert [row.mean for row in data.similarity] == found[dtype]
    assert found["float32"] != found["bfloat16"]


def test_the_base_models_score_is_found_without_a_checkpoints_weights(
    tiny_run: Walk, tmp_path: Path
) -> None:
    call = next(
        call
        for call in tiny_run.calls
        if call.function is task_score_stage and call.args[3] == "none"
    )
    lease, task, checkpoint, *others = call.args
    copy = shutil.copytree(checkpoint, tmp_path / "checkpoint")
    (copy / "model.safetensors").write_bytes(b"torn")
    assert task_score_stage(tiny_run.root, lease, task, copy, *others).key == call.artifact.key
