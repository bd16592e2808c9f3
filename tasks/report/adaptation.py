"""Rows, page and figure of a task adaptation, made of ``adaptation.json`` alone.

A row is of a backbone, setting and threshold, over the seeds of a point.

The figure has a panel per backbone: change of accuracy against token reduction, a line per setting
through its thresholds. Error bars are the 95 % intervals that make a change clear; what has no
known error has no bar.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from statistics import fmean, stdev
from typing import Final

from tasks.report.charts import APART, Line, Panel, chart, svg_file
from tasks.report.comparison import shown_name
from tasks.report.render import Report, page
from tasks.run.recipes import recipe_names
from umim_core.adaptation.settings import ADAPTED, WT, find_setting, setting_names

CONTROL: Final = "control"
RULES_ALONE: Final = "WT + Rules"  # what training is compared with, at equal threshold
CLEAR: Final = 2.0  # standard errors over questions
CLEARLY: Final = (
    f"beyond the root of the squares of {CLEAR:g} standard errors over questions and, of several "
    "seeds, of the standard error over seeds times Student's t (97.5 %, one degree less than seeds)"
)
_STUDENT: Final = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Quantile 97.5 % of Student's t with 1 to 9 degrees of freedom; of more it is less."""
_MEANS: Final = (
    *("rules", "token_reduction", "input_reduction", "accuracy", "margin", "gained", "lost"),
    *("difference", "difference_se", "margin_difference", "margin_difference_se"),
)
_TITLE: Final = "Accuracy change against token reduction"
_NEXT_TO_CONTROLS: Final = {"WT + DPO": "DPO", ADAPTED: "DPO after SFT"}


def adaptation_rows(place: Report) -> list[Report]:
    """Return the rows of a backbone, in the order in which its points are listed.

    A row holds the means over seeds of a point's figures, the number of ``seeds``, the ``spread``
    (standard deviation of the accuracy over seeds; None for one) and two differences to the base
    model on the same questions, ``change`` (accuracy) and ``margin_change``, each with ``std``, the
    standard error over questions. ``reach`` and ``margin_reach`` are what they must exceed to be
    clear, see :func:`reach`. ``against`` has ``difference`` and ``reach`` of the accuracy to other
    models, by their names. ``kept`` is True where every training kept its start.
    """
    groups: dict[tuple[str, int | None], list[Report]] = {}
    for point in place["points"]:
        groups.setdefault((point["setting"], point["tau"]), []).append(point)
    return [_row(points) for points in groups.values()]


def _row(points: list[Report]) -> Report:
    mean = {name: _mean(point.get(name) for point in points) for name in _MEANS}
    compared = [point.get("against", {}) for point in points]
    names = dict.fromkeys(name for comparison in compared for name in comparison)
    return {
        **{name: points[0][name] for name in ("setting", "kind", "tau")},
        **mean,
        "trained": any(point["seed"] is not None for point in points),
        "kept": all(point.get("best_step") == 0 for point in points),
        "seeds": len({point["seed"] for point in points} - {None}),
        "spread": _spread(points, "difference"),  # the accuracy's: the base model is the same
        "change": {"mean": mean["difference"], "std": mean["difference_se"]},
        "margin_change": {"mean": mean["margin_difference"], "std": mean["margin_difference_se"]},
        "reach": reach(points, "difference"),
        "margin_reach": reach(points, "margin_difference"),
        "against": {name: _differing([x[name] for x in compared if name in x]) for name in names},
    }


def _differing(seeds: list[Report]) -> Report:
    return {
        "difference": _mean(one["difference"] for one in seeds),
        "reach": reach(seeds, "difference"),
    }


def reach(seeds: list[Report], name: str) -> float | None:
    """Return half the width of a 95 % interval around a mean over seeds; None if it is not known.

    It is the root of two squares: of :data:`CLEAR` standard errors over questions, and of the
    standard error over seeds times Student's t. Where nothing differs, at most 5 % of means lie
    beyond it, whichever of the two is the larger. The spread over seeds holds part of that over
    questions, too, so it errs to the wide side.
    """
    questions, spread = _mean(one.get(f"{name}_se") for one in seeds), _spread(seeds, name)
    if questions is None or spread is None:
        return None if questions is None else CLEAR * questions
    student = _STUDENT[min(len(seeds) - 1, len(_STUDENT)) - 1]
    return math.hypot(CLEAR * questions, student * spread / math.sqrt(len(seeds)))


def _spread(seeds: list[Report], name: str) -> float | None:
    return stdev(one[name] for one in seeds) if len(seeds) > 1 else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def label(row: Report) -> str:
    return f"{row['setting']}" + ("" if row["tau"] is None else f" at τ {row['tau']}")


def clear(difference: float | None, beyond: float | None) -> int:
    """Return 1 or -1 for a difference beyond its :func:`reach`, 0 for one that may be chance."""
    if difference is None or beyond is None or abs(difference) <= beyond:
        return 0
    return 1 if difference > 0 else -1


def _judged(
    row: Report, difference: float, beyond: float | None, unit: str = "points"
) -> dict[str, object]:
    """Return a row with a difference in words, and the side that it is clearly on."""
    words = f"{difference:+.3f}" if unit == "nats" else f"{100 * difference:+.1f}"
    return {"words": f"{label(row)} ({words} {unit})", "side": clear(difference, beyond)}


def comparisons(rows: list[Report]) -> Iterator[tuple[str, list[dict[str, object]]]]:
    """Yield what the rows of a backbone are compared with, in words, and each as judged.

    Trained settings are compared with WT, with the rules alone at equal threshold and with every
    control: first with what is trained like it, then with what is trained longer. A training
    without gain is not compared with controls, for it is none by DPO; nor is a control without
    gain.
    """
    accuracies = [_judged(row, row["difference"], row["reach"]) for row in rows]
    yield "Accuracy against the base model", accuracies
    margins = [_judged(r, r["margin_difference"], r["margin_reach"], "nats") for r in rows]
    yield "Margin against the base model", margins

    others: list[tuple[str, str, dict[str, object]]] = [
        (f"Training, against WT (its own rules, TR {row['token_reduction']:.1%})", WT, {})
        for row in rows
        if row["setting"] == WT
    ]
    alone = "Training, against the rules alone at equal threshold"
    others.append((alone, RULES_ALONE, {}))
    others += [
        (
            f"{words}, against {row['setting']}, which has DPO alone and merges nothing",
            row["setting"],
            {"setting": setting, "kept": False},
        )
        for row in rows
        if row["kind"] == CONTROL and not row["kept"]
        for setting, words in _NEXT_TO_CONTROLS.items()
    ]
    for words, name, fields in others:
        compared = [row for row in rows if name in row["against"] and fields.items() <= row.items()]
        pairs = [(row, row["against"][name]) for row in compared]
        if pairs:  # by question
            yield words, [_judged(row, to["difference"], to["reach"]) for row, to in pairs]


def _place(report: Report, place: Report) -> Report:
    rows, chance = adaptation_rows(place), report.get("chance")
    guesses = chance is not None and (
        clear(place["base"]["accuracy"] - chance, reach([place["base"]], "accuracy")) < 1
    )
    return place | {
        "rows": rows,
        "guesses": guesses,
        "compared": dict(comparisons(rows)),
    }


def adaptation_page(report: Report, figure: str = "adaptation.svg") -> str:
    places = [_place(report, place) for place in report["backbones"]]
    points = [point for place in places for point in place["points"]]
    names = dict.fromkeys(point["setting"] for point in points)
    known = setting_names()
    shown = {
        "title": _TITLE,
        "file": figure,
        "shipped": f"adaptation/{report['name']}" in recipe_names("adaptation/"),
        "clearly": CLEARLY,
        "places": places,
        "settings": [find_setting(n) if n in known else {"name": n} for n in names],
        "offsets": [
            place | {"own": own, "kept": kept}
            for place in places
            if (own := _most_rows(place, WT)) > (kept := _most_rows(place, RULES_ALONE))
        ],
        "trainings": _trainings(report),
        "runs": [point for point in points if point.get("steps") is not None],
        "compared": sum(len(judged) for x in places for judged in x["compared"].values()),
    }
    return page("adaptation.md", report | shown) + "\n"


def _trainings(report: Report) -> list[Report]:
    """Return each training that was run with its most steps, as the training loop counts them."""
    trainings = {"SFT": report.get("sft"), "DPO": report.get("dpo")}
    trainings |= {f"DPO of {name}": by for name, by in report["control_dpo"].items()}
    questions, described = report["questions"], []
    for name, by in trainings.items():
        if by is not None:
            whole = max(1, by["max_epochs"] * questions["train"] // by["batch_size"])
            steps = {"whole": whole, "steps": min(whole, by["max_steps"])}
            selected = min(questions["valid"], by["validation_rows"])
            described.append(by | steps | {"name": name, "selected": selected})
    return described


def _most_rows(place: Report, setting: str) -> int:
    counts = (p.get("rule_rows", 0) for p in place["points"] if p["setting"] == setting)
    return max(counts, default=0)


def adaptation_svg(report: Report) -> str:
    places = report["backbones"]
    own = [adaptation_rows(place) for place in places]
    names = list(dict.fromkeys(row["setting"] for rows in own for row in rows))
    panels = []
    for place, rows in zip(places, own, strict=True):
        lines = [_line(index, rows, name) for index, name in enumerate(names)]
        axes = {
            "title": shown_name(place["backbone"]),
            "xlabel": "Token reduction of the context (%)",
            "ylabel": "Accuracy change against the base model\n(points; bars: 95 % intervals)",
        }
        panels.append(Panel([x for x in lines if x.points], axes=axes, levels=[0.0]))
    return svg_file(chart(panels, height=5.0), f"adaptation-{report['name']}", _TITLE)


def _line(index: int, rows: list[Report], name: str) -> Line:
    """Return a setting's points by rising token reduction, a line where it has thresholds."""
    own = [row for row in rows if row["setting"] == name]
    own.sort(key=lambda row: row["token_reduction"] or 0.0)
    return Line(
        name,
        [(100 * (row["token_reduction"] or 0.0), 100 * row["difference"]) for row in own],
        index,
        [math.nan if row["reach"] is None else 100 * row["reach"] for row in own],
        ["" if row["tau"] is None else f"τ {row['tau']}" for row in own],
        {} if any(row["tau"] is not None for row in own) else APART,
    )
