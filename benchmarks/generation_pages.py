"""The pages of ``generation_quality.py`` and ``cache_capacity.py``."""

from __future__ import annotations

from typing import Final

from benchmarks.common import Report
from benchmarks.tables import machine, table

CAPACITY_FIGURE: Final = "cache_capacity.svg"
MERGE_LABELS: Final = {"none": "base", "prompt": "UMIM, prompt", "all": "UMIM, prompt and decode"}
_SHARES: Final = {
    "token_reduction": "TR",
    "gen_kv_reduction": "Gen-KV TR",
    "cumulative_kv_reduction": "cumulative KV TR",
}
_DIGITS: Final = {"ppl": 2, "tokens": 1}
_MIB: Final = 2.0**20


def quality_page(report: Report) -> str:
    """Return the page of ``benchmarks/generation_quality.py``."""
    parts = [
        "# Generated texts: base against UMIM",
        f"Prompts are the first {report['prompt_tokens']} tokens of held-out documents; up to "
        f"{report['new_tokens']} new tokens, an end-of-sequence token ends a text. Mean ± standard "
        f"deviation over {report['seeds']} seeds; greedy decoding draws nothing and is one run. "
        "*Rep-n*: 1 - different / all n-grams of token ids, mean over texts (lower repeats less); "
        "*Dist-n*: the same ratio over the whole set (higher is more diverse; it falls as a set "
        "grows). *PPL*: of the generated tokens under the base model, given the prompt. *Gen-KV "
        "TR*: 1 - U_T / T of the generated tokens; *cumulative*: 1 - sum U_t / sum t.",
    ]
    for name, found in report["subjects"].items():
        metrics = list(found["rows"][0]["metrics"])
        texts = [metric for metric in metrics if metric not in _SHARES]
        parts.append(f"## {name}\n\n{found['prompts']} prompts.")
        parts.append(
            table(
                ["decoding", "texts of", *map(_title, texts)],
                [_cells(row, texts) for row in found["rows"]],
            )
        )
        merged = [row for row in found["rows"] if row["merge"] != "none"]
        parts.append(
            table(
                ["decoding", "texts of", *_SHARES.values()],
                [_cells(row, list(_SHARES)) for row in merged],
            )
        )
    return "\n\n".join([*parts, machine(report)]) + "\n"


def _title(metric: str) -> str:
    """Return the heading of a metric: ``rep_2`` is Rep-2, ``ppl`` is PPL."""
    name, _, order = metric.partition("_")
    return f"{name.capitalize()}-{order}" if order else name.upper() if name == "ppl" else name


def _cells(row: Report, metrics: list[str]) -> list[str]:
    values = [_spread(metric, row["metrics"][metric]) for metric in metrics]
    return [row["decoding"], MERGE_LABELS[row["merge"]], *values]


def _spread(metric: str, found: dict[str, float | None]) -> str:
    """Return mean and deviation; cache figures in per cent."""
    mean, deviation = found["mean"], found["std"]
    if mean is None:
        return "-"
    scale, unit = (100.0, " %") if metric in _SHARES else (1.0, "")
    digits = 1 if metric in _SHARES else _DIGITS.get(metric, 3)
    spread = "" if deviation is None else f" ± {scale * deviation:.{digits}f}"
    return f"{scale * mean:.{digits}f}{spread}{unit}"


def capacity_page(report: Report) -> str:
    """Return the page of ``benchmarks/cache_capacity.py``."""
    rows = [
        [
            f"{name}: {row['prompt_tokens']:,}",
            MERGE_LABELS[row["merge"]],
            f"{row['units_mean']:,.1f}",
            f"{row['units_longest']:,}",
            f"{row['units_limit']:,}",
            f"{row['bytes_mean'] / _MIB:.3f}",
            f"{row['sequences_mean']:,}",
            *_fitting(row, base, ""),
            *_fitting(row, base, "_limit"),
        ]
        for name, found in report["subjects"].items()
        for row in found["rows"]
        for base in found["rows"]
        if base["merge"] == "none" and base["prompt_tokens"] == row["prompt_tokens"]
    ]
    head = ["prompt tokens", "", "entries, mean", "longest", "limit", "MiB a row"]
    head += ["rows at the mean", "rows at the final length", "MiB", "against base"]
    head += ["rows at the engine's own limit", "MiB", "against base"]
    skipped = "; ".join(
        f"{name} has {found['positions']:,} positions: no prompts of "
        f"{', '.join(f'{length:,}' for length in found['skipped'])} tokens"
        for name, found in report["subjects"].items()
        if found["skipped"]
    )
    budget = f"{report['budget_bytes'] / _MIB:,.0f} MiB"
    parts = [
        "# Cache memory and batch capacity: base against UMIM",
        f"![Cache memory and batch capacity]({CAPACITY_FIGURE})",
        f"{report['prompts']} held-out prompts per length, {report['new_tokens']} tokens generated "
        f"greedily from each, float32. *Entries* are the most units that a row's cache held at "
        "once; *limit* is how many the engine allows a row: the units of the longest prompt + "
        f"{report['new_tokens'] - 1}, for it cannot know beforehand what decoding will merge.",
        f"*Rows at the mean*: how many rows of mean length fit into {budget}. This needs a paged "
        "cache, which gives each row no more than it holds; ours is not one. *Rows at the final "
        "length*: how many rows of the longest length fit, as if it had been known from the start. "
        "*Rows at the engine's own limit*: how many rows fit when each has room up to the limit, "
        "the most that the engine's buffers (they double) may grow to. For the last two, so many "
        "rows were really allocated in a ``RowCache`` and its buffers counted (*MiB*), and one row "
        "more would not have fitted. Merging in the prompt lowers the limit; merging while "
        "decoding does not.",
        table(head, rows),
    ]
    if skipped:
        parts.append(f"{skipped}.")
    return "\n\n".join([*parts, machine(report)]) + "\n"


def _fitting(row: Report, base: Report, which: str) -> list[str]:
    """Return rows that fit, their MiB and the ratio to the base's."""
    fit = row[f"sequences{which}"]
    taken = row[f"allocated_bytes{which}"]
    return [f"{fit:,}", f"{taken / _MIB:.2f}", f"{fit / base[f'sequences{which}']:.2f}"]
