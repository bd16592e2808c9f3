"""Gradient exchange between ranks: DDP, and DeepSpeed ZeRO-2."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from umim_core.config.recipe import TrainConfig
from umim_core.errors import ConfigError, require
from umim_core.training.loss import BatchLoss
from umim_core.training.optimizer import (
    AdamWStrategy,
    Strategy,
    adamw,
    load_optimizer_tensors,
    optimizer_tensors,
    parameters,
    rule_rows,
    set_rate,
)

ZERO2_CONFIG: Final = Path(__file__).resolve().parents[2] / "infra/deepspeed/zero2.json"


def make_strategy(name: str, objective: nn.Module, config: TrainConfig) -> Strategy:
    """Return the strategy of that name ("ddp" or "deepspeed")."""
    if name == "deepspeed":
        found = "cluster.workers 0 (training in this process)"
        remedy = "Set cluster.workers to 1 or more, or strategy: ddp."
        rule = "strategy deepspeed needs workers"
        require(dist.is_initialized(), ConfigError, rule, found, remedy)
        return DeepSpeedStrategy(objective, config)
    return DdpStrategy(objective, config)


class DdpStrategy(AdamWStrategy):
    """AdamW, wrapped in DistributedDataParallel when there are several ranks."""

    def __init__(self, objective: nn.Module, config: TrainConfig) -> None:
        world = dist.get_world_size() if dist.is_initialized() else 1
        if world > 1 and (found := rule_rows(objective)) is not None:
            name, rows = found  # their index is the same everywhere: it need not be broadcast
            tensors = (*rows.named_parameters(name), *rows.named_buffers(name))
            nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(  # type: ignore[no-untyped-call]  # torch's own
                objective, [tensor_name for tensor_name, _ in tensors]
            )
        # No parameter is unused; but only so does DDP keep its buckets as they are. Else it packs
        # them anew after its first step, and three ranks or more that resume add in another order
        # than three that never stopped. A sum of two has no order.
        wrapped = (
            nn.parallel.DistributedDataParallel(objective, find_unused_parameters=world > 2)
            if world > 1
            else None
        )
        super().__init__(objective, config, wrapped)

    def exchange_rows(self, rows: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows [U] that any rank has gradients for, and the mean over ranks [U, d].

        DDP leaves the table alone: what it would exchange is as large as the table.
        """
        world = dist.get_world_size() if dist.is_initialized() else 1
        if self._rows is None or world == 1:
            return rows, gradient
        touched = torch.zeros(len(self._rows.table), dtype=torch.int32, device=rows.device)
        touched[rows] = 1
        dist.all_reduce(touched)
        union = touched.nonzero().view(-1)
        mean = gradient.new_zeros(len(union), gradient.shape[1])
        mean[torch.searchsorted(union, rows)] = gradient
        dist.all_reduce(mean)
        return union, mean / world


class DeepSpeedStrategy:
    """DeepSpeed ZeRO stage 2: gradients and optimiser state are sharded over ranks."""

    def __init__(self, objective: nn.Module, config: TrainConfig) -> None:
        rule = "rule rows need strategy ddp: ZeRO-2 cannot move single rows of a table"
        remedy = "Set cluster.strategy to ddp, or leave rule_rows out."
        require(rule_rows(objective) is None, ConfigError, rule, "deepspeed", remedy)
        import deepspeed

        if not torch.cuda.is_available():
            # The shared-memory collective would be compiled for 49 s; gloo serves as well.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        settings = json.loads(ZERO2_CONFIG.read_text(encoding="utf-8"))
        settings["gradient_clipping"] = config.clip_norm
        settings["train_micro_batch_size_per_gpu"] = config.batch_size // dist.get_world_size()
        optimizer = adamw(objective, config)
        self._engine, *_ = deepspeed.initialize(
            model=objective,
            optimizer=optimizer,
            model_parameters=parameters(optimizer),
            config=settings,
        )
        self._zero = self._engine.optimizer

    def loss(self, indices: Sequence[int]) -> BatchLoss:
        loss: BatchLoss = self._engine(indices)
        return loss

    def update(self, scaled: Tensor, learning_rate: float) -> float:
        """Back-propagate, clip, step; ZeRO itself drops gradients that are not finite."""
        set_rate(self._zero, learning_rate)
        self._engine.backward(scaled)
        self._engine.step()
        return float(self._engine.get_global_grad_norm())

    def tensors(self) -> dict[str, Tensor]:
        """Return this rank's shard: AdamW's moments and the float32 master weights."""
        state = optimizer_tensors(self._zero.optimizer)
        for index, shard in enumerate(self._zero.single_partition_of_fp32_groups):
            state[f"optimizer.master.{index}"] = shard
        return state

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Restore this rank's shard; the module's weights are restored by the loop."""
        load_optimizer_tensors(self._zero.optimizer, tensors)
        with torch.no_grad():
            for index, shard in enumerate(self._zero.single_partition_of_fp32_groups):
                shard.copy_(tensors[f"optimizer.master.{index}"])
