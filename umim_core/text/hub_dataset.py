"""Data sets of the Hugging Face hub, or of local folders of the same names."""

from __future__ import annotations

from typing import Any

from umim_core.errors import CorpusError


def open_hub_dataset(name: str, config: str | None, split: str, revision: str | None = None) -> Any:
    """Open one split of a data set.

    Args:
        name: Hub id, or a local folder.
        config: Configuration; None for the default one.
        split: Split; slices such as ``test[:100]`` are allowed.
        revision: Commit, to pin the data.

    Returns:
        A ``datasets.Dataset``: rows as dictionaries, in order.

    Raises:
        CorpusError: If there is no such data set, configuration or split, or it cannot be reached.
    """
    import datasets  # takes a second to import: only for those who need it

    try:
        return datasets.load_dataset(name, config, split=split, revision=revision)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        pinned = "" if revision is None else f", revision {revision!r}"
        # OSError: no network, offline mode, unknown id, missing file; ValueError: unknown
        # configuration or split; RuntimeError: the data set is a script.
        raise CorpusError(
            f"data set {name!r} must be loadable (config {config!r}, split {split!r}{pinned})",
            f"{type(error).__name__}: {error}",
            "Check the names; offline, name a local folder or download the data set beforehand.",
        ) from error
