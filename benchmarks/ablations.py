"""Page and figures of an ablation, for ``pages.py``.

A figure ends with the digest of the results it was drawn from, so that one of other results is
seen without drawing it again: another version of the drawing library may give other bytes.
"""

from __future__ import annotations

from pathlib import Path

from tasks.report.ablation_data import AblationData
from tasks.report.ablation_page import FIGURES, ablation_page
from umim_core.store.artifacts import sha256_bytes


def page(text: str) -> str:
    """Return the page of a result file."""
    return ablation_page(AblationData.model_validate_json(text))


def figures(results: Path) -> list[Path]:
    """Return where the figures of a result file lie."""
    return [results.with_name(f"{results.stem}-{name}.svg") for name in FIGURES]


def draw(results: Path) -> None:
    """Draw the figures of a result file."""
    from tasks.report.ablation_figures import figure_svg

    text = results.read_text(encoding="utf-8")
    data = AblationData.model_validate_json(text)
    for path, name in zip(figures(results), FIGURES, strict=True):
        path.write_text(figure_svg(data, name) + _mark(text), encoding="utf-8")


def shows(figure: Path, text: str) -> bool:
    """Return whether a figure is there and shows these results."""
    return figure.is_file() and figure.read_text(encoding="utf-8").endswith(_mark(text))


def _mark(text: str) -> str:
    return f"<!-- results {sha256_bytes(text.encode())} -->\n"
