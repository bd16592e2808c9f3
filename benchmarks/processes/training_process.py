"""One rank of a measured training; ``ddp_vs_zero2`` starts this, here or on Ray workers.

The pieces are the product's: objective, strategy and loop. Around the strategy stands a watch that
times every step and keeps the first gradient. ``--job FILE`` trains here, without a group.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.common import parse
from benchmarks.timing import peak_bytes
from tasks.training.strategies import make_strategy
from umim_core.backbone.backbone import load_backbone
from umim_core.config.recipe import DistillConfig
from umim_core.merging.merged_model import MergedModel
from umim_core.merging.module import MergeModule
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet
from umim_core.store.artifacts import sha256_bytes, write_json
from umim_core.store.publication import STATE
from umim_core.training.loss import BatchLoss
from umim_core.training.objectives import DistillObjective
from umim_core.training.optimizer import Strategy
from umim_core.training.token_rows import TokenRows
from umim_core.training.train_loop import train
from umim_core.training.train_state import parameters_of

GRADIENT = "exp_avg"  # after the first step 1 - beta_1 times the clipped gradient


@dataclass(frozen=True)
class Job:
    """One measured training, as plain data."""

    backbone: str
    data: str
    strategy: Literal["ddp", "deepspeed"]
    config: Mapping[str, object]
    seed: int
    out: str


class Watch:
    """A strategy that times its steps and keeps the optimiser's state after the first one."""

    def __init__(self, inner: Strategy) -> None:
        self._inner = inner
        self._began = 0.0
        self.seconds: list[float] = []
        self.first: dict[str, Tensor] = {}

    def loss(self, indices: Sequence[int]) -> BatchLoss:
        """Start the clock and run the objective."""
        self._began = time.perf_counter()
        return self._inner.loss(indices)

    def update(self, scaled: Tensor, learning_rate: float) -> float:
        """Finish the step and stop the clock."""
        norm = self._inner.update(scaled, learning_rate)
        self.seconds.append(time.perf_counter() - self._began)
        if not self.first:
            self.first = {name: value.clone() for name, value in self.tensors().items()}
        return norm

    def tensors(self) -> dict[str, Tensor]:
        """Return the optimiser state of this rank."""
        return self._inner.tensors()

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Restore what :meth:`tensors` returned."""
        self._inner.load(tensors)


def train_measured(fields: Mapping[str, object]) -> None:
    """Train on this rank with one thread, and write what was measured."""
    job = Job(**fields)  # type: ignore[arg-type]  # a Job as plain data
    torch.set_num_threads(1)  # every rank has one core, one process too
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    data, out = Path(job.data), Path(job.out)
    config = DistillConfig.model_validate(job.config)
    backbone = load_backbone(job.backbone)
    module = MergeModule(backbone.hidden_size)
    module.initialise(backbone.embedding_std, torch.Generator().manual_seed(job.seed))
    objective = DistillObjective(
        MergedModel(backbone, module, Matcher(RuleSet.load(data / "rules")), "compact"),
        TokenRows.load(data / "train", 0),
        TokenRows.load(data / "valid", 0),
        bf16=config.bf16,
        micro_batch=config.micro_batch,
        batch_size=config.batch_size // world,
    )
    watch = Watch(make_strategy(job.strategy, objective, config))
    result = train(objective, watch, config, seed=job.seed, state_dir=out / STATE)
    weights = b"".join(value.numpy().tobytes() for value in parameters_of(module).values())
    gradient = {name: value for name, value in watch.first.items() if name.endswith(GRADIENT)}
    save_file(gradient, out / f"first-{rank}.safetensors")
    record = {
        "seconds": watch.seconds,
        "moment_bytes": sum(v.nbytes for k, v in watch.tensors().items() if GRADIENT in k),
        "optimizer_bytes": sum(value.nbytes for value in watch.tensors().values()),
        "peak_bytes": peak_bytes(),
        "weights": sha256_bytes(weights),
    }
    write_json(out / f"rank-{rank}.json", record)
    if rank == 0:
        write_json(out / "curve.json", result.progress.curve)
        write_json(out / "summary.json", {"steps": result.progress.step})


def main() -> None:
    """Train alone."""
    options = parse(__doc__, {"job": {"type": Path, "required": True}})  # a job's fields (JSON)
    train_measured(json.loads(options.job.read_text(encoding="utf-8")))
    print(json.dumps({"done": True}))


if __name__ == "__main__":
    main()
