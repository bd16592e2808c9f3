"""The pages of ``benchmarks/distill_step.py`` and ``benchmarks/distill_gpu.py``."""

from __future__ import annotations

from benchmarks.common import Report
from benchmarks.tables import gate_table, machine, spread, table

_MIB = 2.0**20


def distill_page(report: Report) -> str:
    """Return the page of ``benchmarks/distill_step.py``."""
    step = report["step"]
    rows = [
        [f"loss, {name}: {side}", *_cells(found)]
        for name, loss in report["losses"].items()
        for side, found in loss["sides"].items()
    ]
    rows += [
        [f"step, {precision}: {side}", *_cells(found)]
        for precision, sides in step["precisions"].items()
        for side, found in sides.items()
    ]
    head = ["", "time (quartiles)", "runs", "time against plain", "loss error", "gradient error"]
    shapes = "; ".join(
        f"{name} {loss['rows']:,} rows, d = {loss['hidden']:,}, V = {loss['vocab']:,}"
        for name, loss in report["losses"].items()
    )
    liger = (
        f"Liger {report['liger']}: not compiled, chunks as ours; it also computes the gradient of "
        "the head, which a frozen one does not need"
        if report["liger"]
        else "Liger not installed"
    )
    parts = [
        "# Distillation step: ours, plain, Liger",
        f"The loss alone on random states in float32 ({shapes}), and whole steps of the embedded "
        f"backbone: {step['rows']} segments, {step['tokens']:,} tokens, {step['units']:,} units. "
        "*Compiled* is `loss_kernel: compiled`, measured after its first call. "
        "*Plain* makes all logits of both paths, all rows at once, and leaves the gradient to "
        "autograd; neither side uses masks or caches. With bfloat16 the trunk's products round "
        "differently in other batches, which is what the errors of those rows show. Errors are "
        "relative to the plain side. Memory is the growth of the peak of a process that computes "
        f"the side once. {liger}.",
        table([*head, "memory"], rows),
        "Gates of errors are in units of the tolerance (loss 1e-5, gradient 1e-4).",
    ]
    return "\n\n".join([*parts, gate_table(report), machine(report)]) + "\n"


def distill_gpu_page(report: Report) -> str:
    """Return the page of ``benchmarks/distill_gpu.py``."""
    loss, step = report["loss"], report["step"]
    rows = [
        [
            side,
            spread(found["seconds"], " s", 4),
            f"{found['over_bound']:.2f}",
            spread(found["time_ratio"]),
            f"{found['gradient_error']:.1e}",
            f"{found['bytes'] / 1e9:.2f} GB",
        ]
        for side, found in loss["sides"].items()
    ]
    steps = [
        [
            side,
            spread(found["seconds"], " s", 3),
            f"{100 * found['mfu']:.1f} %",
            f"{found['bytes'] / 1e9:.2f} GB",
        ]
        for side, found in step["sides"].items()
    ]
    head = ["side", "time (quartiles)", "over the bound", "time against plain", "gradient error"]
    liger = f"Liger {report['liger']}" if report["liger"] else "Liger not installed"
    parts = [
        "# Distillation step on a GPU",
        f"{report['facts']['device']}; its best bfloat16 product: "
        f"{report['peak_flops'] / 1e12:,.1f} TFLOP/s.",
        f"The loss alone: {loss['rows']:,} rows, d = {loss['hidden']:,}, V = {loss['vocab']:,}, "
        f"bfloat16, random. Its bound is the time of its three products, "
        f"{loss['bound_seconds'] * 1e3:.1f} ms. Errors are relative to the plain side. {liger}.",
        table([*head, "memory on top"], rows),
        f"A whole step of a random backbone of {step['parameters'] / 1e6:,.0f} M parameters: "
        f"{step['rows']} rows, {step['tokens']:,} tokens, {step['units']:,} units; predicted "
        f"{step['predicted_seconds']:.3f} s and {step['predicted_bytes'] / 1e9:.2f} GB on top of "
        "the weights, for products at 45 % of the peak.",
        table(["side", "time (quartiles)", "share of the peak", "memory on top"], steps),
    ]
    return "\n\n".join([*parts, gate_table(report), machine(report)]) + "\n"


def _cells(found: Report) -> list[str]:
    memory = f"{found['bytes'] / _MIB:,.0f} MiB" if "bytes" in found else ""
    return [
        spread(found["seconds"], " s"),
        str(found["seconds"]["runs"]),
        spread(found["time_ratio"]),
        f"{found['loss_error']:.1e}",
        f"{found['gradient_error']:.1e}",
        memory,
    ]
