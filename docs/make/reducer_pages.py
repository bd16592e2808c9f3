"""Page of the benchmark of token reducers: what compressing costs and what it saves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tasks.report.page_template import Report, page, walk


def _rows(report: Report) -> Iterator[Report]:
    """Yield every case's methods, the one of the least total time first."""
    for case in report["cases"].values():
        rows = walk(case, "methods.*name")
        for row in sorted(rows, key=lambda row: float(row["total"]["median"])):
            pays = "yes" if row["total"]["median"] < 1 else "no"
            yield row | {"tokens": case["tokens"], "pays": pays}


def _not_run(report: Report) -> str:
    """Return the methods that were not run, and why."""
    return "\n".join(f"- `{name}`, not run: {why}" for name, why in report["not_run"].items())


REDUCERS: Final = page(
    """\
# Cost of token reducers against the prefill that they save: {subject.backbone}

One text of each length on {device}, {dtype}, all methods in turn in one run. *compressing*: the
choice of the tokens that stay, of *umim* the matching and merging by its {subject.rules:,} rules,
at the token reduction that these give. *share*, *left* and *total* are times the base model's
prefill of all tokens, medians over rounds with quartiles: compressing, the prefill of what stays,
and both. A method *pays* where the total is below 1. *FLOPs*: estimated, of compressing and in
total, times those of the whole prefill. Reducers that score with a model take the measured backbone
itself for it; a smaller one costs less. The probe of `ehpc`, once per model, is not counted.

Text: {subject.text}.

@ same

@ rows
tokens            | {tokens:,}
< method          | {name}
TR                | {token_reduction:.1%}
compressing       | {seconds:.3f s}
share             | {share:.2f}
left              | {left:.2f}
total             | {total:.2f}
< pays            | {pays}
FLOPs             | {flops_share:.2f}
FLOPs in total    | {flops_total:.2f}

@ prefills

@ not_run
""",
    rows=_rows,
    same=lambda report: (
        f"The same tokens in all repetitions: {'yes' if report['equal'] else 'NO'}."
    ),
    not_run=_not_run,
    prefills=page(
        """\
Prefill of the whole text:

@ cases.*name
case    | {name}
seconds | {base.seconds:.3f s}
"""
    ),
)
