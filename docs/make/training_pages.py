"""Pages of the benchmarks of training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tasks.report.page_template import Report, filled_in, page, walk


def _steps(report: Report) -> Iterator[Report]:
    """Yield the sides of ``distill_step.py``: of the loss alone, then of whole steps."""
    yield from (row | {"what": "loss"} for row in walk(report, "losses.*name.sides.*side"))
    yield from (row | {"what": "step"} for row in walk(report, "step.precisions.*name.*side"))


def _losses(report: Report) -> str:
    """Return the text of ``distill_step.py``, which names the shapes of its losses."""
    shape = "{name} {rows:,} rows, d = {hidden:,}, V = {vocab:,}"
    shapes = "; ".join(filled_in(shape, loss) for loss in walk(report, "losses.*name"))
    liger = filled_in(_LIGER, report) or "Liger not installed"
    return _STEP_TEXT({**report, "shapes": shapes, "liger": liger})


_LIGER: Final = (
    "Liger {liger?}: not compiled, chunks as ours; it also computes the gradient of the head, "
    "which a frozen one does not need"
)
_STEP_TEXT: Final = page("""\
The loss alone on random states in float32 ({shapes}), and whole steps of the embedded backbone:
{step.rows} segments, {step.tokens:,} tokens, {step.units:,} units. *Compiled* is `loss_kernel:
compiled`, measured after its first call. *Plain* makes all logits of both paths, all rows at once,
and leaves the gradient to autograd; neither side uses masks or caches. With bfloat16 the trunk's
products round differently in other batches, which is what the errors of those rows show. Errors are
relative to the plain side. Memory is the growth of the peak of a process that computes the side
once. {liger}.
""")
STEP: Final = page(
    """\
# Distillation step: ours, plain, Liger

@ losses

@ steps
                   | {what}, {name}: {side}
time (quartiles)   | {seconds:.2f s}
runs               | {seconds.runs}
time against plain | {time_ratio:.2f}
loss error         | {loss_error:.1e}
gradient error     | {gradient_error:.1e}
memory             | {bytes?!i:,.0f} MiB

Gates of errors are in units of the tolerance (loss 1e-5, gradient 1e-4).
""",
    losses=_losses,
    steps=_steps,
)
STEP_ON_SMOLLM2: Final = page("""\
# Distillation step on SmolLM2-135M

A step of 4 rows of 512 tokens of held-out text, merged by the shipped rules, with a fresh module.
*Cast for every product* is what autocast does by itself; held weights give the same bits. *Bound*:
the products of a step at the best rate of the machine's own products of that data type, measured
in the same process. *Gradient*: its relative difference from that of the float32 step. Instruction
sets other than DEFAULT are emulated: oneDNN leaves out the newer instructions that this processor
has.

@ sets.*isa.sides.*side
instruction set  | {isa}
products         | {side}
time (quartiles) | {seconds:.2f s}
runs             | {seconds.runs}
over the bound   | {over_bound:.2f}
against casts    | {time_ratio:.2f}
gradient         | {gradient_error:.1e}

@ sets.*isa
instruction set     | {isa}
units               | {units:,}
products, TFLOP     | {flops!T:.2f}
bfloat16, TFLOP/s   | {peak_flops.bfloat16!T:.2f}
float32, TFLOP/s    | {peak_flops.float32!T:.2f}
bound, bfloat16     | {bound_seconds.bfloat16:.2f} s
bound, float32      | {bound_seconds.float32:.2f} s
""")
STEP_ON_GPU: Final = page("""\
# Distillation step on a GPU

{facts.device}; its best bfloat16 product: {peak_flops!T:,.1f} TFLOP/s.

The loss alone: {loss.rows:,} rows, d = {loss.hidden:,}, V = {loss.vocab:,}, bfloat16, random. Its
bound is the time of its three products, {loss.bound_seconds!m:.1f} ms. Errors are relative to the
plain side. Liger {liger?not installed}.

@ loss.sides.*side
side               | {side}
time (quartiles)   | {seconds:.4f s}
over the bound     | {over_bound:.2f}
time against plain | {time_ratio:.2f}
gradient error     | {gradient_error:.1e}
memory on top      | {bytes!G:.2f} GB

A whole step of a random backbone of {step.parameters!M:,.0f} M parameters: {step.rows} rows,
{step.tokens:,} tokens, {step.units:,} units; predicted {step.predicted_seconds:.3f} s and
{step.predicted_bytes!G:.2f} GB on top of the weights, for products at 45 % of the peak.

@ step.sides.*side
side              | {side}
time (quartiles)  | {seconds:.3f s}
share of the peak | {mfu!p:.1f %}
memory on top     | {bytes!G:.2f} GB
""")
DDP: Final = page("""\
# Training: DDP and ZeRO-2 against one process

{backbone}, {steps} steps over global batches of {batch_size} rows of {corpus.segment_length}
tokens, {corpus.rules:,} rules, float32, one core per rank; started by Ray Train but for the one
process. Moments, optimiser state and peak memory are those of one rank; a resume state is that of
all. The optimiser state of ZeRO-2 includes its master copy of the weights.

@ sides.*side
side                      | {side}
time per step (quartiles) | {seconds_per_step:.3f s}
against one process       | {times_one_process:.2f}
moments, MiB              | {moment_bytes!i:,.2f}
optimiser, MiB            | {optimizer_bytes!i:,.2f}
resume state, MiB         | {state_bytes!i:,.2f}
peak, MiB                 | {peak_bytes!i:,.0f}
loss                      | {loss_difference:.1e}
gradient                  | {gradient_difference:.1e}

*loss*: largest relative difference of a loss on the whole curve from the joint batch in one process
(tolerance {tolerances.loss:.0e}); *gradient*: of a component of the first gradient, in units of the
largest (tolerance {tolerances.gradient:.0e}).
""")
