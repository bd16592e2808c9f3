"""One distillation step: a frozen backbone is teacher on raw ids and student on merged units.

The spans of a batch are merged once. Rows then pass in micro-batches; each leaves
its loss and the gradient of that loss by the surrogates [M, d], and gives its activations back. The
gradients add up, and one backward pass takes their sum through the merge module::

    spans -> module -> z [M, d] --+--> micro-batch 1: loss_1, d loss_1 / dz
                                  +--> micro-batch 2: loss_2, d loss_2 / dz
    sum of losses, whose gradient by z is the sum of gradients; exact, as the backbone is frozen

Rows run without padding (``packed_trunk``), and without masks.

Shapes: B rows, T raw tokens, S units, M different spans, d embedding size, R aligned rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from umim_core.backbone.backbone import Backbone
from umim_core.config.model_base import LossKernel
from umim_core.distill.alignment_masks import aligned_rows
from umim_core.distill.held_weights import with_held_weights
from umim_core.distill.loss import DistillLoss, distill_loss
from umim_core.distill.packed_trunk import PackedTrunk
from umim_core.errors import ConfigError, CorpusError
from umim_core.merging.compressed import Compressed
from umim_core.merging.module import MergeModule
from umim_core.merging.packing import (
    PackedUnits,
    Segmentation,
    pack_rows,
    packed_embeddings,
)

# Rows of a micro-batch unless asked for: a CPU is fastest with four, whose states stay near it.
MICRO_BATCH: Final = {"cpu": 4, "gpu": 1 << 20}


class DistillModel(nn.Module):
    """The merge module with its loss as one module, so that DDP and DeepSpeed can wrap it.

    Only the merge module's parameters are registered; the backbone is held outside of them, is
    never broadcast, reduced or saved, and serves as teacher and student.

    Args:
        compressed: The frozen backbone, the merge module to train, and the positions of the
            student's units; the teacher's are those of raw tokens.
        autocast: Run the backbone in bfloat16 (its products only; the loss is at least float32).
        micro_batch: Rows whose activations are held at once; None chooses by the kind of device.
        loss_kernel: ``eager``, or ``compiled``: fused, after ten seconds in the first step.

    Raises:
        ConfigError: If ``micro_batch`` is below 1, or there is no merge module.
    """

    def __init__(
        self,
        compressed: Compressed,
        *,
        autocast: bool = False,
        micro_batch: int | None = None,
        loss_kernel: LossKernel = "eager",
    ) -> None:
        super().__init__()
        self.module, backbone = compressed.require_module(), compressed.backbone
        self._frozen = (backbone,)
        self._unit_positions = compressed.unit_positions
        self._autocast = autocast
        with self._precision():
            self._trunk = PackedTrunk(with_held_weights(backbone) if autocast else backbone)
        self._loss_kernel: LossKernel = loss_kernel
        if micro_batch is not None and micro_batch < 1:
            raise ConfigError("micro_batch must be at least 1", micro_batch, "Leave it out.")
        default = MICRO_BATCH["cpu" if backbone.device.type == "cpu" else "gpu"]
        self._micro_batch = default if micro_batch is None else micro_batch

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

        Raises:
            CorpusError: If a row is longer than the backbone has positions.
        """
        limit, longest = self.backbone.max_positions, max(map(len, rows), default=0)
        if limit is not None and longest > limit:
            raise CorpusError(
                f"rows must fit the backbone's {limit} positions",
                f"{longest} tokens",
                "Use shorter segments.",
            )
        packed = pack_rows(rows, segmentations)  # on the host, which then need not wait for a GPU
        pooled = self.surrogates(packed)
        # A frequent span adds up many gradients: in bfloat16 they would be lost.
        wide = torch.promote_types(pooled.dtype, torch.float32)
        leaf = pooled.detach().to(wide).requires_grad_(pooled.requires_grad)
        gradient = torch.zeros_like(leaf)
        sums: list[DistillLoss] = []
        for index in self._micro_batches(packed):
            part = packed.take(index)
            teacher, student = self.hidden_pairs([rows[i] for i in index.tolist()], part, leaf)
            loss = distill_loss(student, teacher, self.backbone, kernel=self._loss_kernel)
            if leaf.requires_grad:
                gradient += torch.autograd.grad(loss.cross_entropy, leaf)[0]
            sums.append(loss)
        nothing = anchor(self.module)
        total = nothing.detach() + sum(loss.cross_entropy.detach() for loss in sums)
        return DistillLoss(
            _given_gradient(pooled, total, gradient) + nothing,
            nothing.detach() + sum(loss.kl for loss in sums),
            sum(loss.rows for loss in sums),
        )

    def surrogates(self, packed: PackedUnits) -> Tensor:
        """Return the surrogates of a batch's different spans [M, d]."""
        device = self.backbone.device
        spans, lengths = packed.span_ids.to(device), packed.span_lengths.to(device)
        with self._precision():
            pooled: Tensor = self.module(self.backbone.embed(spans), lengths)
        return pooled

    def hidden_pairs(
        self, rows: Sequence[NDArray[np.integer]], packed: PackedUnits, pooled: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return teacher and student hidden states [R, d] at the aligned rows.

        Args:
            rows: Raw ids per row [T_b].
            packed: The same rows in units, on the CPU.
            pooled: Surrogates of the spans of ``packed`` [M, d].
        """
        aligned, device = aligned_rows(packed), self.backbone.device
        compact = self._unit_positions == "compact"  # what a trunk takes by itself
        positions = None if compact else packed.position_ids(self._unit_positions)
        if positions is not None:
            positions = positions[packed.attention_mask].to(device)
        tokens = torch.from_numpy(np.concatenate(rows).astype(np.int64)).to(device)
        with self._precision():
            with torch.no_grad():
                raw = self.backbone.embed(tokens)
                teacher = self._trunk.hidden(raw, [len(row) for row in rows])
            units = packed_embeddings(packed, self.backbone, pooled)
            student = self._trunk.hidden(units, packed.unit_counts.tolist(), positions)
        in_teacher = _starts(packed.raw_counts)[aligned.batch] + aligned.teacher
        in_student = _starts(packed.unit_counts)[aligned.batch] + aligned.student
        return teacher[in_teacher.to(device)], student[in_student.to(device)]

    def _precision(self) -> torch.autocast:
        return torch.autocast(
            self.backbone.device.type, dtype=torch.bfloat16, enabled=self._autocast
        )

    def _micro_batches(self, packed: PackedUnits) -> Sequence[Tensor]:
        """Return rows with a merge; others have no loss.

        Those of similar length go together, for backbones that must pad.
        """
        merged = (packed.lengths > 1).any(dim=1).nonzero().view(-1)
        order = packed.unit_counts[merged].argsort(stable=True)
        return torch.split(merged[order], self._micro_batch) if len(order) else ()


def _starts(counts: Tensor) -> Tensor:
    """Return where each row begins among all, given how many each has [B]."""
    return counts.cumsum(0) - counts


class _GivenGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_value: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_value.to(gradient.dtype), None, None


def _given_gradient(source: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
    """Return ``value``, a number whose gradient by ``source`` was computed before."""
    out: Tensor = _GivenGradient.apply(source, value, gradient)  # type: ignore[no-untyped-call]
    return out


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
