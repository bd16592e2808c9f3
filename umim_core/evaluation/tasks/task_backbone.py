"""Tokens and trained context of the model that lm-eval runs a task with.

lm-eval hands the model's arguments to a task as part of its metadata; its own RULER tasks find
their tokenizer the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from transformers import PreTrainedTokenizerBase

from umim_core.backbone.shape import trained_context
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.evaluation.model_args import checkpoint_config

# Arguments of models that name a backbone: ``umim``'s, ``hf``'s, and those of services.
_NAMES: Final = ("backbone", "pretrained", "model")


def task_context(metadata: Mapping[str, object]) -> int | None:
    """Return how many tokens the backbone was trained for that a model's arguments name.

    ``max_length`` (else the backbone's configuration) is the context. Arguments that name no
    backbone are those of ``umim``: the checkpoint's counts, else the default checkpoint's.

    Returns:
        The tokens; None if they are unknown.

    Raises:
        CheckpointError: If the checkpoint cannot be found.
    """
    most = metadata.get("max_length")
    return most if isinstance(most, int) else trained_context(*_named(metadata))


def task_tokenizer(metadata: Mapping[str, object]) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the model that a task's metadata name; see `task_context`.

    Raises:
        BackboneError: If it cannot be loaded.
        CheckpointError: If the checkpoint cannot be found.
    """
    tokenizer = metadata.get("tokenizer")
    if isinstance(tokenizer, str):
        return load_tokenizer(tokenizer)
    name, revision = _named(metadata)
    return load_tokenizer(name, revision=revision)


def _named(metadata: Mapping[str, object]) -> tuple[str, str | None]:
    """Return the backbone's name and revision."""
    revision = metadata.get("revision")
    for key in _NAMES:
        name = metadata.get(key)
        if isinstance(name, str):
            return name, revision if isinstance(revision, str) else None
    checkpoint = metadata.get("checkpoint")
    config = checkpoint_config(checkpoint if isinstance(checkpoint, str | Checkpoint) else None)
    return config.backbone, config.backbone_revision
