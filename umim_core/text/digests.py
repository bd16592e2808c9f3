"""Digests of corpus sources, without reading their text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from huggingface_hub import HfApi

# Of answers and of connections, unlike HfHubHTTPError.
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # not marked for export

from umim_core.errors import CorpusError
from umim_core.store.artifacts import directory_digest
from umim_core.text.files import expand
from umim_core.text.sources import HubDataset, Source, TokenIds

_COMMIT: Final = re.compile(r"[0-9a-f]{40}")


def file_digests(sources: Mapping[str, Source]) -> dict[str, str]:
    """Return the SHA-256 of every file that is read in place, by "name:number".

    Raises:
        CorpusError: As `source_digests`.
    """
    return {
        f"{name}:{number}": digest
        for name, source in sources.items()
        for number, digest in enumerate(source_digests(source))
    }


def source_digests(source: Source) -> list[str]:
    """Return the SHA-256 of each file of a source, or a data set's commit.

    The hub is not asked for a commit that is pinned.

    Raises:
        CorpusError: If a file cannot be read, or a data set's commit cannot be asked for and none
            is pinned.
    """
    if not isinstance(source, HubDataset):
        paths = (source.path,) if isinstance(source, TokenIds) else source.paths
        return [file.sha256() for file in expand(paths)]
    if Path(source.name).is_dir():
        return [directory_digest(Path(source.name))]
    if source.revision is not None and _COMMIT.fullmatch(source.revision):
        return [source.revision]
    try:
        return [str(HfApi().dataset_info(source.name, revision=source.revision).sha)]
    except (OSError, HTTPError) as error:
        if source.revision is not None:
            return [source.revision]
        raise CorpusError(
            "a data set must be reachable, or pinned by its revision",
            source.name,
            "Name a revision (a commit), or a local folder.",
        ) from error
