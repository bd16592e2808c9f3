"""Rows of benchmark pages that a result file does not hold as such: ratios, labels, selections.

``ROWS`` has a function for each benchmark whose template needs more than the file's own fields.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Final

from tasks.report.render import Report, walk
from umim_core.config.form import ModuleForm
from umim_core.evaluation.text_metrics.mauve import FEWEST_TEXTS

MERGE_LABELS: Final = {"none": "base", "prompt": "UMIM, prompt", "all": "UMIM, prompt and decode"}
PART_LABELS: Final = {
    "": "all parts together",
    "_part_general": "general English",
    "_part_wikitext2": "WikiText-2",
    "_part_docstrings": "docstrings",
}
POLICIES: Final = {
    "damage": "least damage",
    "count": "highest count",
    "saved": "most saved tokens",
    "all": "all rules",
    "eviction": "span eviction",
}
_CHOOSING: Final = ("damage", "count", "saved")  # all rules are where each of these ends
_FEATURED: Final = ("count", "damage", "saved", "all", "eviction")
_NOT_MERGED: Final = {
    "hf": "base (lm-eval's `hf`)",
    "none": "base (`merge=none`)",
    "no rules": "ours, empty rule set",
}
# Test sets of SmolLM2-135M-Instruct, as its authors and leaderboards give them.
_PUBLISHED: Final = {
    "arc_easy": "53.8-54.1 (acc)",
    "piqa": "66.6-66.9 (acc)",
    "openbookqa": "33.2 (acc_norm)",
    "hellaswag": "43.0 (acc_norm)",
}
_CLEAR: Final = 2.0  # standard errors of a difference that counts
_MOST_CHARACTERS: Final = 80  # of an answer


def _distill_step(report: Report) -> Report:
    losses = [row | {"what": "loss"} for row in walk(report, "losses.*name.sides.*side")]
    steps = [row | {"what": "step"} for row in walk(report, "step.precisions.*name.*side")]
    return {"steps": losses + steps}


def _ladder(report: Report) -> Report:
    """Add the rows that are compared with another one, differences by seed in words."""
    rungs = []
    for row in walk(report, "ladder.*row"):
        if "difference" in row:
            values = row["difference"]["kl"]["seeds"]
            rungs.append(row | {"seeds_kl": " / ".join(f"{value:+.3f}" for value in values)})
    return {"rungs": rungs}


def _cache_capacity(report: Report) -> Report:
    """Add the rows, each with its gain over the base, which leads."""
    rows: list[Report] = []
    base: Report = {}
    for row in walk(report, "subjects.*subject.rows.*number"):
        if row["merge"] == "none":
            base = row
        gains = {f"gain{x}": row[f"sequences{x}"] / base[f"sequences{x}"] for x in ("", "_limit")}
        rows.append(row | {"label": MERGE_LABELS[row["merge"]]} | gains)
    return {"capacities": rows}


def _engine_smollm2(report: Report) -> Report:
    """Add ratios with their spread, and the parts of a prefill with what is possible."""
    names = {"median": "speedup", "low": "speedup_low", "high": "speedup_high"}
    cases, parts = [], []
    for case in walk(report["cases"], "*name"):
        phases = {
            phase: row | {"ratio": {name: row[field] for name, field in names.items()}}
            for phase, row in case["phases"].items()
        }
        prefill = case["phases"]["prefill"]
        cases.append({"name": case["name"], "of_bound": prefill["speedup"] / prefill["bound"]})
        cases[-1] |= phases
        for part in walk(case, "parts.*part") if "parts" in case else ():
            faster = part["base"] / part["umim"] if part["umim"] else 1.0
            parts.append(part | {"faster": faster})
    compared = [
        {"name": name, **case["against_transformers"]}
        for name, case in report["cases"].items()
        if "against_transformers" in case
    ]
    merging = list(walk(report["cases"], "*name.merging"))
    return {"cases": cases, "compared": compared, "merging": merging, "parts": parts}


def _stock_tasks(report: Report) -> Report:
    """Add scores and means with their settings in words, and the origin of the questions."""

    def labelled(row: Report) -> Report:
        names = ("acc_difference", "acc_norm_difference", "choices_changed")
        absent = dict.fromkeys(names) if row["side"] == report["base"] else {}
        return row | {"label": _NOT_MERGED.get(row["side"], row["side"])} | absent

    shown = (report["base"], *report["settings"])
    scores = walk(report, "tasks.*task.sides.*side")
    equality = []
    for row in walk(report, "tasks.*task.against_hf.*side"):
        same = row.get("same_call", True)  # older results do not note it
        times = row["seconds"] / row["hf_seconds"] if same else None
        equality.append(row | {"label": _NOT_MERGED[row["side"]], "times": times})
    sets = [
        {"task": task, **next(iter(of["sides"].values())), "published": _PUBLISHED.get(task, "–")}
        for task, of in report["tasks"].items()
    ]
    return {
        "scores": [labelled(row) for row in scores if row["side"] in shown],
        "means": [labelled(row) for row in walk(report, "mean.*side")],
        "equality": equality,
        "sets": sets,
    }


def quality_line(row: Report) -> str:
    """Return the line of the figure that a row of generated texts belongs to.

    Returns:
        ``none`` for the base model, the name of a bound, ``method`` for a baseline, or what is
        merged.
    """
    if row.get("decode_min_probability"):  # 0 is no bound; a price or an age of 0 is one
        return "decode_min_probability"
    bounds = ("decode_max_damage", "span_eviction", "method")
    return next((name for name in bounds if row.get(name) is not None), str(row["merge"]))


def _generation_quality(report: Report) -> Report:
    shown = []
    for subject in walk(report, "subjects.*subject"):
        texts = list(quality_texts(subject))
        compared = [row for row in texts if "by_prompt" in row]
        changed = [row for row in compared if row["differences"]]
        merged = [row for row in texts if quality_line(row) != "none"]
        shown.append(
            subject | {"texts": texts, "merged": merged, "compared": compared, "changed": changed}
        )
    return {"shown": shown, "fewest": FEWEST_TEXTS}


def quality_texts(subject: Report) -> Iterator[Report]:
    """Yield the rows of a subject, the merging in words, with the ratio to the base model."""
    base = {row["decoding"]: row for row in subject["rows"] if quality_line(row) == "none"}
    for row in subject["rows"]:
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


def reduction_points(report: Report) -> list[Report]:
    """Return the points of ``benchmarks.token_reduction``, the policy in words."""
    points = []
    for point in walk(report, "subjects.*subject.points.*number"):
        aligned = {x: point.get("alignment", {}).get(x) for x in ("top1_states", "kl_states")}
        points.append(point | aligned | {"label": _policy(point)})
    return points


def half_points(report: Report) -> list[Report]:
    """Return the points of second halves that were reached, the policy in words."""
    return [
        point | {"label": _policy(point), "tail": None if "age" in point else point["raw_tail"]}
        for name, subject in report["subjects"].items()
        for point in ({"subject": name} | point for point in subject.get("second_halves", []))
        if "unreached" not in point
    ]


def _policy(point: Report) -> str:
    return POLICIES[point["policy"]] + (f", age {point['age']}" if "age" in point else "")


def line_of(points: Sequence[Report], policy: str | None) -> list[Report]:
    """Return the points of a checkpoint's line of a policy, by rising token reduction.

    All rules end the line of each policy that chooses; without one they are a line of their own.
    """
    measured = {point["policy"] for point in points}
    chosen = measured.intersection(_CHOOSING)
    if policy not in measured or (policy == "all" and chosen):
        return []
    parts = {policy, "all"} if policy in chosen else {policy}
    own = [point for point in points if point["policy"] in parts]
    return sorted(own, key=lambda point: float(point["token_reduction"]))


def featured(points: Iterable[Report]) -> str | None:
    """Return the policy that stands for a checkpoint where one is shown.

    It is fixed in advance: the best of several on the measured rows would be chosen by them, and
    what the policies really save differs.
    """
    measured = {point["policy"] for point in points}
    return next((policy for policy in _FEATURED if policy in measured), None)


def _token_reduction(report: Report) -> Report:
    points = reduction_points(report)
    bases = (x["ppl_base_of_halves"] for x in report["subjects"].values() if "second_halves" in x)
    return {
        "shown": [point for point in points if "unreached" not in point],
        "unreached": [point for point in points if "unreached" in point],
        "halves": half_points(report),
        "base": ", ".join(dict.fromkeys(f"{value:.2f}" for value in bases)),
    }


def method_label(point: Report, report: Report) -> str:
    """Return a method of second halves in words; UMIM with its checkpoint where several are."""
    if point["method"] != "umim":
        return str(point["method"])
    several = f" {point['checkpoint']}" if len(report["subjects"]) > 1 else ""
    return f"UMIM{several}" + (f", {point['tail']} raw" if point["tail"] else "")


def method_points(report: Report) -> list[Report]:
    """Return the points of second halves that were measured, target by target, best first."""
    saves = {"prompt": "prefill and KV", "cache": "KV"}
    points = [point for point in report["points"] if "ppl" in point]
    return [
        point | {"label": method_label(point, report), "saves": saves[point["side"]]}
        for point in sorted(points, key=lambda one: (one["target"], one["ppl"]))
    ]


def _second_half(report: Report) -> Report:
    """Add the methods that are clearly better than UMIM, and those without a figure."""
    shown, better = method_points(report), []
    for target, points in groupby(shown, key=lambda point: float(point["target"])):
        compared = [point for point in points if point.get("umim_ratio") is not None]
        clear = [
            point
            for point in compared
            if (ratio := point["umim_ratio"])["std"] is not None
            and ratio["mean"] + _CLEAR * ratio["std"] < 1.0
        ]
        better.append({"target": target, "points": clear, "compared": bool(compared)})
    words = {"unreached": "the rules reach", "not_run": "not run:"}
    absent: dict[str, list[float]] = {}
    for point in report["points"]:
        for kind in words.keys() & point.keys() if "ppl" not in point else ():
            reason = f"{method_label(point, report)} ({words[kind]} {point[kind]})"
            absent.setdefault(reason, []).append(point["target"])
    return {"shown": shown, "better": better, "absent": absent}


def _reducers(report: Report) -> Report:
    """Add every case's methods, the one of the least total time first."""
    shown = [
        row | {"tokens": case["tokens"], "pays": "yes" if row["total"]["median"] < 1 else "no"}
        for case in report["cases"].values()
        for row in sorted(walk(case, "methods.*name"), key=lambda row: row["total"]["median"])
    ]
    return {"shown": shown}


def _answers(report: Report) -> Report:
    """Add the sides of every list of questions, and the answers that lost their key word."""
    sides, lost = [], []
    for asked in walk(report, "lists.*list"):
        for side, figures in asked["sides"].items():
            sides.append(
                figures | {"side": side, "list": asked["list"], "accepted": asked["accepted"]}
            )
        for row in asked["rows"]:
            base = row["sides"]["base"]
            for side, answer in row["sides"].items():
                if base["accepted"] and not answer["accepted"]:
                    texts = {"answer": _short(answer["answer"]), "base": _short(base["answer"])}
                    lost.append({"question": row["id"], "side": side} | texts)
    return {"sides": sides, "lost": lost}


def _short(text: str) -> str:
    """Return the beginning of an answer on one line."""
    line = " ".join(text.split()).replace("|", "/")
    return line if len(line) <= _MOST_CHARACTERS else f"{line[: _MOST_CHARACTERS - 1]}…"


def shipped_parts(report: Report) -> Report:
    """Add the parts of a shipped model's corpus by name, and its form and recommendation."""
    form = report["module"]["form"]
    parts = []
    for name, part in report["corpus"].items():
        digests = [
            pair
            for split, of in part["files"].items()
            for pair in (of.items() if isinstance(of, Mapping) else [("", of)])
        ]
        parts.append(part | {"part": part_label(f"_part_{name}"), "digests": digests})
    return {
        "parts": parts,
        "deviations": ModuleForm.model_validate(form | {"positions": "none"}).deviations(),
        "recommended": report.get("recommended", {"merge": "all", "raw_tail": 0}),
    }


def part_label(suffix: str) -> str:
    """Return the name of a test text for people, from the suffix of its numbers."""
    return PART_LABELS.get(suffix, suffix.removeprefix("_part_"))


ROWS: Final[dict[str, Callable[[Report], Report]]] = {
    "distill_step": _distill_step,
    "ladder": _ladder,
    "cache_capacity": _cache_capacity,
    "engine_smollm2": _engine_smollm2,
    "stock_tasks": _stock_tasks,
    "generation_quality": _generation_quality,
    "token_reduction": _token_reduction,
    "second_half": _second_half,
    "reducers": _reducers,
    "answers": _answers,
    "shipped_model": shipped_parts,
}
