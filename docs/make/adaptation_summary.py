"""The page of all adaptations to tasks: base, WT, the task's rules alone, adapted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from docs.make.document import RESULTS
from tasks.paper.adaptation_rows import adaptation_rows
from tasks.report.page_template import Report, filled_in, page
from umim_core.adaptation.settings import ADAPTED, WT

_CONTROLS: Final = ("input-adapter", "lora")
_SETTINGS: Final = (WT, "WT + Rules", ADAPTED, *_CONTROLS)
_CELL: Final = "{change!p:+.1f}, TR {token_reduction:.1%}"
_SUMMARY: Final = page(
    """\
# Adaptation to tasks

@ rows
< task       | {task}
< checkpoint | {checkpoint}
questions    | {questions.test:,}
base, %      | {base.accuracy!p:.1f}
WT           | {WT}
WT + Rules   | {WT + Rules}
Task-Adapted | {Task-Adapted}
input adapter | {input-adapter}
LoRA         | {lora}

Change of the accuracy against the base model in points, mean over seeds, ± half of a 95 % interval
over questions and, of several seeds, over seeds. TR is that of the context. Rules of the task are
those of the lowest threshold that was run, chosen before measuring. *Input adapter* and *LoRA* are
controls: as many weights, trained by DPO on the same answers without merging; their pages name the
learning rates. *No gain*: no trained step was better on validation questions than the base model.
""",
    rows=lambda report: report["rows"],
)


def adaptation_summary(folder: Path = RESULTS) -> str:
    """Return the page with a row of every result file of an adaptation; empty while there is none.

    Args:
        folder: That of the result files.
    """
    rows, names = [], []
    for file in sorted(folder.glob("adaptation-*.json")):
        report: Report = json.loads(file.read_text(encoding="utf-8"))
        names.append(f"[{report['name']}]({file.stem}.md)")
        rows += [{**report, **place, **_cells(place)} for place in report["backbones"]]
    if not rows:
        return ""
    return f"{_SUMMARY({'rows': rows})} Curves and all settings: {', '.join(names)}.\n"


def _cells(place: Report) -> dict[str, str]:
    """Return what the table shows of each setting of a backbone; a dash for none."""
    found = dict.fromkeys(_SETTINGS, "–")
    rows = adaptation_rows(place)
    lowest = min((row["tau"] for row in rows if row["tau"] is not None), default=None)
    for row in rows:
        if row["setting"] in found and row["tau"] in (None, lowest):
            shown = row | {"change": {"mean": row["difference"], "std": row["reach"]}}
            kept = row["setting"] in _CONTROLS and row["kept"]
            found[row["setting"]] = "no gain" if kept else filled_in(_CELL, shown)
    return found
