"""One distillation step: a frozen backbone is teacher on raw ids and student on merged units.

At merge depth 0 the spans of a batch are merged once. Rows then pass in micro-batches; each leaves
its loss and the gradient of that loss by the surrogates [M, d] and by the adapters, and gives its
activations back. The gradients add up, and one backward pass takes their sum through the module::

    spans -> module -> z [M, d] --+--> micro-batch 1: loss_1, d loss_1 / dz
                                  +--> micro-batch 2: loss_2, d loss_2 / dz
    sum of losses, whose gradient by z is the sum of gradients; exact, as the backbone is frozen

At a depth k above 0 a unit depends on what stands before it: each micro-batch leaves its gradient
by all trained parameters. Teacher and student share the first k layers, which read the same tokens.

Rows run without masks, and on a CPU without padding (``packed_trunk``).

Shapes: B rows, T raw tokens, S units, M different spans, d embedding size, R aligned rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from umim_core.backbone.backbone import Backbone
from umim_core.backbone.shape import BackboneShape
from umim_core.backbone.split import with_held_weights
from umim_core.config.form import ModuleForm
from umim_core.errors import CorpusError
from umim_core.merging.merged_model import MergedModel, MergedTrunk, unit_states
from umim_core.merging.module import MergeModule
from umim_core.merging.packing import PackedUnits, Segmentation, pack_rows, packed_embeddings
from umim_core.training.loss import (
    DEFAULT_CHUNK,
    BatchLoss,
    add_gradients,
    aligned_rows,
    distill_loss,
    with_gradient,
)
from umim_core.training.packed_trunk import PackedTrunk

# Rows of a micro-batch unless asked for: a CPU is fastest with four, whose states stay near it.
MICRO_BATCH: Final = {"cpu": 4, "gpu": 1 << 20}
_PROCESS: Final = 1.5 * 2.0**30  # CUDA context, libraries' workspaces, NCCL's buffers, fragments
_WIDE: Final = 4  # bytes of float32
_LOGITS_HELD: Final = 4  # chunks of float32 logits at the peak of the loss


def step_memory(
    shape: BackboneShape,
    form: ModuleForm,
    *,
    rows: int,
    segment_length: int,
    bf16: bool,
    strategy: Literal["ddp", "deepspeed"],
    gpus: int,
    micro_batch: int | None = None,
) -> dict[str, float]:
    """Return the bytes at most that a distillation takes of one GPU, by part.

    ``rows`` are one GPU's share of the batch, of which ``micro_batch`` hold activations at once;
    None for all. With ``bf16`` the frozen weights and their products are bfloat16, else float32;
    ``deepspeed`` shards optimiser state and gradients.
    """
    units = segment_length * min(rows, micro_batch or rows)
    width = 2 if bf16 else _WIDE
    # What autograd keeps of one block per unit.
    norms = 2 * (_WIDE if shape.gated_mlp else width) * shape.hidden_size
    attention = 2 * width * (shape.query_width + shape.kv_width)
    per_layer = norms + attention + (3 if shape.gated_mlp else 4) * width * shape.intermediate_size
    student = units * (shape.layers * per_layer + _WIDE * shape.hidden_size)
    logits = _LOGITS_HELD * _WIDE * min(units, DEFAULT_CHUNK["gpu"]) * shape.vocab_size
    hidden = 3 * width * units * shape.hidden_size  # teacher, student and its gradient
    # Teacher and student follow each other, as loss and backward do; the teacher keeps one block.
    working = student + max(float(logits + hidden), units * per_layer)
    return {
        "weights": float(width * shape.weights),
        "module and AdamW": _trained_bytes(shape.hidden_size, form, strategy, gpus),
        "activations, loss": working,
        "process": _PROCESS,
    }


def _trained_bytes(hidden_size: int, form: ModuleForm, strategy: str, gpus: int) -> float:
    """Return bytes of weights, gradients and AdamW's two moments, all float32.

    DDP holds the gradient once more in its buckets. ZeRO-2 shards the moments, the master weights
    and the reduced gradient. Of rule rows there are the table and two moments: their gradients are
    sparse and have no bucket.
    """
    with torch.device("meta"):
        module = MergeModule(hidden_size, form)
    parameters = sum(parameter.numel() for parameter in module.parameters())
    copies = 4.0 if gpus == 1 else 5.0
    if strategy == "deepspeed":
        copies = 2.0 + 4.0 / gpus
    return _WIDE * (copies * parameters + 3.0 * form.rule_rows * hidden_size)


class DistillModel(nn.Module):
    """The merge module with its loss as one module, so that DDP and DeepSpeed can wrap it.

    Only the merge module's parameters are registered; the backbone is held outside of them, is
    never broadcast, reduced or saved, and serves as teacher and student. The student's units have
    the model's positions, the teacher's are those of raw tokens. Under ``autocast`` the backbone's
    products are in bfloat16; the loss is at least float32. ``micro_batch`` rows hold activations at
    once; None chooses by the kind of device.
    """

    def __init__(
        self, merged_model: MergedModel, *, autocast: bool = False, micro_batch: int | None = None
    ) -> None:
        super().__init__()
        self.module, backbone = merged_model.require_module(), merged_model.backbone
        self._frozen = (backbone,)
        self._unit_positions = merged_model.unit_positions
        self._autocast = autocast
        with self._precision():
            student = with_held_weights(backbone) if autocast else backbone
            parts = MergedTrunk.of(student, merged_model.merge_depth, self.module.adapters)
            self._trunk = PackedTrunk(parts.upper)
            self._lower = None if parts.lower is None else PackedTrunk(parts.lower)
        kind = "cpu" if backbone.device.type == "cpu" else "gpu"
        self._micro_batch = micro_batch or MICRO_BATCH[kind]

    @property
    def backbone(self) -> Backbone:
        return self._frozen[0]

    def forward(
        self,
        rows: Sequence[NDArray[np.integer]],
        segmentations: Sequence[Segmentation],
        states: Sequence[NDArray[np.bool_]] | None = None,
    ) -> BatchLoss:
        """Return the loss sums of a batch of raw ids [T_b], cut into units (starts, lengths).

        Only units that end at one of the raw positions ``states`` [T_b] have loss; None for all.
        The sums depend on every parameter even without any merge, so that every rank of a
        distributed run takes part in the gradient exchange.
        """
        longest = max(map(len, rows), default=0)
        self.backbone.check_positions("rows", longest, CorpusError, "Use shorter segments.")
        packed = pack_rows(rows, segmentations)  # on the host, which then need not wait for a GPU
        leaf, leaves, sources = None, self._trained(), self._trained()
        if self._lower is None:
            pooled = self.surrogates(packed)
            # A frequent span adds up many gradients: in bfloat16 they would be lost.
            wide = torch.promote_types(pooled.dtype, torch.float32)
            leaf = pooled.detach().to(wide).requires_grad_(pooled.requires_grad)
            if pooled.requires_grad:
                leaves, sources = [leaf, *leaves], [pooled, *sources]
        gradients: list[Tensor | None] = [None] * len(leaves)
        sums: list[BatchLoss] = []
        for index in self._micro_batches(packed):
            part = packed.take(index)
            chosen = [rows[i] for i in index.tolist()]
            counted = None if states is None else [states[i] for i in index.tolist()]
            teacher, student = self.aligned_states(chosen, part, leaf, counted)
            loss = distill_loss(student, teacher, self.backbone)
            del teacher, student  # before the next micro-batch's are made
            if loss.total.requires_grad:
                add_gradients(gradients, loss.total, leaves)
            sums.append(loss._replace(total=loss.total.detach()))
        nothing = anchor(self.module)
        none = nothing.detach()
        return BatchLoss(
            with_gradient(none + sum(loss.total for loss in sums), sources, gradients) + nothing,
            none + sum(loss.kl for loss in sums),
            sum(loss.weight for loss in sums),
        )

    def _trained(self) -> list[Tensor]:
        """Return what micro-batches leave gradients of, besides the surrogates of depth 0."""
        part = self.module.adapters if self._lower is None else self.module
        weights = () if part is None else part.parameters()
        return [weight for weight in weights if weight.requires_grad]

    def surrogates(self, packed: PackedUnits) -> Tensor:
        device = self.backbone.device
        spans, lengths = packed.span_ids.to(device), packed.span_lengths.to(device)
        with self._precision():
            pooled: Tensor = self.module(self.backbone.embed(spans), lengths, spans)
        return pooled

    def aligned_states(
        self,
        rows: Sequence[NDArray[np.integer]],
        packed: PackedUnits,
        pooled: Tensor | None,
        states: Sequence[NDArray[np.bool_]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return hidden states of teacher and student at the aligned rows, [R, d] each.

        Raw ids [T_b] are also ``packed`` in units, on the CPU. ``pooled`` are the surrogates of
        their spans [M, d], None above depth 0. Units that end at none of the raw positions
        ``states`` [T_b] are left out.
        """
        aligned, device = aligned_rows(packed, states), self.backbone.device
        compact = self._unit_positions == "compact"  # what a trunk takes by itself
        positions = None if compact else packed.position_ids(self._unit_positions)
        if positions is not None:
            positions = positions[packed.attention_mask].to(device)
        tokens = torch.from_numpy(np.concatenate(rows).astype(np.int64)).to(device)
        in_teacher = _starts(packed.raw_counts)[aligned.batch] + aligned.teacher
        in_student = _starts(packed.unit_counts)[aligned.batch] + aligned.student
        at_teacher, at_student = in_teacher.to(device), in_student.to(device)
        sizes, counts = [len(row) for row in rows], packed.unit_counts.tolist()
        merged = None  # without adapters nothing asks, and no device is waited for
        if self.module.adapters is not None:
            merged = packed.merged[packed.attention_mask].to(device)
        with self._precision():
            with torch.no_grad():
                below = self.backbone.embed(tokens)
                if self._lower is not None:
                    below = self._lower.hidden(below, sizes)
                teacher = self._trunk.hidden(below, sizes)[at_teacher]
            if pooled is None:
                units = self._merged_states(packed, tokens, below)
            else:
                units = packed_embeddings(packed, self.backbone, pooled)
            student = self._trunk.hidden(units, counts, positions, merged)[at_student]
        return teacher, student

    def _merged_states(self, packed: PackedUnits, tokens: Tensor, states: Tensor) -> Tensor:
        """Return the states of all units, row after row [N, d]."""
        real = packed.attention_mask
        lengths = packed.lengths[real].to(tokens.device)
        ends = (_starts(packed.raw_counts)[:, None] + packed.ends)[real].to(tokens.device)
        return unit_states(self.module, states, tokens, ends, lengths)

    def _precision(self) -> AbstractContextManager[object]:
        kind = self.backbone.device.type
        return torch.autocast(kind, dtype=torch.bfloat16) if self._autocast else nullcontext()

    def _micro_batches(self, packed: PackedUnits) -> Sequence[Tensor]:
        """Return rows with a merge; others have no loss.

        Those of similar length go together, for backbones that must pad.
        """
        merged = packed.merged.any(dim=1).nonzero().view(-1)
        order = packed.unit_counts[merged].argsort(stable=True)
        return torch.split(merged[order], self._micro_batch) if len(order) else ()


def _starts(counts: Tensor) -> Tensor:
    """Return where each row begins among all, given how many each has [B]."""
    return counts.cumsum(0) - counts


def anchor(module: MergeModule) -> Tensor:
    """Return a zero that depends on every parameter of a merge module.

    It runs the module on one token of zeros, and adds up the adapters, so that a rank without any
    merge hands its gradients over in the same order as the others. A mere sum over the parameters
    gives another order, and ZeRO-2, which reduces gradients in order of arrival, then adds those of
    different parameters.
    """
    nothing = module.norm_o.weight.new_zeros(1, 1, module.hidden_size)
    one = torch.ones(1, dtype=torch.int64, device=nothing.device)
    zero: Tensor = module(nothing, one, one[:, None]).sum() * 0.0
    for adapter in () if module.adapters is None else module.adapters.parameters():
        zero = zero + adapter.sum() * 0.0
    return zero
