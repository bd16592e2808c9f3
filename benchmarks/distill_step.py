"""The distillation step against a plain one that holds all logits, Liger, and its bounds.

    python -m benchmarks.distill_step --out docs/results/distill_step.json
    python -m benchmarks.distill_step --ids tokens.npy --shapes embedded --rounds 3
    python -m benchmarks.distill_step --on smollm2
    python -m benchmarks.distill_step --on gpu

On the embedded backbone: first the loss alone, on random states of three shapes; then whole steps
on text. All sides get the same input, and their losses and gradients are compared in the run.
Memory is the growth of the peak of a process that computes one side once. Gates (P3): loss within
1e-5 and gradient within 1e-4 of the plain step in float32, memory of the loss at most a fifth, time
at most 1.1 times the plain one. Liger takes part where it is installed.

On SmolLM2-135M: bfloat16 products, the same with weights cast for every product as autocast does by
itself (equal bits are required), and float32. Bound: the step's products (teacher, student and its
backward pass to the inputs, three with the head) at the best rate of the machine's own products of
that data type. Gate (P8): at most 6 s a step on the faster of both data types.

On a GPU: random bfloat16 weights, the loss with the head of Llama-3.1-8B, the step with the shape
of Llama-3.2-1B. Gates (P3, on an H200): time of the loss at most 1.35 times its bound and Liger's
at least 1.3 times ours, at most 2 GB on top of its inputs, and a step at 45 % of the device's peak.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import torch

from benchmarks.common import (
    Benchmark,
    Gate,
    Report,
    at_least,
    at_most,
    fresh,
    no_error_gate_missed,
)
from benchmarks.corpus import CORPUS_OPTIONS, ids_file
from benchmarks.distill_sides import (
    LENGTH,
    LIGER,
    OURS,
    PLAIN,
    SHAPES,
    Batch,
    CastingModel,
    Shape,
    batch_of,
    compare,
    embedded_batch,
    liger_version,
    loss_sides,
    random_batch,
    step_flops,
    step_of,
    step_sides,
)
from benchmarks.engine_sides import CHECKPOINT, general_text
from benchmarks.timing import alternate, device_name, finished, spread
from umim_core.backbone.shape import BackboneShape
from umim_core.config.form import ModuleForm
from umim_core.errors import UmimError
from umim_core.merging.merged_model import MergedModel
from umim_core.model.umim import UMIM
from umim_core.throughput.roofline import measure_peak, synchronize
from umim_core.training.step import DistillModel, step_memory

LOSS_ERROR, GRADIENT_ERROR = 1e-5, 1e-4
MEMORY_SHARE, TIME_RATIO = 0.2, 1.1
STEP_SECONDS: Final = 6.0  # of SmolLM2
OVER_BOUND, OVER_LIGER, EXTRA_BYTES, MFU = 1.35, 1.3, 2e9, 0.45  # of a GPU
ROUNDED: Final = 5e-2  # on a GPU the plain side rounds its logits to bfloat16
CASTS, SINGLE = "ours, weights cast for every product", "ours, float32"
ROWS: Final = {"embedded": 8, "smollm2": 4, "gpu": 16}
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


def measure_loss(shape: Shape, rounds: int) -> Report:
    """Measure the loss alone on one shape."""
    sides = compare(loss_sides(shape), rounds)
    text = f"{shape.rows},{shape.hidden},{shape.vocab}"
    for name, figures in sides.items():
        figures |= fresh("distill_sides", side=name, shape=text)
    return {**vars(shape), "sides": sides}


def measure_step(ids: Path, rows: int, rounds: int) -> Report:
    """Measure whole steps, in float32 and with bfloat16 products."""
    batch = embedded_batch(ids, rows)
    precisions: Report = {}
    for name, autocast in (("float32", False), ("bfloat16", True)):
        precisions[name] = compare(step_sides(batch, autocast=autocast), rounds)
    for name in (OURS, PLAIN):
        precisions["float32"][name] |= fresh("distill_sides", side=name, ids=ids, rows=rows)
    return _sizes(batch) | {"precisions": precisions}


def _sizes(batch: Batch) -> Report:
    units = sum(len(starts) for starts, _ in batch.cuts)
    return {"rows": len(batch.rows), "tokens": sum(map(len, batch.rows)), "units": units}


def smollm2_batch(checkpoint: str, rows: int) -> Batch:
    """Return rows of held-out text under a checkpoint's rules, and a fresh module."""
    try:
        umim = UMIM.from_pretrained(checkpoint, dtype="float32")
    except UmimError as error:
        raise SystemExit(f"skipped: {error}") from error
    return batch_of(umim, general_text(umim, rows * LENGTH)[1][: rows * LENGTH])


def measure_precisions(batch: Batch, rounds: int) -> Report:
    """Time a step in every precision in turn, against the bound of its products."""
    merged_model = MergedModel(batch.backbone, batch.module, None, "compact")
    models = {
        OURS: DistillModel(merged_model, autocast=True),
        CASTS: CastingModel(merged_model),
        SINGLE: DistillModel(merged_model),
    }
    sides = {name: partial(step_of, batch, model) for name, model in models.items()}
    timed = compare(sides, rounds, to=SINGLE)
    sizes = _sizes(batch)
    shape = BackboneShape.of_config(batch.backbone.model.config)
    flops = step_flops(shape, sizes["tokens"], sizes["units"])
    single, half = (
        flops / measure_peak(torch.device("cpu"), dtype).peak
        for dtype in (torch.float32, torch.bfloat16)
    )
    for name, figures in timed.items():
        bound = single if name == SINGLE else half
        figures |= {"over_bound": figures["seconds"]["median"] / bound, "bound_seconds": bound}
    (loss, gradient), (cast_loss, cast_gradient) = sides[OURS](), sides[CASTS]()
    same = loss == cast_loss and torch.equal(gradient, cast_gradient)
    return sizes | {"precisions": {"bfloat16 and float32": timed}, "equal": same}


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


def measure_bounded_loss(shape: Shape, device: torch.device, peak: float, rounds: int) -> Report:
    """Measure the loss and its peers, against the time of its three products."""
    named = loss_sides(shape, device, torch.bfloat16)
    sides = {name: finished(side, device) for name, side in named.items()}
    bound = 6.0 * shape.rows * shape.hidden * shape.vocab / peak
    timed = compare(sides, rounds)
    for name, figures in timed.items():
        figures["over_bound"] = figures["seconds"]["median"] / bound
        figures["bytes"] = extra_bytes(sides[name], device)
    return {**vars(shape), "bound_seconds": bound, "sides": timed}


def measure_random_step(
    shape: BackboneShape, device: torch.device, peak: float, rows: int, length: int, rounds: int
) -> Report:
    """Measure whole steps of a random backbone, against its bound of memory."""
    batch = random_batch(shape, device, rows, length)
    model = DistillModel(MergedModel(batch.backbone, batch.module, None, "compact"), autocast=True)
    step = finished(partial(step_of, batch, model), device)
    seconds = spread(alternate({OURS: step}, rounds)[OURS])
    sizes = _sizes(batch)
    flops = step_flops(shape, sizes["tokens"], sizes["units"], length)
    bound = step_memory(
        shape, ModuleForm(), rows=rows, segment_length=length, bf16=True, strategy="ddp", gpus=1
    )
    figures = {
        "seconds": seconds,
        "mfu": flops / seconds["median"] / peak,
        "bytes": extra_bytes(step, device),
        "bound_bytes": bound["activations, loss"],
    }
    return sizes | {"precisions": {"bfloat16": {OURS: figures}}}


def gates(report: Report) -> dict[str, Gate]:
    """Return value, limit and verdict of every gate."""
    return {"embedded": _plain_gates, "smollm2": _smollm2_gates, "gpu": _gpu_gates}[report["on"]](
        report
    )


def _plain_gates(report: Report) -> dict[str, Gate]:
    judged: dict[str, Gate] = {}
    measured = {
        **{f"loss_{name}": loss["sides"] for name, loss in report["losses"].items()},
        "step": report["step"]["precisions"]["float32"],
    }
    for name, sides in measured.items():
        ours = sides[OURS]
        judged[f"{name}_error"] = at_most(ours["loss_error"] / LOSS_ERROR, 1.0)
        judged[f"{name}_gradient_error"] = at_most(ours["gradient_error"] / GRADIENT_ERROR, 1.0)
        judged[f"{name}_time"] = at_most(ours["time_ratio"]["median"], TIME_RATIO)
        if name != "step":
            judged[f"{name}_memory"] = at_most(ours["bytes"] / sides[PLAIN]["bytes"], MEMORY_SHARE)
    return judged


def _smollm2_gates(report: Report) -> dict[str, Gate]:
    (sides,) = report["step"]["precisions"].values()
    seconds = min(sides[name]["seconds"]["median"] for name in (OURS, SINGLE))
    other_bits = float(not report["step"]["equal"])
    return {
        "seconds_a_step": at_most(seconds, STEP_SECONDS),
        "held_weights_error": at_most(other_bits, 0.0),
    }


def _gpu_gates(report: Report) -> dict[str, Gate]:
    (loss,) = (loss["sides"] for loss in report["losses"].values())
    ours = loss[OURS]
    judged = {
        "loss_over_bound": at_most(ours["over_bound"], OVER_BOUND),
        "loss_extra_bytes": at_most(ours["bytes"], EXTRA_BYTES),
        "loss_gradient_error": at_most(ours["gradient_error"] / ROUNDED, 1.0),
        "step_mfu": at_least(report["step"]["precisions"]["bfloat16"][OURS]["mfu"], MFU),
    }
    if LIGER in loss:
        slower = loss[LIGER]["over_bound"] / ours["over_bound"]
        judged["liger_over_ours"] = at_least(slower, OVER_LIGER)
    return judged


def run(head: Shape, shape: BackboneShape, options: argparse.Namespace, report: Report) -> None:
    """Measure the losses and the step of what was asked for."""
    rounds, rows = options.rounds, options.rows or ROWS[options.on]
    report |= {"on": options.on, "liger": liger_version(), "losses": {}}
    if options.on == "embedded":
        report["losses"] = {name: measure_loss(SHAPES[name], rounds) for name in options.shapes}
        report["step"] = measure_step(ids_file(options), rows, rounds)
    elif options.on == "smollm2":
        report["step"] = measure_precisions(smollm2_batch(options.checkpoint, rows), rounds)
    else:
        device = torch.device(options.device)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise SystemExit("--on gpu needs a GPU, and torch sees none here")
        report["facts"]["device"] = device_name(device)
        peak = measure_peak(device, torch.bfloat16).peak
        loss = measure_bounded_loss(head, device, peak, rounds)
        report["losses"] = {"Llama-3.1-8B": loss}
        report["step"] = measure_random_step(shape, device, peak, rows, options.length, rounds)


def main(
    arguments: list[str] | None = None,
    head: Shape = LLAMA_8B_HEAD,
    backbone: BackboneShape = LLAMA_1B,
) -> int:
    """Run the benchmark; 1 if a gate is missed or a result differs."""
    return Benchmark(
        name="distill_step",
        doc=__doc__,
        options=CORPUS_OPTIONS
        | {
            "on": {"choices": tuple(ROWS), "default": "embedded"},
            "shapes": tuple(SHAPES),
            "checkpoint": CHECKPOINT,
            "device": "cuda",
            "rows": int,
            "length": 1024,
            "rounds": 10,
        },
        measure=partial(run, head, backbone),
        gates=gates,
        equal=no_error_gate_missed,
    ).main(arguments)


if __name__ == "__main__":
    sys.exit(main())
