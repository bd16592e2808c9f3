"""Saved view of MLflow's page of runs, so that a link opens directly on the comparison.

MLflow keeps the state of a page in the browser, or in a tag of the experiment that a link names
(``viewStateShareKey``). A link that also holds a filter ignores the tag, so the filter is in it.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Final

VIEW: Final = "umim-comparison"
_PARAMS: Final = ("model", "tau", "setting")  # model is short enough for the plot's labels
_AGREEMENT: Final = ("token_reduction", "top1", "kl")
_ACCURACY: Final = "accuracy_umim"  # missing where a recipe has no task
_SECTION: Final = "umim-comparison-section"


def view_state(measured: Collection[str]) -> str | None:
    """Return the state as MLflow reads it: a list of columns and a parallel coordinates plot.

    Args:
        measured: Metrics of the newest row. MLflow hides a plot with a metric that no run has.

    Returns:
        None if the row lacks what the plot is about, such as that of a baseline.
    """
    if not set(_AGREEMENT) <= set(measured):
        return None
    metrics = [*_AGREEMENT, *([_ACCURACY] if _ACCURACY in measured else [])]
    columns = [f"params.`{name}`" for name in _PARAMS] + [f"metrics.`{name}`" for name in metrics]
    chart = {
        "type": "PARALLEL",
        "uuid": "umim-comparison-chart",
        "metricSectionId": _SECTION,
        "isGenerated": False,
        "deleted": False,
        "runsCountToCompare": 100,
        "selectedParams": list(_PARAMS),
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
        "searchFilter": "tags.`umim.kind` = 'comparison'",
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
