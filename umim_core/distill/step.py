"""One distillation step: a frozen backbone is teacher on raw ids and student on merged units.

Shapes: B rows, T raw tokens, S units, d embedding size, R aligned rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from umim_core.backbone import Backbone
from umim_core.distill.alignment import AlignedRows, aligned_rows
from umim_core.distill.loss import DistillLoss, distill_loss
from umim_core.merging.compress import PackedUnits, Segmentation, pack_rows, unit_embeddings
from umim_core.merging.module import MergeModule


class DistillModel(nn.Module):
    """The merge module with its loss as one module, so that DDP and DeepSpeed can wrap it.

    Only the merge module's parameters are registered; the backbone is held outside of them, is
    never broadcast, reduced or saved, and serves as teacher and student alike.

    Args:
        backbone: The frozen backbone.
        module: The merge module to train.
        autocast: Run the backbone in bfloat16 (its products only; the loss is at least float32).
    """

    def __init__(self, backbone: Backbone, module: MergeModule, *, autocast: bool = False) -> None:
        super().__init__()
        self.module = module
        self._frozen = (backbone,)
        self._autocast = autocast

    @property
    def backbone(self) -> Backbone:
        """The frozen backbone."""
        return self._frozen[0]

    def forward(
        self, rows: Sequence[NDArray[np.integer]], segmentations: Sequence[Segmentation]
    ) -> DistillLoss:
        """Return the loss sums of a batch.

        Args:
            rows: Raw ids per row [T_b].
            segmentations: Units per row (starts, lengths).

        Returns:
            Sums over the aligned rows. They depend on every parameter even without any merge, so
            that every rank of a distributed run takes part in the gradient exchange.
        """
        packed = pack_rows(rows, segmentations, self.backbone.device)
        teacher, student, _ = self.hidden_pairs(rows, packed)
        wide = torch.promote_types(student.dtype, torch.float32)
        loss = distill_loss(student.to(wide), teacher.to(wide), self.backbone)
        return DistillLoss(loss.cross_entropy + anchor(self.module), loss.kl, loss.rows)

    def hidden_pairs(
        self, rows: Sequence[NDArray[np.integer]], packed: PackedUnits
    ) -> tuple[Tensor, Tensor, AlignedRows]:
        """Return teacher and student hidden states [R, d] at the aligned rows, and the rows."""
        aligned = aligned_rows(packed)
        raw, raw_mask = _pad(rows, self.backbone.device)
        with torch.autocast(
            self.backbone.device.type, dtype=torch.bfloat16, enabled=self._autocast
        ):
            with torch.no_grad():
                teacher = self.backbone.hidden(self.backbone.embed(raw), raw_mask)
            units = unit_embeddings(packed, self.backbone, self.module)
            student = self.backbone.hidden(units, _mask(packed.attention_mask))
        return (
            teacher[aligned.batch, aligned.teacher],
            student[aligned.batch, aligned.student],
            aligned,
        )


def anchor(module: MergeModule) -> Tensor:
    """Return a zero that depends on every parameter of a merge module.

    It runs the module on one token of zeros, so that a rank without any merge hands its gradients
    over in the same order as the others. A mere sum over the parameters gives another order, and
    ZeRO-2, which reduces gradients in order of arrival, then adds those of different parameters.
    """
    nothing = module.norm_o.weight.new_zeros(1, 1, module.hidden_size)
    one = torch.ones(1, dtype=torch.int64, device=nothing.device)
    zero: Tensor = module(nothing, one).sum() * 0.0
    return zero


def _pad(rows: Sequence[NDArray[np.integer]], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Right-pad rows to [B, T] ids; the mask is None when no row needs padding."""
    width = max((len(row) for row in rows), default=0)
    ids = np.zeros((len(rows), width), dtype=np.int64)
    mask = np.zeros((len(rows), width), dtype=np.bool_)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = row
        mask[index, : len(row)] = True
    return torch.from_numpy(ids).to(device), _mask(torch.from_numpy(mask).to(device))


def _mask(mask: Tensor) -> Tensor | None:
    """Return an integer padding mask [B, S], or None when nothing is padded."""
    return None if bool(mask.all()) else mask.long()
