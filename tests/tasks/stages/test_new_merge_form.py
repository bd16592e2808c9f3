from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from support.sites import here, made
from support.tiny_models import save_with_tokenizer
from support.token_artifacts import tokenized
from tasks.report.comparison import Result, comparison_rows
from tasks.stages.evaluate import evaluate_stage
from tasks.stages.named import NamedBackbone, NamedCheckpoint
from tasks.stages.train import ModuleTraining, distill_stage
from umim_core.backbone.backbone import Backbone
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.config.evaluate import EvaluateConfig
from umim_core.config.form import MERGE_FORMS, ModuleForm
from umim_core.config.recipe import Cell, DistillConfig
from umim_core.merging import forms
from umim_core.rules.ruleset import RuleSet

LENGTH = 16
SOURCE = '''
"""The mean of a span's tokens, normed."""

import torch
from torch import nn

from umim_core.merging.module import MergeModule
from umim_core.merging.forms.span_ops import reset_norm


class NormedMean(MergeModule, kind="normed-mean"):
    def make_weights(self):
        self.norm_o = nn.LayerNorm(self.hidden_size, eps=1e-5)

    @torch.no_grad()
    def initialise(self, embedding_std, generator=None):
        reset_norm(self.norm_o, embedding_std)

    def merge(self, tokens, lengths):
        return self.norm_o(tokens.sum(dim=1) / lengths[:, None])
'''


@pytest.fixture
def new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A file in the package of forms; what it added is gone afterwards."""
    (tmp_path / "forms").mkdir()
    (tmp_path / "forms" / "normed_mean_form.py").write_text(SOURCE)
    monkeypatch.setattr(forms, "__path__", [*forms.__path__, str(tmp_path / "forms")])
    yield
    MERGE_FORMS._found.pop("normed-mean", None)
    sys.modules.pop("umim_core.merging.forms.normed_mean_form", None)


@pytest.mark.usefixtures("new_file")
def test_a_new_form_is_one_file_down_to_its_comparison_row(
    tiny_llama: Backbone, tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    save_with_tokenizer(tmp_path, tiny_llama, tiny_tokenizer)
    fingerprint = tiny_llama.tokenizer_fingerprint
    mined = RuleSet.from_spans([(1, 2), (3, 4, 5)], tokenizer_fingerprint=fingerprint)

    sizes = {"train": 8, "valid": 2, "test": 4}
    tokens = tokenized(tmp_path, {s: np.arange(n * LENGTH) % 7 + 1 for s, n in sizes.items()})
    filtered = made(tmp_path, "rules", lambda out: mined.save(out / "rules"))
    form = {"kind": "normed-mean", "unit_positions": "preserved"}
    cell = Cell(backbone=str(tmp_path / "backbone"), **form)
    config = DistillConfig(max_steps=4, batch_size=4, bf16=False)
    train, valid = tokens.part("train"), tokens.part("valid")
    training = ModuleTraining(NamedBackbone(cell.backbone), cell.alone(), config, LENGTH, seed=0)
    distilled = distill_stage(training=training, rules=filtered, train=train, valid=valid).build(
        here(tmp_path)
    )
    evaluated = evaluate_stage(
        tokens=tokens,
        checkpoint=NamedCheckpoint(distilled.path / "checkpoint"),
        config=EvaluateConfig(alignment_rows=4, perplexity_rows=4, batch_size=2),
        segment_length=LENGTH,
    ).build(here(tmp_path))
    made_of = Checkpoint.load(distilled.path / "checkpoint")
    assert type(made_of.module).__name__ == "NormedMean"
    assert made_of.config.form() == cell.form() == ModuleForm().form() | form
    result = Result(cell, tokens, filtered)
    result.settings["WT"], result.evaluations["WT"] = distilled, evaluated
    [row] = comparison_rows([result], seed=17)
    assert row.kind == "normed-mean"
    assert "normed-mean" in row.label
    assert row.metrics["rules"] == 2.0
    assert row.metrics["kl"] is not None and row.metrics["kl"] > 0.0
