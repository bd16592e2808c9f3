"""Pages of the benchmarks of generation: engine, and cache capacity."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tasks.report.page_template import Report, each, page, walk

MERGE_LABELS: Final = {"none": "base", "prompt": "UMIM, prompt", "all": "UMIM, prompt and decode"}


def _capacities(report: Report) -> Iterator[Report]:
    """Yield the rows of ``cache_capacity.py``, each with its gain over the base, which leads."""
    base: Report = {}
    for row in walk(report, "subjects.*subject.rows.*number"):
        if row["merge"] == "none":
            base = row
        label = {"label": MERGE_LABELS[row["merge"]]}
        gains = {f"gain{x}": row[f"sequences{x}"] / base[f"sequences{x}"] for x in ("", "_limit")}
        yield row | label | gains


def _phases(case: Report) -> Report:
    """Return a case of ``engine_smollm2.py``, each phase with the spread of its ratios."""
    names = {"median": "speedup", "low": "speedup_low", "high": "speedup_high"}
    found = {
        phase: row | {"ratio": {name: row[field] for name, field in names.items()}}
        for phase, row in case["phases"].items()
    }
    prefill = found["prefill"]
    return {"name": case["name"], "of_bound": prefill["speedup"] / prefill["bound"]} | found


def _skipped(report: Report) -> str:
    """Return which prompt lengths of ``cache_capacity.py`` a backbone has no positions for."""
    texts = "; ".join(
        f"{found['subject']} has {found['positions']:,} positions: no prompts of "
        f"{', '.join(f'{length:,}' for length in found['skipped'])} tokens"
        for found in walk(report, "subjects.*subject")
        if found["skipped"]
    )
    return f"{texts}." if texts else ""


ENGINE: Final = page(
    """\
# Engine: ours and transformers, with rules and without

On {device}, {dtype}, {new_tokens} new tokens. Ratios are medians over alternating pairs, with
quartiles. *random-llama* has random weights in realistic proportions (512 wide, 8 layers, 8 heads
of which 4 for keys, vocabulary 32,000) and rules mined on random phrases.

## Without rules

@ backbones.*name.engines.*batch.*side
backbone, rows x tokens: side | {name}, {batch} x {engine_prompt_tokens:,}: {side}
time (quartiles)              | {seconds:.3f s}
tok/s                         | {new_tokens_per_s:,.0f}
time against ours             | {times_ours:.2f}
ids                           | {equal:equal|DIFFER}

## With rules against without

Both sides generate the text that follows each prompt. Prefill ends with the first token, matching
and merging included; a request is prefill and decode. Bound: the largest speed-up that the token
reduction can give. KV: keys and values at the end.

@ shown
backbone, rows x tokens | {name}, {batch_size} x {prompt_tokens:,}
rules                   | {rules}
phase                   | {phase}
TR                      | {token_reduction:.1%}
base tok/s              | {base_tokens_per_s:,.0f}
UMIM tok/s              | {umim_tokens_per_s:,.0f}
speed-up (quartiles)    | {speedup:.2f} ({speedup_low:.2f}-{speedup_high:.2f})
bound                   | {bound:.2f}
KV MiB                  | {base_kv_bytes!i:,.1f} / {umim_kv_bytes!i:,.1f}

## Matching and merging

@ backbones.*name.merging.*number
backbone, rows x tokens    | {name}, {batch_size} x {prompt_tokens:,}
matching, packing, merging | {seconds!m:.2f ms}
share of prefill           | {share:.2%}

## Where merging pays

@ break_even

## Gates

Gates of logits are in units of 1e-5: none at batch size 1, one in batches.
""",
    # Of each backbone, its own rules and pairs at 50 %.
    shown=lambda report: (
        row
        for row in walk(report, "backbones.*name.rows.*number")
        if row["asked_reduction"] in (None, 0.5)
    ),
    break_even=each("backbones.*name", page("### {name}\n\n{break_even}")),
)
ENGINE_ON_SMOLLM2: Final = page(
    """\
# Engine on SmolLM2-135M: rules against none, and transformers

{settings.checkpoint} on {subject.backbone}, {subject.rules:,} rules, {settings.new_tokens} new
tokens on two threads. Text: {subject.text}. Ratios are medians over alternating pairs, with
quartiles.

## Prefill and decode

Both sides generate the text that follows each prompt. *First token*: median time from the ids to
it, matching and merging included. *Bound*: the largest speed-up that fewer products can give;
shorter rows may also fit the caches better, which counts on top. *KV*: keys and values after the
last token.

@ cases
data type, rows x tokens  | {name}
TR                        | {prefill.token_reduction:.1%}
first token, base         | {prefill.base_seconds:.3f s}
UMIM                      | {prefill.umim_seconds:.3f s}
prefill, times faster     | {prefill.ratio:.2f}
bound                     | {prefill.bound:.2f}
of bound                  | {of_bound:.2f}
decode, tok/s, base       | {decode.base_tokens_per_s:,.1f}
UMIM                      | {decode.umim_tokens_per_s:,.1f}
times faster              | {decode.ratio:.2f}
KV MiB, base              | {request.base_kv_bytes!i:,.1f}
UMIM                      | {request.umim_kv_bytes!i:,.1f}
pairs                     | {prefill.pairs}

## Without rules against transformers

``transformers.generate`` with its dynamic cache, greedy; time of a whole request.

@ compared
data type, rows x tokens | {name}
ours (quartiles)         | {seconds_ours:.3f s}
transformers             | {seconds:.3f s}
times ours               | {times_ours:.2f}
ids                      | {equal:equal|DIFFER}

## Matching and merging

@ merging
data type, rows x tokens   | {name}
matching, packing, merging | {seconds!m:.2f ms}
share of prefill           | {share:.2%}

## Where the time of a prefill goes

One row, one run of each side under torch's profiler, in ms. *Could be*: how many times less time
the units let a part take; attention goes with their square. What a part lacks of that is lost
against the bound, which knows products only.

@ parts
data type, rows x tokens: part | {name}: {part}
base                           | {base!m:.1f}
UMIM                           | {umim!m:.1f}
times faster                   | {faster:.2f}
could be                       | {ideal:.2f}

## Gates

Gates of logits are in units of 1e-5: none at batch size 1, one in batches.
""",
    cases=lambda report: (_phases(case) for case in walk(report["cases"], "*name")),
    compared=lambda report: (
        {"name": name} | case["against_transformers"]
        for name, case in report["cases"].items()
        if "against_transformers" in case
    ),
    merging=lambda report: walk(report["cases"], "*name.merging"),
    parts=lambda report: (
        part | {"faster": part["base"] / part["umim"] if part["umim"] else 1.0}
        for case in walk(report["cases"], "*name")
        if "parts" in case
        for part in walk(case, "parts.*part")
    ),
)
CAPACITY: Final = page(
    """\
# Cache memory and batch capacity: base against UMIM

![Cache memory and batch capacity](cache_capacity.svg)

{prompts} held-out prompts per length, {new_tokens} tokens generated greedily from each, float32.
*Entries* are the most units that a row's cache held at once; *limit* is how many the engine allows
a row: the units of the longest prompt + {new_tokens!1}, for it cannot know beforehand what decoding
will merge.

*Rows at the mean*: how many rows of mean length fit into {budget_bytes!i:,.0f} MiB. This needs a
paged cache, which gives each row no more than it holds; ours is not one. *Rows at the final
length*: how many rows of the longest length fit, as if it had been known from the start. *Rows at
the engine's own limit*: how many rows fit when each has room up to the limit, the most that the
engine's buffers (they double) may grow to. For the last two, so many rows were really allocated in
a ``RowCache`` and its buffers counted (*MiB*), and one row more would not have fitted. Merging in
the prompt lowers the limit; merging while decoding does not.

@ capacities
prompt tokens                  | {subject}: {prompt_tokens:,}
                               | {label}
entries, mean                  | {units_mean:,.1f}
longest                        | {units_longest:,}
limit                          | {units_limit:,}
MiB a row                      | {bytes_mean!i:.3f}
rows at the mean               | {sequences_mean:,}
rows at the final length       | {sequences:,}
MiB                            | {allocated_bytes!i:.2f}
against base                   | {gain:.2f}
rows at the engine's own limit | {sequences_limit:,}
MiB                            | {allocated_bytes_limit!i:.2f}
against base                   | {gain_limit:.2f}

@ skipped
""",
    capacities=_capacities,
    skipped=_skipped,
)
