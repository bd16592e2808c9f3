"""Tokens and trained context of the model that lm-eval runs a task with.

lm-eval hands the model's arguments to a task as part of its metadata; its own RULER tasks find
their tokenizer the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from transformers import PreTrainedTokenizerBase

from umim_core.backbone.context_limit import trained_context
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.evaluation.model_args import checkpoint_config
from umim_core.task_sets.text_tokens import TextTokens

# Arguments of models that name a backbone: ``umim``'s, ``hf``'s, and those of services.
_NAMES: Final = ("backbone", "pretrained", "model")


@dataclass(frozen=True)
class TaskBackbone:
    """The backbone as far as a task must know it.

    Attributes:
        tokens: Its tokens.
        context: Tokens of an input that it was trained for; None if unknown.
    """

    tokens: TextTokens
    context: int | None


def task_backbone(metadata: Mapping[str, object]) -> TaskBackbone:
    """Find the backbone that a model's arguments name.

    ``tokenizer`` (else the model's own) measures texts; ``max_length`` (else the backbone's
    configuration) is the context. Arguments that name no backbone are those of ``umim``: the
    checkpoint's counts, else the default checkpoint's.

    Args:
        metadata: A task's metadata.

    Raises:
        BackboneError: If the tokenizer cannot be loaded.
        CheckpointError: If the checkpoint cannot be found.
    """
    name, revision = _named(metadata)
    tokenizer = task_tokenizer(metadata)
    most = metadata.get("max_length")
    context = most if isinstance(most, int) else trained_context(name, revision)
    return TaskBackbone(TextTokens(tokenizer), context)


def task_tokenizer(metadata: Mapping[str, object]) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the model that a task's metadata name; see `task_backbone`.

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
