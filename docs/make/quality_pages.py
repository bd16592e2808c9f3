"""Page and figure of ``benchmarks.generation_quality``: texts of the base model and of UMIM."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from docs.make.generation_pages import MERGE_LABELS
from tasks.report.page_template import Report, each, page, walk
from tasks.report.report_drawing import MARKERS, PALETTE
from umim_core.evaluation.text_metrics.mauve import FEWEST_TEXTS

QUALITY_TITLE: Final = "Perplexity of generated text against token reduction of the cache"
_DRAWN: Final = "top-p 0.9, temperature 0.8"
_LINES: Final = {
    "prompt": "merged prompt alone",
    "all": "merged while decoding, all rules",
    "decode_min_probability": "where tokens were likely",
    "decode_max_damage": "by cheap rules",
    "span_eviction": "span eviction, nothing merged",
}


def _line(row: Report) -> str:
    """Return the line that a row belongs to: ``none`` for the base model, ``method`` not drawn."""
    if row.get("decode_min_probability"):  # 0 is no bound; a price or an age of 0 is one
        return "decode_min_probability"
    bounds = ("decode_max_damage", "span_eviction", "method")
    return next((name for name in bounds if row.get(name) is not None), str(row["merge"]))


def _texts(found: Report) -> Iterator[Report]:
    """Yield the rows of one subject, the merging in words, with the ratio to the base model."""
    base = {row["decoding"]: row for row in found["rows"] if _line(row) == "none"}
    for row in found["rows"]:
        least, most = row.get("decode_min_probability", 0.0), row.get("decode_max_damage")
        where = f" where p >= {least:g}" if least else ""
        where += "" if most is None else f" by rules of at most {most:.3g} nats per saved token"
        saved = row.get("text_token_reduction")
        where += "" if saved is None else f" (TR of text {saved:.1%})"
        age = row.get("span_eviction")
        where += "" if age is None else f", spans evicted at {age:,} tokens"
        method = row.get("method")
        label = MERGE_LABELS[row["merge"]] + where if method is None else str(method)
        of = base.get(row["decoding"])
        ratio = None if of is None else ratio_of(row["metrics"]["ppl"], of["metrics"]["ppl"])
        yield row | {"label": label, "ppl_ratio": ratio}


def ratio_of(ppl: Report, base: Report) -> Report | None:
    """Return the ratio of two mean perplexities, its deviation by that of both over the seeds."""
    if ppl["mean"] is None or base["mean"] is None:
        return None
    ratio = ppl["mean"] / base["mean"]
    spread = None
    if ppl["std"] is not None and base["std"] is not None:
        spread = ratio * math.hypot(ppl["std"] / ppl["mean"], base["std"] / base["mean"])
    return {"mean": ratio, "std": spread}


_SIMILARITY: Final = page(
    """\
Similarity to the held-out text that follows each prompt, times 100. BERTScore (no weights by
rarity, no rescaling) and MAUVE compare {features}; the published scores read RoBERTa-large and
GPT-2-large, so these figures cannot be compared with them. MAUVE is of {prompts} texts in
{mauve_buckets} clusters, where its authors advise thousands: it is for the rows of this table
alone, and not given for fewer than {fewest} texts.

@ compared.*number
decoding                     | {decoding}
texts of                     | {label}
ROUGE-1                      | {metrics.rouge1!p:.2f}
ROUGE-2                      | {metrics.rouge2!p:.2f}
ROUGE-L                      | {metrics.rougeL!p:.2f}
ROUGE-Lsum                   | {metrics.rougeLsum!p:.2f}
chrF                         | {metrics.chrf!p:.2f}
BERTScore, stand-in features | {metrics.bertscore_stand_in_features!p:.2f}
MAUVE, stand-in features     | {metrics.mauve_stand_in_features!p:.2f}

Differences to the base model's texts of the same decoding, times 100, with paired standard errors
over prompts (of sampled texts, the mean over seeds):

@ changed.*number
decoding                     | {decoding}
texts of                     | {label}
ROUGE-1                      | {differences.rouge1!p:+.2f}
ROUGE-2                      | {differences.rouge2!p:+.2f}
ROUGE-L                      | {differences.rougeL!p:+.2f}
ROUGE-Lsum                   | {differences.rougeLsum!p:+.2f}
chrF                         | {differences.chrf!p:+.2f}
BERTScore, stand-in features | {differences.bertscore_stand_in_features!p:+.2f}
"""
)


def _similarity(found: Report) -> str:
    """Return what a subject's rows say of references; empty for results without any."""
    rows = [row for row in _texts(found) if "by_prompt" in row]
    changed = [row for row in rows if row["differences"]]
    shown = {"compared": rows, "changed": changed, "fewest": FEWEST_TEXTS}
    return _SIMILARITY(found | shown) if rows else ""


QUALITY: Final = page(
    """\
# Generated texts: base against UMIM

![Perplexity of generated text against token reduction of the cache]({name}.svg)

Prompts are the first {prompt_tokens} tokens of held-out documents; up to {new_tokens} new tokens,
an end-of-sequence token ends a text. Mean ± standard deviation over {seeds} seeds; greedy decoding
draws nothing and is one run. *Rep-n*: 1 - different / all n-grams of token ids, mean over texts
(lower repeats less); *Dist-n*: the same ratio over the whole set (higher is more diverse; it falls
as a set grows). *PPL*: of the generated tokens under the base model, given the prompt; *PPL ratio*:
over that of the base model's own texts, the deviations of both added by squares (the figure shows
it for top-p). *Gen-KV TR*:
1 - U_T / T of the generated tokens; *cumulative*: 1 - sum U_t / sum t. *TR of text*: of held-out
documents, by the rules under the bound. Eviction also drops columns of the prompt while tokens are
generated; they count there, too. Baselines, by their names, merge nothing: as many tokens of each
prompt go as the rules save of it. Policies of the cache (h2o, streaming-llm) read the prompt whole;
their TR is that of the cache behind it.

@ subjects
""",
    subjects=each(
        "subjects.*subject",
        page(
            """\
## {subject}

{prompts} prompts.

@ texts
decoding | {decoding}
texts of | {label}
Rep-2    | {metrics.rep_2:.3f}
Rep-3    | {metrics.rep_3:.3f}
Rep-4    | {metrics.rep_4:.3f}
Dist-1   | {metrics.dist_1:.3f}
Dist-2   | {metrics.dist_2:.3f}
Dist-3   | {metrics.dist_3:.3f}
Dist-4   | {metrics.dist_4:.3f}
PPL      | {metrics.ppl:.2f}
tokens   | {metrics.tokens:.1f}

@ merged
decoding         | {decoding}
texts of         | {label}
TR               | {metrics.token_reduction!p:.1f %}
Gen-KV TR        | {metrics.gen_kv_reduction!p:.1f %}
PPL              | {metrics.ppl:.2f}
PPL ratio        | {ppl_ratio?-:.2f}
cumulative KV TR | {metrics.cumulative_kv_reduction!p:.1f %}

@ similarity
""",
            texts=_texts,
            merged=lambda found: (row for row in _texts(found) if _line(row) != "none"),
            similarity=_similarity,
        ),
    ),
)


def quality_figure(report: Report) -> Figure:
    """Draw the perplexity ratio against Gen-KV TR, a panel per model, a line per kind of bound."""
    subjects = list(walk(report, "subjects.*subject"))
    figure = Figure(figsize=(1.2 + 3.8 * max(2, len(subjects)), 5.0))
    panels = figure.subplots(1, len(subjects), squeeze=False)[0]
    drawn: dict[str, Artist] = {}
    for axes, found in zip(panels, subjects, strict=True):
        rows = [row for row in _texts(found) if row["decoding"] == _DRAWN and row["ppl_ratio"]]
        for place, name in enumerate(_LINES):
            if points := [row for row in rows if _line(row) == name]:
                drawn[name] = _draw(axes, points, place)
        axes.axhline(1.0, color=PALETTE[-1], linewidth=0.8, linestyle=":")
        axes.set(xlabel="Gen-KV TR (%)", title=found["subject"])
    panels[0].set_ylabel("Perplexity, times the base model's")
    names = [name for name in _LINES if name in drawn]
    handles, labels = [drawn[name] for name in names], [_LINES[name] for name in names]
    figure.legend(handles, labels, loc="outside upper left", ncols=3)
    return figure


def _draw(axes: Axes, points: list[Report], place: int) -> Artist:
    """Draw a line by rising reduction and return what stands for it in a legend."""
    points.sort(key=lambda row: float(row["metrics"]["gen_kv_reduction"]["mean"]))
    return axes.errorbar(
        [100 * row["metrics"]["gen_kv_reduction"]["mean"] for row in points],
        [row["ppl_ratio"]["mean"] for row in points],
        yerr=[row["ppl_ratio"]["std"] or 0.0 for row in points],
        color=PALETTE[place],
        marker=MARKERS[place],
        markersize=5,
        linewidth=1.2,
        elinewidth=0.8,
        capsize=2,
    ).lines[0]
