"""Pages of the benchmarks of generation and evaluation, declared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tasks.report.page_template import Part, Report, each, filled_in, paragraphs, rows, walk

MERGE_LABELS: Final = {"none": "base", "prompt": "UMIM, prompt", "all": "UMIM, prompt and decode"}
_SHARES: Final = {
    "token_reduction": "TR",
    "gen_kv_reduction": "Gen-KV TR",
    "cumulative_kv_reduction": "cumulative KV TR",
}


def _quality(found: Report) -> str:
    """Return the tables of one subject of ``generation_quality.py``: texts, then the cache."""
    digits = {"ppl": 2, "tokens": 1}
    metrics = [name for name in found["rows"][0]["metrics"] if name not in _SHARES]
    texts = [f"{_title(name)} | {{metrics.{name}:.{digits.get(name, 3)}f}}" for name in metrics]
    shares = [f"{title} | {{metrics.{name}!p:.1f %}}" for name, title in _SHARES.items()]
    head = ["decoding | {decoding}", "texts of | {labels.@merge}"]
    tables = (
        rows("rows.*number", "\n".join(head + texts)),
        rows("rows.*number", "\n".join(head + shares), lambda row: row["merge"] != "none"),
    )
    return paragraphs(tables, {**found, "labels": MERGE_LABELS})


def _title(metric: str) -> str:
    """Return the heading of a metric: ``rep_2`` is Rep-2, ``ppl`` is PPL."""
    name, _, order = metric.partition("_")
    return f"{name.capitalize()}-{order}" if order else name.upper() if name == "ppl" else name


def _capacities(report: Report) -> Iterator[Report]:
    """Yield the rows of ``cache_capacity.py``, each with its gain over the base, which leads."""
    base: Report = {}
    for row in walk(report, "subjects.*subject.rows.*number"):
        if row["merge"] == "none":
            base = row
        label = {"label": MERGE_LABELS[row["merge"]]}
        gains = {f"gain{x}": row[f"sequences{x}"] / base[f"sequences{x}"] for x in ("", "_limit")}
        yield row | label | gains


def _skipped(report: Report) -> str:
    """Return which prompt lengths of ``cache_capacity.py`` a backbone has no positions for."""
    skipped = [found for found in walk(report, "subjects.*subject") if found["skipped"]]
    texts = [
        f"{found['subject']} has {found['positions']:,} positions: no prompts of "
        f"{', '.join(f'{length:,}' for length in found['skipped'])} tokens"
        for found in skipped
    ]
    return f"{'; '.join(texts)}." if texts else ""


ENGINE: Final[tuple[Part, ...]] = (
    "# Engine: ours and transformers, with rules and without",
    "On {device}, {dtype}, {new_tokens} new tokens. Ratios are medians over alternating pairs, "
    "with quartiles. *random-llama* has random weights in realistic proportions (512 wide, 8 "
    "layers, 8 heads of which 4 for keys, vocabulary 32,000) and rules mined on random phrases.",
    "## Without rules",
    rows(
        "backbones.*name.engines.*batch.*side",
        """
        backbone, rows x tokens: side | {name}, {batch} x {engine_prompt_tokens:,}: {side}
        time (quartiles)              | {seconds:.3f s}
        tok/s                         | {new_tokens_per_s:,.0f}
        time against ours             | {times_ours:.2f}
        ids                           | {equal:equal|DIFFER}
        """,
    ),
    "## With rules against without",
    "Both sides generate the text that follows each prompt. Prefill ends with the first token, "
    "matching and merging included; a request is prefill and decode. Bound: the largest speed-up "
    "that the token reduction can give. KV: keys and values at the end.",
    rows(
        "backbones.*name.rows.*number",
        """
        backbone, rows x tokens | {name}, {batch_size} x {prompt_tokens:,}
        rules                   | {rules}
        phase                   | {phase}
        TR                      | {token_reduction:.1%}
        base tok/s              | {base_tokens_per_s:,.0f}
        UMIM tok/s              | {umim_tokens_per_s:,.0f}
        speed-up (quartiles)    | {speedup:.2f} ({speedup_low:.2f}-{speedup_high:.2f})
        bound                   | {bound:.2f}
        KV MiB                  | {base_kv_bytes!i:,.1f} / {umim_kv_bytes!i:,.1f}
        """,
        where=lambda row: row["asked_reduction"] in (None, 0.5),
    ),
    "## Matching and merging",
    rows(
        "backbones.*name.merging.*number",
        """
        backbone, rows x tokens    | {name}, {batch_size} x {prompt_tokens:,}
        matching, packing, merging | {seconds!m:.2f ms}
        share of prefill           | {share:.2%}
        """,
    ),
    "## Where merging pays",
    each("backbones.*name", "### {name}", "{break_even}"),
    "## Gates",
    "Gates of logits are in units of 1e-5: none at batch size 1, one in batches.",
)
PERPLEXITY: Final[tuple[Part, ...]] = (
    "# Perplexity: one forward against the base model and the listing",
    "{rows} rows of {length} tokens on {device}, float32. *plain*: no rule lies inside another; "
    "*nested*: all frequent spans. The listing runs a forward over the units and one more for "
    "every token hidden in a span, for the first row. Ratios are medians over alternating pairs, "
    "with quartiles; *difference*: largest of a token's log-probability between both, in nats.",
    rows(
        "backbones.*backbone.*name",
        """
        backbone: rules    | {backbone}: {name}
        rules              | {rules:,}
        TR                 | {token_reduction:.1%}
        base               | {base model.seconds:.3f s}
        ours               | {seconds:.3f s}
        times base         | {times_base:.2f}
        listing of one row | {listing_seconds:.3f s}
        times ours         | {listing_times:.1f}
        difference         | {difference:.1e}
        """,
        where=lambda row: row["name"] != "base model",
    ),
)
QUALITY: Final[tuple[Part, ...]] = (
    "# Generated texts: base against UMIM",
    "Prompts are the first {prompt_tokens} tokens of held-out documents; up to {new_tokens} new "
    "tokens, an end-of-sequence token ends a text. Mean ± standard deviation over {seeds} seeds; "
    "greedy decoding draws nothing and is one run. *Rep-n*: 1 - different / all n-grams of token "
    "ids, mean over texts (lower repeats less); *Dist-n*: the same ratio over the whole set "
    "(higher is more diverse; it falls as a set grows). *PPL*: of the generated tokens under the "
    "base model, given the prompt. *Gen-KV TR*: 1 - U_T / T of the generated tokens; "
    "*cumulative*: 1 - sum U_t / sum t.",
    each("subjects.*subject", "## {subject}", "{prompts} prompts.", _quality),
)
_ENTRIES: Final = (
    "{prompts} held-out prompts per length, {new_tokens} tokens generated greedily from each, "
    "float32. *Entries* are the most units that a row's cache held at once; *limit* is how many "
    "the engine allows a row: the units of the longest prompt + {last}, for it cannot know "
    "beforehand what decoding will merge."
)
CAPACITY: Final[tuple[Part, ...]] = (
    "# Cache memory and batch capacity: base against UMIM",
    "![Cache memory and batch capacity](cache_capacity.svg)",
    lambda report: filled_in(_ENTRIES, {**report, "last": report["new_tokens"] - 1}),
    "*Rows at the mean*: how many rows of mean length fit into {budget_bytes!i:,.0f} MiB. This "
    "needs a paged cache, which gives each row no more than it holds; ours is not one. *Rows at "
    "the final length*: how many rows of the longest length fit, as if it had been known from the "
    "start. *Rows at the engine's own limit*: how many rows fit when each has room up to the "
    "limit, the most that the engine's buffers (they double) may grow to. For the last two, so "
    "many rows were really allocated in a ``RowCache`` and its buffers counted (*MiB*), and one "
    "row more would not have fitted. Merging in the prompt lowers the limit; merging while "
    "decoding does not.",
    rows(
        _capacities,
        """
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
        """,
    ),
    _skipped,
)
