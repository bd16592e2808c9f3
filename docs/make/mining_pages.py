"""Pages of the benchmarks of mining and matching."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tasks.report.page_template import Report, page, walk

_LAWS: Final = ("decade", "dry_run")


def _predictions(report: Report) -> Iterator[Report]:
    """Yield what ``mining_scaling.py`` predicted for each size, by each law."""
    for stated in walk(report, "predictions.*size"):
        yield from ({**stated[law], **stated, "law": law} for law in _LAWS if law in stated)


MINING: Final = page("""\
# Mining: ours and peers

{corpus.tokens:,} tokens in segments of {corpus.segment_length}; all grams that occur at least {tau}
times: {rules:,} of 2 / 3 / 4 tokens. Every side returns them with their counts; the results are
compared in the run. Ratios are medians over pairs of the same round, with quartiles.

@ sides.*side
side             | {side}
cores            | {cores}
tokens           | {tokens:,}
time (quartiles) | {seconds:.2f s}
runs             | {seconds.runs}
Mtokens/s        | {tokens_per_s!M:.2f}
time against     | {ratios.@side?:.2f} x {ratios.@side.against}

Memory of a process that only counts: {memory.peak_bytes!i:,.0f} MiB at its peak,
{memory.predicted_bytes!i:,.0f} MiB predicted by another process.

Ray Data on {ray.tokens?:,} tokens, two cores each: {ray.share:.2f} of the speed of the bare kernel
({ray.share.runs} pairs; start of the cluster and first counts left out).
""")
MATCHING: Final = page(
    """\
# Matching: ours and peers

{held_out_tokens:,} tokens that the rules were not mined on, in segments of {segment_length}, one
thread each. Every matcher returns the same spans; they are compared in the run. The tokenizer's
time is for the text of the same tokens.

@ rule_sets.*name.sides.*side
rules: side       | {name}: {side}
rules             | {rules!+:,}
time (quartiles)  | {seconds:.3f s}
Mtokens/s         | {tokens_per_s!M:.2f}
time against ours | {ratio?:.2f}

@ sizes
bytes per rule  | {name}
in memory       | {bytes_per_rule.memory:.1f}
tables on disk  | {bytes_per_rule.disk:.1f}
whole directory | {bytes_per_rule.directory:.1f}

Loading {synthetic.rules:,} synthetic rules of 2 / 3 / 4 tokens and matching a first segment:
{synthetic.load_seconds:.3f s}, files in the page cache.
""",
    sizes=lambda report: walk({**report["rule_sets"], "synthetic": report["synthetic"]}, "*name"),
)
SCALING: Final = page(
    """\
# Mining: cost against tokens

![Time and memory against tokens](mining-scaling.svg)

First tokens of one corpus, segments of {segment_length}, tau {tau}. Rules are all frequent grams;
distinct are the candidates that were counted. Memory is the peak of a process that only counts.

@ measured.*size
tokens             | {size!n:,}
distinct           | {distinct!+:,}
rules              | {rules!+:,}
ns/token, 1 thread | {nanoseconds_1:.0f}
2 threads          | {nanoseconds_2:.0f}
2 against 1        | {threads.median:.2f}
MiB                | {peak_bytes!i:,.0f}

Errors of the predictions, each written down before its measurement was run. *decade*: the law
fitted on a sample of the next smaller power of ten of tokens; *dry-run*: on the sample that
`umim mine --dry-run` takes.

@ predictions
prediction for | {size!n:,} {law!-}
sample         | {sample_tokens:,}
memory         | {error.memory?not measured:+.1%}
time           | {error.seconds?not measured:+.1%}
distinct       | {error.distinct?not measured:+.1%}
rules          | {error.rules?not measured:+.1%}

A corpus of {repeat.base_tokens?:,} tokens repeated {repeat.times} times on segment borders
({repeat.tokens:,} tokens): rules at tau {repeat.tau} {repeat.equal:equal|DIFFER FROM} those of the
corpus at tau {tau}, counts {repeat.times} times as high; peak memory {repeat.peak_bytes!i:,.0f}
MiB, {repeat.predicted_bytes!i:,.0f} MiB predicted.
""",
    predictions=_predictions,
)
