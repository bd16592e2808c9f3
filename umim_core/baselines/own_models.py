"""Models of a baseline's own: published weights with their tokenizer, loaded frozen."""

from __future__ import annotations

from typing import Any

from huggingface_hub import ResolvedRevision
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.hub import resolve_revision

from umim_core.backbone.model_files import freeze, load_complete
from umim_core.backbone.tokenizer_files import check_place, load_tokenizer


def load_own_model(
    what: str, name: str, kind: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model of a class of transformers, with its fast tokenizer, by directory or repository.

    For messages, ``what`` says what is loaded.
    """
    check_place(what, name, "config.json", None, False)
    commit = hub_commit(name)
    complete = f"a trained {what}"
    model = load_complete(kind, name, what=what, name=name, complete=complete, revision=commit)
    return freeze(model), load_tokenizer(name, revision=commit)


def hub_commit(name: str) -> str | None:
    """Return the commit that a hub's repository is at now; None for a directory."""
    resolved = resolve_revision(name, None)
    return resolved.resolved if isinstance(resolved, ResolvedRevision) else None
