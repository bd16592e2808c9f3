"""Merge checkpoints on the Hugging Face hub; everything else of the package works offline.

It imports no torch: `umim compress` reads a checkpoint without it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # its own, httpx or httpx2

from umim_core.addresses import beside, is_path
from umim_core.backbone.tokenizer_files import first_line
from umim_core.checkpoint.checkpoint_files import named_config
from umim_core.checkpoint.checkpoint_index import own_checkpoint
from umim_core.errors import CheckpointError

_FILES: Final = ["config.json", "model.safetensors", "manifest.json", "rules/**"]
_REPOSITORY: Final = re.compile(r"[\w.-]+/[\w.-]+")


def fetch_checkpoint(
    name: str | Path, revision: str | None = None, *, local_files_only: bool = False
) -> str | Path:
    """Return a local name or directory unchanged; download what looks like a hub repository.

    What was downloaded is checked on loading.
    """
    here = own_checkpoint(str(name)) or Path(name).exists() or is_path(str(name))
    if here or not _REPOSITORY.fullmatch(str(name)):
        return name
    try:
        return snapshot_download(
            str(name), revision=revision, allow_patterns=_FILES, local_files_only=local_files_only
        )
    except (HFValidationError, httpx.HTTPError, OSError) as error:
        raise _hub_error(str(name), error, beside(str(name))) from error


def upload_checkpoint(directory: Path, repo_id: str, private: bool, commit_message: str) -> str:
    """Upload a checkpoint directory to ``owner/name``, made if need be; return its address."""
    backbone = named_config(directory).backbone
    if Path(backbone).is_absolute() or Path(backbone).exists():
        rule = "a published checkpoint must name its backbone so that others can load it"
        remedy = "Publish the backbone first, then distil with its repository's name."
        raise CheckpointError(rule, backbone, remedy)
    api = HfApi()
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo_id, folder_path=directory, commit_message=commit_message
        )
    except (HFValidationError, httpx.HTTPError, OSError) as error:
        raise _hub_error(repo_id, error) from error
    return str(commit)


def _hub_error(repo_id: str, error: Exception, remedy: str = "") -> CheckpointError:
    return CheckpointError(
        "a checkpoint must be an embedded name, a directory, or a hub repository within reach",
        f"{repo_id!r}: {first_line(error)}",
        remedy or "Check the name; offline machines need a directory.",
    )
