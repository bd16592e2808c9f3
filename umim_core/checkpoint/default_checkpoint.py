"""Default checkpoint: SmolLM2-135M's, or a small one that ships with its backbone."""

from __future__ import annotations

import logging
from typing import Final

from umim_core.checkpoint.checkpoint_files import read_config
from umim_core.embedded.assets import embedded_path
from umim_core.errors import ArtifactError, BackboneError, FetchHashError
from umim_core.packages.model_cache import packaged_directory

DEFAULT_CHECKPOINT: Final = "umim-smollm2-135m-inside"
FALLBACK_CHECKPOINT: Final = "umim-docs-llama"
_log: Final = logging.getLogger("umim")


def default_checkpoint(*, local_files_only: bool = False) -> str:
    """Return the checkpoint of commands and calls that name none.

    It is ``umim-smollm2-135m-inside``, whose backbone is fetched if need be. Where that is
    impossible it is ``umim-docs-llama``, which needs no network, and a line on stderr says so.

    Args:
        local_files_only: Whether the network must not be asked.

    Raises:
        FetchHashError: If the registry gives another file than the specified one.
    """
    directory = embedded_path(DEFAULT_CHECKPOINT, "checkpoint")
    if directory is None:
        return FALLBACK_CHECKPOINT
    backbone = read_config(directory).backbone
    try:
        packaged_directory(backbone, local_files_only=local_files_only)
    except FetchHashError:  # within reach, but not to be trusted
        raise
    except (BackboneError, ArtifactError) as error:
        _log.warning(
            "umim: using %s, since %s is not here (%s; got %s). For %s: umim fetch %s",
            *(FALLBACK_CHECKPOINT, backbone, error.rule, error.value),
            *(DEFAULT_CHECKPOINT, backbone),
        )
        return FALLBACK_CHECKPOINT
    return DEFAULT_CHECKPOINT
