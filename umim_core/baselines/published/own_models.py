"""Models of a baseline's own: published weights with their tokenizer, loaded frozen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from huggingface_hub import ResolvedRevision
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils.hub import resolve_revision

from umim_core.backbone.model_files import check_complete, freeze, loading
from umim_core.backbone.tokenizer_files import check_place, load_error, load_tokenizer, refuse_code


@dataclass(frozen=True)
class OwnModel:
    """A frozen model with its tokenizer.

    Attributes:
        model: The model.
        tokenizer: Its tokenizer, a fast one.
        commit: Commit of the hub's repository that it was loaded from; None for a directory.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    commit: str | None = None


def load_own_model(
    what: str,
    name: str,
    kind: Any,
    trained: str,
    *,
    revision: str | None = None,
    local_files_only: bool = False,
) -> OwnModel:
    """Load a model with its tokenizer.

    Args:
        what: What is loaded, for messages.
        name: Directory or hub repository, with safetensors weights.
        kind: Class of transformers that loads it.
        trained: What a complete model would be, for messages.
        revision: Hub revision to pin.
        local_files_only: Whether the network must not be asked.

    Raises:
        BackboneError: If it cannot be loaded, has code of its own, or lacks weights.
    """
    check_place(what, name, "config.json", revision, local_files_only)
    commit = hub_commit(name, revision, local_files_only=local_files_only)
    revision = commit or revision  # all files of one commit
    try:
        config, _ = PreTrainedConfig.get_config_dict(
            name, revision=revision, local_files_only=local_files_only
        )
        refuse_code(what, name, config)
        with loading():
            loaded: Any = kind.from_pretrained(
                name,
                revision=revision,
                output_loading_info=True,
                local_files_only=local_files_only,
                use_safetensors=True,
                trust_remote_code=False,
            )
    except (OSError, ValueError, ImportError, KeyError, SafetensorError) as error:
        raise load_error(what, name, error) from error
    model: PreTrainedModel
    model, report = loaded
    check_complete(what, name, report["missing_keys"], trained)
    tokenizer = load_tokenizer(name, revision=revision, local_files_only=local_files_only)
    return OwnModel(freeze(model), tokenizer, commit)


def hub_commit(name: str, revision: str | None, *, local_files_only: bool = False) -> str | None:
    """Return the commit that a revision of a hub's repository is now; None for a directory."""
    resolved = resolve_revision(name, revision, local_files_only=local_files_only)
    return resolved.resolved if isinstance(resolved, ResolvedRevision) else None
