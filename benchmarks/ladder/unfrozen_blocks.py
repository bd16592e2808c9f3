"""Control of the ladder: a distillation that trains blocks of the student's backbone, too.

The teacher is the frozen backbone. The student shares its weights but for the blocks that are
trained, which are copies; embeddings, final norm and head stay frozen in both::

    ids    -> embedding -> all blocks, frozen                        -> norm -> head    teacher
    units  -> embedding -> block 0', blocks 1 .. L-2, block (L-1)'   -> norm -> head    student

The library trains a module alone: its step takes the gradient by the surrogates and leaves the
backbone's out. Here autograd takes the whole step, over all rows at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from umim_core.backbone.backbone import Backbone
from umim_core.backbone.model_files import frozen_twin
from umim_core.config.hidden_term import HiddenTerm
from umim_core.distill.held_weights import with_held_weights
from umim_core.distill.objectives import DistillObjective
from umim_core.distill.packed_trunk import PackedTrunk
from umim_core.distill.step import DistillModel, StepLoss, anchor
from umim_core.distill.token_rows import TokenRows
from umim_core.errors import BackboneError
from umim_core.merging.compressed import Compressed
from umim_core.merging.packing import Segmentation, pack_rows


def blocks_of(model: PreTrainedModel) -> nn.ModuleList:
    """Return the blocks of a causal language model.

    Raises:
        BackboneError: If it has no list of them.
    """
    count = model.config.num_hidden_layers
    for module in model.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise BackboneError(
        f"a control needs a backbone with a list of its {count} blocks",
        type(model).__name__,
        "Leave the rows of the control out (--only).",
    )


def with_trained_blocks(backbone: Backbone, blocks: Sequence[int]) -> Backbone:
    """Return a backbone with copies of some blocks that need gradients.

    Args:
        backbone: It stays as it is, and shares every other weight.
        blocks: Their numbers; negative ones count from the end.

    Raises:
        BackboneError: If it has no list of blocks.
    """
    model = frozen_twin(backbone.model)
    found = blocks_of(model)
    for index in blocks:
        for layer in found[index].modules():
            for name, weight in list(layer.named_parameters(recurse=False)):
                layer.register_parameter(name, nn.Parameter(weight.detach().clone()))
    return replace(backbone, model=model, trunk=model.base_model)


def _held(student: Backbone) -> Backbone:
    """Return a twin with held bfloat16 weights, but for the weights that are trained.

    Those are the student's own, which autocast casts at every step.
    """
    twin = with_held_weights(student)
    pairs = zip(twin.model.modules(), student.model.modules(), strict=True)
    for layer, theirs in pairs:
        for name, weight in list(theirs.named_parameters(recurse=False)):
            if weight.requires_grad:
                layer.register_parameter(name, weight)
    return twin


class UnfrozenModel(DistillModel):
    """The merge module and the trained blocks with their loss.

    Args:
        compressed: The frozen backbone, which teaches, the merge module and the unit positions.
        student: The same backbone with blocks that are trained.
        autocast: Run products in bfloat16, as the library does.
        hidden_terms: Hidden-state terms of the loss.
    """

    def __init__(
        self,
        compressed: Compressed,
        student: Backbone,
        *,
        autocast: bool,
        hidden_terms: Sequence[HiddenTerm],
    ) -> None:
        super().__init__(compressed, autocast=autocast, hidden_terms=hidden_terms)
        self._teacher = self._trunk
        with self._precision():
            self._trunk = PackedTrunk(_held(student) if autocast else student)
        self.blocks = nn.ModuleList(
            block
            for block in blocks_of(student.model)
            if any(weight.requires_grad for weight in block.parameters())
        )

    def teacher_states(self, tokens: Tensor, lengths: Sequence[int]) -> tuple[Tensor, ...]:
        """Return hidden states [N, d] of the frozen backbone on raw tokens."""
        return self._teacher.states(self.backbone.embed(tokens), lengths, layers=self._layers)

    def forward(
        self, rows: Sequence[NDArray[np.integer]], segmentations: Sequence[Segmentation]
    ) -> StepLoss:
        """Return the loss sums of a batch; the total carries the gradient by all that is trained.

        Args:
            rows: Raw ids per row [T_b].
            segmentations: Units per row (starts, lengths).
        """
        packed = pack_rows(rows, segmentations)
        pooled = self.surrogates(packed)
        wide = pooled.to(torch.promote_types(pooled.dtype, torch.float32))
        loss = self._part_loss(rows, packed, wide)
        return replace(loss, total=loss.total + anchor(self.module))


class UnfrozenObjective(DistillObjective):
    """Predictive distillation that trains blocks of the student's backbone, too.

    Its ``module`` is the merge module alone: a resume state would lack the blocks, and a cell of
    the ladder is trained in one go.
    """

    def __init__(
        self,
        compressed: Compressed,
        student: Backbone,
        train: TokenRows,
        valid: TokenRows,
        *,
        bf16: bool,
        batch_size: int,
        hidden_terms: Sequence[HiddenTerm] = (),
    ) -> None:
        super().__init__(
            compressed, train, valid, bf16=bf16, batch_size=batch_size, hidden_terms=hidden_terms
        )
        self._model = UnfrozenModel(compressed, student, autocast=bf16, hidden_terms=hidden_terms)
