"""Saved view of MLflow's page of runs, so that a link opens directly on the comparison.

MLflow keeps the state of a page in the browser, or in a tag of the experiment that a link names
(``viewStateShareKey``). A link that also holds a filter ignores the tag, so the filter is in it.
"""

from __future__ import annotations

import json
from typing import Final

VIEW: Final = "umim-comparison"
_PARAMS: Final = ("model", "tau", "setting")  # model is short enough for the plot's labels
_METRICS: Final = ("token_reduction", "top1", "kl", "accuracy_umim")
_SECTION: Final = "umim-comparison-section"


def view_state() -> str:
    """Return the state as MLflow reads it: a list of columns and a parallel coordinates plot."""
    columns = [f"params.`{name}`" for name in _PARAMS] + [f"metrics.`{name}`" for name in _METRICS]
    chart = {
        "type": "PARALLEL",
        "uuid": "umim-comparison-chart",
        "metricSectionId": _SECTION,
        "isGenerated": False,
        "deleted": False,
        "runsCountToCompare": 100,
        "selectedParams": list(_PARAMS),
        "selectedMetrics": list(_METRICS),
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
