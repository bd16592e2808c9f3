"""A saved view of MLflow's page of runs, so that a link opens directly on the comparison.

MLflow keeps the state of a page in the browser, or in a tag of the experiment that a link names
(``viewStateShareKey``). A link that also holds a filter ignores the tag, so the filter is in it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Final

COMPARISON_VIEW: Final = "umim-comparison"
SOURCE_TAG: Final = "umim.source"  # every row has it: MLflow drops rows without it from ``!=``
ADAPTATION_SOURCE: Final = "adaptation"  # tag of a row that is a point of an adaptation's curves
AGREEMENT: Final = ("token_reduction", "top1", "kl")  # metrics of every row of a comparison
_ACCURACY: Final = "accuracy_umim"  # missing where a recipe has no task
_AXES: Final = ("recipe", "model", "tau", "setting", "method", "kind")  # a form is too long a label
_FORM: Final = ("depth", "positions", "residual", "merge_depth", "rule_rows")
_ROWS: Final = f"tags.`umim.kind` = 'comparison' and tags.`{SOURCE_TAG}`"
_COMPARED: Final = f"{_ROWS} != '{ADAPTATION_SOURCE}'"
PLOTTED: Final = f"{_COMPARED} and metrics.`{AGREEMENT[-1]}` > -1"  # MLflow drops rows without it
MOST_ROWS: Final = 1000
_SECTION: Final = "umim-comparison-section"


def adaptation_filter(task: str) -> str:
    """Return the filter that finds the points of a task's curves."""
    return f"{_ROWS} = '{ADAPTATION_SOURCE}' and params.task = '{task}'"


def described(params: Mapping[str, object], recipe: str | None) -> dict[str, object]:
    """Return a row's parameters with those that tell rows of several recipes apart."""
    more: dict[str, object] = {} if recipe is None else {"recipe": recipe}
    if "kind" in params:
        parts = [str(params["kind"])]
        parts += [f"{name} {params[name]}" for name in _FORM if params.get(name) is not None]
        more |= {"method": "umim", "form": ", ".join(parts)}
    return {**more, **params}


def comparison_view(measured: Collection[str], compared: Sequence[Mapping[str, object]]) -> str:
    """Return the state, as MLflow reads it, of a list of all rows and a parallel plot of them.

    What is not in it has MLflow's default.

    Args:
        measured: Names of the metrics of a row.
        compared: Parameters of all plotted rows; what is equal in them is no axis.
    """
    metrics = [*AGREEMENT, *([_ACCURACY] if _ACCURACY in measured else [])]
    values = ((name, {row[name] for row in compared if name in row}) for name in _AXES)
    columns = [f"params.`{name}`" for name in (*_AXES, "form")]
    chart = {
        "uuid": "umim-comparison-chart",
        "metricSectionId": _SECTION,
        "isGenerated": False,
        "deleted": False,
        "runsCountToCompare": MOST_ROWS,
        "type": "PARALLEL",
        "selectedParams": [name for name, found in values if len(found) > 1],
        "selectedMetrics": metrics,
        "showAllRuns": True,
    }
    section = {
        "uuid": _SECTION,
        "name": "Comparison",
        "columns": 1,
        "cardHeight": 480,
        "display": True,
        "isReordered": True,
        "deleted": False,
        "isGenerated": False,
    }
    state = {
        "searchFilter": _COMPARED,
        "selectedColumns": columns + [f"metrics.`{name}`" for name in metrics],
        "runsHiddenMode": "SHOW_ALL",
        "compareRunCharts": [chart],
        "compareRunSections": [section],
        "isAccordionReordered": True,
    }
    return json.dumps(state, separators=(",", ":"))
