"""Nothing is computed beside the device of the weights: on ``meta``, what is mixed with it fails.

A device without data takes every operation whose shapes do not depend on values; tensors of the CPU
are refused beside its own as CUDA refuses them. What a GPU computes is tested on one
(``benchmarks``).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from support.merge_modules import FORMS, module_of
from support.merged_models import units_of_lengths
from support.tiny_models import random_backbone
from umim_core.merging.merged_model import MergedModel
from umim_core.merging.packing import pack_rows, packed_embeddings
from umim_core.training.loss import distill_loss
from umim_core.training.optimizer import RowAdamW
from umim_core.training.step import DistillModel, anchor

UNITS = [[2, 1, 1], [1, 1, 3], [1, 2, 3, 4, 1], [4], [1]]


@pytest.mark.parametrize("form", FORMS)
def test_surrogates_units_and_loss_stay_on_the_device_of_the_weights(form: str) -> None:
    backbone = random_backbone()
    module = module_of(form, backbone.hidden_size).requires_grad_()
    backbone.model.to("meta")
    model = DistillModel(MergedModel(backbone, module.to("meta"), None))
    rows = [np.arange(sum(row)) % 32 for row in UNITS]
    packed = pack_rows(rows, list(map(units_of_lengths, UNITS)))
    units = packed_embeddings(packed, backbone, model.surrogates(packed))
    loss = distill_loss(units, units.detach(), backbone, chunk=4)
    (loss.total + anchor(module)).backward()
    gradients = [parameter.grad for parameter in module.parameters()]
    assert [None if x is None else x.device.type for x in gradients] == ["meta"] * len(gradients)
    assert len(units) == loss.weight == 13


def test_the_optimiser_of_rule_rows_stays_on_the_device_of_the_table() -> None:
    table = torch.nn.Parameter(torch.zeros(4, 3, device="meta"))
    optimiser = RowAdamW(table)
    rows = torch.zeros(2, dtype=torch.int64, device="meta")
    optimiser.step(rows, torch.zeros(2, 3, device="meta"), 0.1)
    assert {value.device.type for value in optimiser.tensors().values()} == {"meta"}
    with pytest.raises(RuntimeError, match="meta"):  # what this file rests on
        torch.zeros(2, 3) + torch.zeros(2, 3, device="meta")
