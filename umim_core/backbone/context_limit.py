"""Trained context of a backbone: the longest input by its configuration, without its weights."""

from __future__ import annotations

from transformers import AutoConfig

from umim_core.backbone.tokenizer_files import resolve_backbone


def trained_context(name: str, revision: str | None = None) -> int | None:
    """Return the most tokens of an input by a backbone's configuration.

    Returns:
        None if there is no configuration within reach, or it names no number.

    Raises:
        BackboneError: If a packaged backbone is not here and cannot be fetched, or a GGUF file
            cannot be converted.
    """
    try:
        config = AutoConfig.from_pretrained(
            resolve_backbone(name), revision=revision, trust_remote_code=False
        )
    except (OSError, ValueError):  # a name of a service, or a directory of a tokenizer alone
        return None
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) else None
