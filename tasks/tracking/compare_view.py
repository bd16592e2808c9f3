"""Saved views of MLflow's page of runs, so that a link opens directly on a comparison.

MLflow keeps the state of a page in the browser, or in a tag of the experiment that a link names
(``viewStateShareKey``). A link that also holds a filter ignores the tag, so the filter is in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from umim_core.store.artifacts import sha256_bytes

COMPARISON_VIEW: Final = "umim-comparison"
SOURCE_TAG: Final = "umim.source"  # every row has it: MLflow drops rows without it from ``!=``
ADAPTATION_SOURCE: Final = "adaptation"  # tag of a row that is a point of an adaptation's curves
_PARAMS: Final = ("model", "tau", "setting")  # model is short enough for the plot's labels
_AXES: Final = ("recipe", *_PARAMS, "method", "kind")  # a form is too long for a label
_COLUMNS: Final = (*_AXES, "form")
_AGREEMENT: Final = ("token_reduction", "top1", "kl")
_ACCURACY: Final = "accuracy_umim"  # missing where a recipe has no task
_CURVE: Final = ("token_reduction", "difference")
_CURVE_COLUMNS: Final = ("difference_se", "margin_difference", "margin_difference_se")
_FORM: Final = ("depth", "positions", "residual", "merge_depth", "rule_rows")
_ROWS: Final = f"tags.`umim.kind` = 'comparison' and tags.`{SOURCE_TAG}`"
_COMPARED: Final = f"{_ROWS} != '{ADAPTATION_SOURCE}'"
PLOTTED: Final = f"{_COMPARED} and metrics.`{_AGREEMENT[-1]}` > -1"  # MLflow drops rows without it
MOST_ROWS: Final = 1000
_SECTION: Final = "umim-comparison-section"


def adaptation_view(task: str) -> str:
    """Return the name of the view of a task's curves."""
    plain = re.sub("[^0-9A-Za-z_.-]", "-", task)  # what the name of a tag may hold
    digest = "" if plain == task else f"-{sha256_bytes(task.encode())[:8]}"
    return f"umim-adaptation-{plain}{digest}"


def shared_view(
    measured: Collection[str],
    params: Mapping[str, object],
    plotted: Callable[[], Sequence[Mapping[str, object]]],
) -> tuple[str, str] | None:
    """Return name and state of the view that shows a row, as MLflow reads it.

    A comparison of checkpoints is a parallel coordinates plot; the curves of an adaptation are the
    change of accuracy against token reduction, of one task.

    Args:
        measured: Names of the row's metrics.
        params: Its parameters.
        plotted: Asks for those of all rows of a comparison; what is equal in them is no axis of its
            plot.

    Returns:
        None if the row lacks what the plots are about.
    """
    if set(_AGREEMENT) <= set(measured):
        metrics = [*_AGREEMENT, *([_ACCURACY] if _ACCURACY in measured else [])]
        compared = plotted()
        values = ((name, {row[name] for row in compared if name in row}) for name in _AXES)
        plot = {
            "type": "PARALLEL",
            "selectedParams": [name for name, found in values if len(found) > 1],
            "selectedMetrics": metrics,
            "showAllRuns": True,
        }
        return COMPARISON_VIEW, _state("Comparison", _COMPARED, _COLUMNS, metrics, plot)
    if set(_CURVE) <= set(measured):
        reduction, change = ({"key": name, "type": "METRIC"} for name in _CURVE)
        plot = {"type": "SCATTER", "xaxis": reduction, "yaxis": change}
        task = str(params["task"])
        rows = f"{_ROWS} = '{ADAPTATION_SOURCE}' and params.task = '{task}'"
        columns, metrics = (*_PARAMS, "seed"), [*_CURVE, *_CURVE_COLUMNS]
        title = f"Adaptation to {task}"
        return adaptation_view(task), _state(title, rows, columns, metrics, plot)
    return None


def described(params: Mapping[str, object], recipe: str | None) -> dict[str, object]:
    """Return a row's parameters with those that tell rows of several recipes apart."""
    more: dict[str, object] = {} if recipe is None else {"recipe": recipe}
    if "kind" in params:
        parts = [str(params["kind"])]
        parts += [f"{name} {params[name]}" for name in _FORM if params.get(name) is not None]
        more |= {"method": "umim", "form": ", ".join(parts)}
    return {**more, **params}


def _state(
    title: str,
    rows: str,
    params: Sequence[str],
    metrics: Sequence[str],
    plot: Mapping[str, object],
) -> str:
    """Return a list of columns and one plot of the rows that a filter finds."""
    columns = [f"params.`{name}`" for name in params] + [f"metrics.`{name}`" for name in metrics]
    chart = {
        "uuid": "umim-comparison-chart",
        "metricSectionId": _SECTION,
        "isGenerated": False,
        "deleted": False,
        "runsCountToCompare": MOST_ROWS,
        **plot,
    }
    section = {
        "uuid": _SECTION,
        "name": title,
        "columns": 1,
        "cardHeight": 480,
        "display": True,
        "isReordered": True,
        "deleted": False,
        "isGenerated": False,
    }
    state = {
        "searchFilter": rows,
        "orderByKey": "attributes.start_time",
        "orderByAsc": False,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "datasetsFilter": [],
        "selectedColumns": columns,
        "runsHiddenMode": "SHOW_ALL",
        "compareRunCharts": [chart],
        "compareRunSections": [section],
        "isAccordionReordered": True,
        "viewMaximized": False,
    }
    return json.dumps(state, separators=(",", ":"))
