"""Generated parts of README.md: its tables of results, the coloured example and the tree."""

from __future__ import annotations

from typing import Final

from docs.make.adaptation_summary import adaptation_summary
from docs.make.document import RESULTS, ROOT, Document, with_blocks
from docs.make.files import rooms
from docs.make.first_screen import first_screen
from docs.make.reduction_pages import reduction_summary
from tasks.report.comparison_table import comparison
from tasks.report.report_data import ReportData
from tasks.report.tables import table_markdown
from umim_core.checkpoint.checkpoint_files import resolve_checkpoint
from umim_core.embedded.assets import embedded_names
from umim_core.model.compression import compress_text
from umim_core.store.artifacts import canonical_json, directory_digest, sha256_bytes

_README: Final = ROOT / "README.md"
# The first of these checkpoints that is shipped, and a text of its kind.
_EXAMPLES: Final = {
    "umim-smollm2-135m": "The University of California was one of the first in the United States "
    "to offer a course on the history of science. In order to be able to take part, students had "
    "to read a number of books at the beginning of the year, and most of them did so as soon as "
    "possible.",
    "umim-docs-llama": "Return a new array with the same shape and type as a given array. The "
    "default value of this parameter is None, in which case the shape of the input is used. See "
    "the documentation of the base class for more information on how to use this method.",
}


def documents() -> list[Document]:
    """Return README.md and its picture."""
    shipped = embedded_names("checkpoint")
    name, text = next(pair for pair in _EXAMPLES.items() if pair[0] in shipped)
    # Its tokenizer may have to be fetched: whether it is current is known without.
    rules = directory_digest(resolve_checkpoint(name) / "rules")
    digest = sha256_bytes(canonical_json([name, text, rules]).encode())
    picture = Document(
        RESULTS / "compress.svg",
        lambda: compress_text(text, name).view.svg("umim compress") + "\n",
        f"<!-- text and rules {digest} -->\n",
    )
    return [Document(_README, _readme), picture]


def _readme() -> str:
    """Return README.md with the blocks between ``<!-- NAME -->`` and ``<!-- /NAME -->`` anew."""
    text = _README.read_text(encoding="utf-8")
    blocks = {
        "results:smollm2": f"{first_screen()}\n",
        "results:token_reduction": reduction_summary(),
        "results:adaptation": adaptation_summary(),
        "results:embedded": _results(),
        "tree": rooms(),
    }
    return with_blocks(text, blocks)


def _results() -> str:
    data = ReportData.model_validate_json((RESULTS / "embedded.json").read_text(encoding="utf-8"))
    host = ", ".join(f"{name} {value}" for name, value in data.host.items())
    table = table_markdown(comparison(data.rows, data.config))
    return f"{table}\n\nMachine: {host}. Source: docs/results/embedded.json.\n"
