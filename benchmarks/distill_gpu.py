"""The distillation step on a GPU: the loss against its bound and Liger, a step against the peak.

    python benchmarks/distill_gpu.py --out docs/results/distill_gpu.json

Random bfloat16 weights: the loss has the head of Llama-3.1-8B, the step the shape of Llama-3.2-1B
with random merges. Gates (P3, on an H200): time of the loss at most 1.35 times its
bound and Liger's at least 1.3 times ours, at most 2 GB on top of its inputs, and a step at 45 % of
the device's own peak.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.common import Benchmark, Gate, Report, at_least, at_most
from benchmarks.distill_sides import (
    LIGER,
    OURS,
    Result,
    Shape,
    compare,
    liger_version,
    loss_sides,
    step_flops,
)
from benchmarks.timing import alternate, device_name, finished, spread
from umim_core.backbone.backbone import wrap_backbone
from umim_core.backbone.shape import BackboneShape
from umim_core.benchmarking.roofline import measure_peak, synchronize
from umim_core.config.form import ModuleForm
from umim_core.distill.step import DistillModel
from umim_core.distill.step_memory import step_memory
from umim_core.merging.compressed import Compressed
from umim_core.merging.module import MergeModule
from umim_core.merging.packing import Segmentation

OVER_BOUND, OVER_LIGER, EXTRA_BYTES, MFU = 1.35, 1.3, 2e9, 0.45
TOLERANCE: Final = 5e-2  # the plain side rounds its logits to bfloat16
LLAMA_8B_HEAD: Final = Shape(rows=8192, hidden=4096, vocab=128_256)
LLAMA_1B: Final = BackboneShape(
    hidden_size=2048,
    intermediate_size=8192,
    layers=16,
    heads=32,
    kv_heads=8,
    head_dim=64,
    vocab_size=128_256,
    tied=True,
    gated_mlp=True,
)


def extra_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Return by how many bytes a run exceeds what was allocated before; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    synchronize(device)
    return int(torch.cuda.max_memory_allocated(device) - before)


def measure_loss(shape: Shape, device: torch.device, peak: float, rounds: int) -> Report:
    """Measure the loss and its peers, against the time of its three products."""
    named = loss_sides(shape, device, torch.bfloat16)
    sides = {name: finished(side, device) for name, side in named.items()}
    bound = 6.0 * shape.rows * shape.hidden * shape.vocab / peak
    found = compare(sides, rounds)
    for name, side in found.items():
        side["over_bound"] = side["seconds"]["median"] / bound
        side["bytes"] = extra_bytes(sides[name], device)
    return {**vars(shape), "bound_seconds": bound, "sides": found}


def random_cuts(rows: int, length: int, reduction: float) -> list[Segmentation]:
    """Return units of 1 to 3 tokens that remove about ``reduction`` of every row's tokens."""
    rng = np.random.default_rng(0)
    share = reduction / (2.0 - 2.0 * reduction)  # of units that are spans of three
    cuts = []
    for _ in range(rows):
        lengths = np.where(rng.random(length) < share, 3, 1).astype(np.int64)
        lengths = lengths[: int(np.searchsorted(lengths.cumsum(), length)) + 1]
        lengths[-1] -= lengths.sum() - length
        cuts.append((lengths.cumsum() - lengths, lengths))
    return cuts


def measure_step(
    shape: BackboneShape, device: torch.device, peak: float, rows: int, length: int, rounds: int
) -> Report:
    """Measure whole steps of a random backbone."""
    config = LlamaConfig(
        **shape.model_dump(include={"hidden_size", "intermediate_size", "head_dim", "vocab_size"}),
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=length,
    )
    config.bos_token_id = config.eos_token_id = None
    with device:
        raw = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, trust_remote_code=False
        )
    backbone = wrap_backbone(raw, None)
    form = ModuleForm()
    module = MergeModule(shape.hidden_size)
    module.initialise(backbone.embedding_std, torch.Generator().manual_seed(0))
    model = DistillModel(Compressed(backbone, module.to(device), None, "compact"), autocast=True)
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, shape.vocab_size, length) for _ in range(rows)]
    cuts = random_cuts(rows, length, 0.4)

    def step() -> Result:
        loss = model(ids, cuts)
        mean = loss.total / loss.rows
        gradients = torch.autograd.grad(mean, list(module.parameters()))
        return float(mean.detach()), torch.cat([part.reshape(-1) for part in gradients])

    sides = {OURS: finished(step, device)}
    seconds = {name: spread(values) for name, values in alternate(sides, rounds).items()}
    units = sum(len(starts) for starts, _ in cuts)
    flops = step_flops(shape, rows * length, units, length)
    bound = step_memory(
        shape, form, rows=rows, segment_length=length, bf16=True, strategy="ddp", gpus=1
    )
    return {
        "rows": rows,
        "tokens": rows * length,
        "units": units,
        "parameters": sum(p.numel() for p in raw.parameters()),
        "sides": {
            name: {
                "seconds": found,
                "mfu": flops / found["median"] / peak,
                "bytes": extra_bytes(sides[name], device),
            }
            for name, found in seconds.items()
        },
        "bound_bytes": bound["activations, loss"],
    }


def gates(report: Report) -> dict[str, Gate]:
    """Return value, limit and verdict of every gate."""
    loss, step = report["loss"]["sides"], report["step"]["sides"]
    ours = loss[OURS]
    found = {
        "loss_over_bound": at_most(ours["over_bound"], OVER_BOUND),
        "loss_extra_bytes": at_most(ours["bytes"], EXTRA_BYTES),
        "loss_gradient_error": at_most(ours["gradient_error"], TOLERANCE),
        "step_mfu": at_least(step[OURS]["mfu"], MFU),
    }
    if LIGER in loss:
        slower = loss[LIGER]["over_bound"] / ours["over_bound"]
        found["liger_over_ours"] = at_least(slower, OVER_LIGER)
    return found


def run(head: Shape, shape: BackboneShape, options: argparse.Namespace, report: Report) -> None:
    """Measure the device, the loss of a head and the step of a backbone."""
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU, and torch sees none here")
    report["facts"]["device"] = device_name(device)
    report["liger"] = liger_version()
    report["peak_flops"] = peak = measure_peak(device, torch.bfloat16).peak_flops
    report["loss"] = measure_loss(head, device, peak, options.rounds)
    report["step"] = measure_step(shape, device, peak, options.rows, options.length, options.rounds)


def equal(report: Report) -> bool:
    """Return whether the gradient of the loss is the plain side's."""
    return bool(report["gates"]["loss_gradient_error"][2])


def main(
    arguments: list[str] | None = None,
    head: Shape = LLAMA_8B_HEAD,
    backbone: BackboneShape = LLAMA_1B,
) -> int:
    """Run the benchmark; 1 if a gate is missed or a result differs."""
    return Benchmark(
        name="distill_gpu",
        doc=__doc__,
        options={"device": "cuda", "rows": 16, "length": 1024, "rounds": 10},
        measure=partial(run, head, backbone),
        gates=gates,
        equal=equal,
    ).main(arguments)


if __name__ == "__main__":
    sys.exit(main())
