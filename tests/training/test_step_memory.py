"""The bound on the GPU memory of a distillation, against what autograd saves of real steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from support.merge_modules import FORMS as EVERY_FORM
from support.merged_models import units_of_lengths
from support.tiny_models import random_model, tiny_config
from umim_core.backbone.backbone import Backbone, wrap_backbone
from umim_core.backbone.shape import BackboneShape
from umim_core.config.form import ModuleForm
from umim_core.merging.merged_model import MergedModel
from umim_core.merging.module import MergeModule
from umim_core.training.step import DistillModel, step_memory

ROWS, LENGTH, VOCAB = 3, 64, 97
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": tiny_config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=176, num_hidden_layers=4
    ),
    "gpt2": tiny_config(
        "gpt2", vocab_size=VOCAB, hidden_size=48, num_hidden_layers=3, intermediate_size=None
    ),
}
FORMS = {n: ModuleForm(**EVERY_FORM[n]) for n in ("paper", "learned", "depth 3", "linear")}
FEW = [2] + [1] * (LENGTH - 2)  # one merge
HALF = [1, 4, 1, 2] * (LENGTH // 8)


def bound(name: str, form: ModuleForm = FORMS["paper"], **options: Any) -> dict[str, float]:
    shape = BackboneShape.of_config(CONFIGS[name])
    shape = shape.model_copy(update={"vocab_size": options.pop("vocab_size", VOCAB)})
    how = {"rows": ROWS, "bf16": False, "strategy": "ddp", "gpus": 2, **options}
    return step_memory(shape, form, segment_length=LENGTH, **how)


def build(name: str, dtype: torch.dtype) -> Backbone:
    return wrap_backbone(random_model(CONFIGS[name], attention="sdpa").to(dtype), None)


def saved_bytes(backbone: Backbone, form: ModuleForm, lengths: list[int]) -> int:
    """Bytes that autograd keeps during a step, the weights themselves left out."""
    module = MergeModule(backbone.hidden_size, form)
    module.initialise(0.02, torch.Generator().manual_seed(1))
    model = DistillModel(
        MergedModel(backbone, module, None),
        autocast=backbone.dtype is torch.bfloat16,
        micro_batch=ROWS,
    )
    rng = np.random.default_rng(2)
    rows = [rng.integers(0, VOCAB, LENGTH) for _ in range(ROWS)]
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(rows, [units_of_lengths(lengths)] * ROWS)
    weights = (*backbone.model.parameters(), *backbone.model.buffers())
    frozen = {tensor.untyped_storage().data_ptr() for tensor in weights}
    trained = (torch.nn.Parameter,)
    sizes = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in kept
        if not isinstance(tensor, trained) and not isinstance(tensor._base, trained)
    }
    return sum(size for place, size in sizes.items() if place not in frozen)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("bf16", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_step_saves_less_than_the_bound_and_most_of_it_without_merges(
    name: str, form: str, bf16: bool
) -> None:
    backbone = build(name, torch.bfloat16 if bf16 else torch.float32)
    most = bound(name, FORMS[form], bf16=bf16)["activations, loss"]
    few, half = (saved_bytes(backbone, FORMS[form], lengths) for lengths in (FEW, HALF))
    assert half < few < most  # the rest is the backward pass of a block, which saves nothing
    assert few > 0.5 * most


def test_the_parts_are_those_of_the_formulas() -> None:
    weights = sum(p.numel() for p in build("llama", torch.float32).model.parameters())
    for bf16, width in ((False, 4), (True, 2)):
        assert bound("llama", bf16=bf16)["weights"] == pytest.approx(width * weights, rel=0.02)
    size = 4 * sum(p.numel() for p in MergeModule(64).parameters())
    copies = {("ddp", 1): 4, ("ddp", 2): 5, ("deepspeed", 1): 6, ("deepspeed", 4): 3}
    for (strategy, gpus), times in copies.items():
        parts = bound("llama", strategy=strategy, gpus=gpus)
        assert parts["module and AdamW"] == pytest.approx(times * size)
    plain, rowed = (bound("llama", ModuleForm(rule_rows=k)) for k in (0, 1000))
    added = rowed["module and AdamW"] - plain["module and AdamW"]
    assert added == pytest.approx(1000 * CONFIGS["llama"].hidden_size * 4 * 3)  # and two moments
    small, large = (bound("llama", rows=100, gpus=1, vocab_size=k) for k in (100_000, 200_000))
    added = large["activations, loss"] - small["activations, loss"]
    assert added == pytest.approx(4 * 4 * 1024 * 100_000)  # four chunks of 1,024 rows in float32
