"""Text to time on that every installation has: docstrings no shipped checkpoint was trained on."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Final

from umim_core.embedded.docstring_corpus import SKIPPED_FOLDERS, split_of
from umim_core.embedded.modules import read_modules
from umim_core.errors import CorpusError

_PACKAGE: Final = "transformers"  # this one depends on it, hence it is always there


def held_out_text(site_packages: Path | None = None) -> str:
    """Return the docstrings of the modules that the embedded corpus keeps for testing.

    Args:
        site_packages: Folder that holds the package; the running interpreter's by default.

    Raises:
        CorpusError: If there are none, as in an installation without source files.
    """
    site = site_packages or Path(sysconfig.get_path("purelib"))
    paths = [
        file
        for file in sorted((site / _PACKAGE).rglob("*.py"))
        if split_of(file.relative_to(site).as_posix()) == "test"
        and not SKIPPED_FOLDERS.intersection(file.relative_to(site).parts)
    ]
    documents = [text for found in read_modules(paths) for _, _, text, _ in found or []]
    if not documents:
        raise CorpusError(
            f"the default text needs the docstrings of {_PACKAGE}",
            f"none in {site}",
            "Give a text file.",
        )
    return "\n\n".join(documents)
