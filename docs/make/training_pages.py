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
{step.rows} segments, {step.tokens:,} tokens, {step.units:,} units. *Plain* makes all
logits of both paths, all rows at once, and leaves the gradient to autograd; neither side uses masks
or caches. With bfloat16 the trunk's products round differently in other batches, which is what the
errors of those rows show. Errors are relative to the plain side. Memory is the growth of the peak
of a process that computes the side once. {liger}.
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


def _rungs(report: Report) -> Iterator[Report]:
    """Yield the rows of the ladder that are compared with another one, seeds in words."""
    for row in walk(report, "ladder.*row"):
        if "difference" in row:
            values = row["difference"]["kl"]["seeds"]
            yield row | {"seeds_kl": " / ".join(f"{value:+.3f}" for value in values)}


def _of_the_ladder(report: Report) -> str:
    """Return the text of the ladder, which names its budget and its seeds."""
    seeds = report["seeds"]
    runs = f"One run, seed {seeds[0]}: no spread is known."
    if len(seeds) > 1:
        two = " (of two values: their difference over the root of 2)" if len(seeds) == 2 else ""
        runs = (
            f"±: sample standard deviation over seeds {', '.join(map(str, seeds))}{two}, which "
            "differ in the weights that training starts from and in the order of the rows."
        )
    saving, layers = report["saving"], report["layers"]
    rules = f"{report['rules']:,} rules ({report['rules_digest']:.12})"
    if saving is not None:
        rules = (
            f"the most frequent of {rules} that save {saving:.1%} of the layer-tokens: at merge "
            f"depth k of {layers} layers the token reduction TR saves TR ({layers} - k) / {layers}"
        )
    return _LADDER_TEXT({**report, "runs": runs, "rules_of_rows": rules})


_LADDER_TEXT: Final = page("""\
Backbone *{backbone}* ({backbone_fingerprint:.12}), {rules_of_rows}. Every row is trained from fresh
weights for {steps} steps of {rows} rows of {length} tokens of *{texts.train.name}* (ids
{texts.train.digest:.12}): for one seed, all rows read the same batches. Learning rate {rate:g}
after a warm-up over {warmup:.0%} of the steps, then falling to 0; of rule rows {row_rate:g} times
that. The frozen model's products are in {precision}. Measured in float32 on {texts.test.rows} rows
of *{texts.test.name}* (ids {texts.test.digest:.12}), after the last step, not at a best one;
*untrained*: before the first.

*Top-1*: how often the most probable next token is the base model's; *KL*: divergence from the base
model in nats, both at unit ends as in the paper; *PPL ratio*: perplexity over that of the base
model ({ppl_base:.2f}). {runs}
""")
LADDER: Final = page(
    """\
# Ladder: from the paper's form to all steps together

@ budget

@ ladder.*row
row             | {row}
< trained       | {words}
TR              | {token_reduction:.1%}
KL, untrained   | {untrained.kl:.3f}
Top-1           | {untrained.top1:.3f}
PPL ratio       | {untrained.ppl_ratio:.3f}
KL, trained     | {trained.kl:.3f}
Top-1           | {trained.top1:.3f}
PPL ratio       | {trained.ppl_ratio:.3f}
seconds a step  | {seconds_per_step:.2f}

## Differences

Of a trained row to the one that it is a step from, paired by rows of text; a negative KL is better.
±: standard error over rows of text, of the mean over seeds; it says nothing about other seeds,
whose differences stand beside it.

@ rungs
row          | {row}
< against    | {over}
KL           | {difference.kl:.4f}
< KL by seed | {seeds_kl}
Top-1        | {difference.top1:.4f}
ln PPL       | {difference.ln_ppl:.4f}

Measured, and this page written, by `python -m benchmarks.ladder`.
""",
    budget=_of_the_ladder,
    rungs=_rungs,
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
PREFERENCE_STEP: Final = page(
    """\
# Preference step: packed against a row per answer

{questions} questions of {answers} answers on {device}, float32: contexts of {context} tokens,
merged by the checkpoint's rules, answers of {ending}. A step is the loss and its gradient by the
module. Times are medians with quartiles, of alternating runs; *times* is their ratio in the same
round. *Columns*: those of a row per answer over ours, the bound: more is an error of measurement;
*products*: operations of the blocks' and the head's products, likewise. The head's are the same on
both sides. It needs less time per operation than small blocks, so *times* can lie between the two.

@ checkpoints.*checkpoint
checkpoint     | {checkpoint}
TR             | {token_reduction:.1%}
row per answer | {seconds.a row per answer:.2f s}
packed         | {seconds.packed:.2f s}
pairs          | {times.runs}
times          | {times:.2f}
columns        | {columns:.2f}
products       | {products:.2f}
loss           | {loss_error:.1e}
gradient       | {gradient_error:.1e}

*loss*, *gradient*: relative difference between the sides. Their gates are in units of the
tolerance, 1e-5.
"""
)
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
