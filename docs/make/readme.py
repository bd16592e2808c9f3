"""Generated parts of README.md: the results table, the coloured example and the tree."""

from __future__ import annotations

import re
from typing import Final

from docs.make.document import RESULTS, ROOT, Document
from docs.make.files import rooms
from tasks.report.comparison_table import comparison
from tasks.report.report_data import ReportData
from tasks.report.tables import table_markdown
from umim_core import UMIM

_README: Final = ROOT / "README.md"
_CHECKPOINT: Final = "umim-docs-llama"
_TEXT: Final = (
    "Return a new array with the same shape and type as a given array. The default value of this "
    "parameter is None, in which case the shape of the input is used. See the documentation of the "
    "base class for more information on how to use this method."
)


def documents() -> list[Document]:
    """Return README.md and its picture."""
    return [Document(_README, _readme), Document(RESULTS / "compress.svg", _example)]


def _readme() -> str:
    """Return README.md with the blocks between ``<!-- NAME -->`` and ``<!-- /NAME -->`` anew."""
    text = _README.read_text(encoding="utf-8")
    for name, block in (("results:embedded", _results()), ("tree", rooms())):
        between = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        text = between.sub(lambda match, block=block: match[1] + block + match[2], text)
    return text


def _results() -> str:
    data = ReportData.model_validate_json((RESULTS / "embedded.json").read_text(encoding="utf-8"))
    host = ", ".join(f"{name} {value}" for name, value in data.host.items())
    table = table_markdown(comparison(data.rows))
    return f"{table}\n\nMachine: {host}. Source: docs/results/embedded.json.\n"


def _example() -> str:
    return UMIM.from_pretrained(_CHECKPOINT).compress(_TEXT).view.svg("umim compress") + "\n"
