"""Identity of a backbone's version, without loading it."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download

from umim_core.backbone.tokenizer_files import resolve_backbone
from umim_core.errors import BackboneError
from umim_core.store.artifacts import sha256_bytes, sha256_file


def backbone_identity(name: str, revision: str | None) -> str:
    """Return what tells one version of a backbone from another, without loading it.

    For an embedded name or a directory it is the SHA-256 of configuration and weights, for a hub
    repository the commit.

    Raises:
        BackboneError: If the repository is neither cached nor reachable.
    """
    directory = Path(resolve_backbone(name))
    if directory.is_dir():
        files = sorted([*directory.glob("config.json"), *directory.glob("*.safetensors")])
        sums = [f"{path.name} {sha256_file(path)}" for path in files]
        return sha256_bytes("\n".join(sums).encode())
    try:
        found = snapshot_download(name, revision=revision, allow_patterns=["config.json"])
    except (OSError, ValueError) as error:
        raise BackboneError(
            "a backbone must be an embedded name, a directory or a reachable hub repository",
            name,
            "Check the name; offline machines need a local directory.",
        ) from error
    return f"{name}@{Path(found).name}"  # the folder of a snapshot is named by its commit
