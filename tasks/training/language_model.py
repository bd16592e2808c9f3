"""Training of a small causal language model with the loop that trains merge modules.

A row of L predicted tokens is L + 1 ids of the corpus; consecutive rows share one id::

    ids    a b c d e f g     L 3     row 0: a b c | b c d     row 1: d e f | e f g
                                            input | target
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pydantic import TypeAdapter
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from tasks.training.strategies import make_strategy
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.config.backbone_recipe import Architecture, LanguageModelConfig
from umim_core.config.recipe import Device
from umim_core.distill.objectives import BatchLoss, spread_rows
from umim_core.distill.train_job import in_bfloat16
from umim_core.distill.train_loop import train
from umim_core.distill.train_run import step_reporter, write_results
from umim_core.distill.train_state import load_parameters
from umim_core.errors import CorpusError
from umim_core.store.publication import STATE
from umim_core.text.shards import TokenShards


@dataclass(frozen=True)
class LanguageModelJob:
    """One training run, as plain data.

    Attributes:
        architecture: Dumped architecture.
        tokenizer: Directory of the tokenizer; it is copied next to the weights.
        train: Directory of the training split's token shards.
        valid: Directory of the validation split's token shards.
        seed: Seed of weights and data order.
        config: Dumped LanguageModelConfig.
        strategy: ``ddp`` or ``deepspeed``.
        use_gpu: Whether workers use a GPU each.
        out: Directory that receives ``backbone/``, curve and (while running) state.
    """

    architecture: Mapping[str, object]
    tokenizer: str
    train: str
    valid: str
    seed: int
    config: Mapping[str, object]
    strategy: str
    use_gpu: bool
    out: str


class LanguageModelObjective(nn.Module):
    """Next-token prediction over rows of a token stream.

    Args:
        model: The model being trained.
        train: Training ids [T].
        valid: Validation ids [T].
        length: Tokens predicted per row, L.
        bf16: Run the model under bfloat16 autocast; weights and loss stay float32.
        batch_size: Rows per forward of a validation.

    Raises:
        CorpusError: If the validation ids are shorter than a row.
    """

    metric_names = ("loss",)
    weight_name = "tokens"

    def __init__(
        self,
        model: PreTrainedModel,
        train: TokenShards,
        valid: TokenShards,
        *,
        length: int,
        bf16: bool,
        batch_size: int,
    ) -> None:
        super().__init__()
        self.module = model
        self._train, self._valid = train, valid
        self._length, self._bf16, self._batch_size = length, bf16, batch_size
        self.num_items = self._rows(train)
        if self._rows(valid) < 1:
            raise CorpusError(
                f"validation needs at least one row of {length + 1} tokens",
                len(valid),
                "Give more validation text or a smaller sequence_length.",
            )

    def _rows(self, ids: TokenShards) -> int:
        return max(0, len(ids) - 1) // self._length

    def forward(self, indices: Sequence[int]) -> BatchLoss:
        """Return the loss sum over the predicted tokens of these training rows."""
        return self._loss(self._train, indices)

    def _loss(self, ids: TokenShards, indices: Sequence[int]) -> BatchLoss:
        starts = [index * self._length for index in indices]
        rows = np.stack([ids[at : at + self._length + 1] for at in starts]).astype(np.int64)
        device = next(self.module.parameters()).device
        tokens = torch.from_numpy(rows).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=self._bf16):
            logits: Tensor = self.module(input_ids=tokens[:, :-1], use_cache=False).logits
        total = F.cross_entropy(
            logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
        )
        return BatchLoss(total, float(tokens[:, 1:].numel()), total.detach())

    @torch.no_grad()
    def validation_sums(self, rank: int, world: int, limit: int) -> list[float]:
        """Return [tokens, loss sum] over this rank's validation rows."""
        sums = [0.0, 0.0]
        mine = spread_rows(self._rows(self._valid), limit)[rank::world]
        for start in range(0, len(mine), self._batch_size):
            loss = self._loss(self._valid, mine[start : start + self._batch_size])
            sums[0] += loss.weight
            sums[1] += float(loss.total)
        return sums

    def score(self, metrics: dict[str, float]) -> float:
        """Select by validation loss."""
        return metrics["loss"]


def fresh_model(
    architecture: Mapping[str, object], vocab_size: int, end: int, seed: int
) -> PreTrainedModel:
    """Return an untrained model; the same seed gives the same weights."""
    shape = TypeAdapter(Architecture).validate_python(architecture)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            shape.build(vocab_size, end), dtype=torch.float32, trust_remote_code=False
        )
    return model


def train_language_model(fields: dict[str, object]) -> None:
    """Train on one rank; rank 0 writes the model, curve and summary into the job's directory."""
    job = LanguageModelJob(**fields)  # type: ignore[arg-type]  # a LanguageModelJob as plain data
    config = LanguageModelConfig.model_validate(job.config)
    tokenizer = load_tokenizer(job.tokenizer)
    model = fresh_model(job.architecture, len(tokenizer), tokenizer.eos_token_id, job.seed)
    device: Device = "cuda" if job.use_gpu else "cpu"
    nn.Module.to(model, device)
    world = dist.get_world_size() if dist.is_initialized() else 1
    objective = LanguageModelObjective(
        model,
        TokenShards.open(Path(job.train)),
        TokenShards.open(Path(job.valid)),
        length=config.sequence_length,
        bf16=config.bf16 and in_bfloat16(device),
        batch_size=config.batch_size // world,
    )
    result = train(
        objective,
        make_strategy(job.strategy, objective, config),
        config,
        seed=job.seed,
        state_dir=Path(job.out) / STATE,
        on_step=step_reporter(Path(job.out) / STATE),
    )
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    load_parameters(model, result.weights)

    def write(target: Path) -> None:
        model.to(torch.bfloat16).save_pretrained(target)
        tokenizer.save_pretrained(target)

    write_results(Path(job.out), "backbone", write, result.progress)
