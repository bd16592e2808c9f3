"""Reading models and tokenizers from names, directories and hub repositories; never their code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from umim_core.embedded.assets import embedded_names, embedded_path
from umim_core.errors import BackboneError, ConfigError

DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
AUTO: Final = "auto"


def resolve_backbone(name: str) -> str:
    """Return the directory of an embedded backbone, or ``name`` unchanged."""
    path = embedded_path(name, "backbone")
    return name if path is None else str(path)


def load_tokenizer(
    name: str, *, revision: str | None = None, local_files_only: bool = False
) -> PreTrainedTokenizerBase:
    """Load a tokenizer by embedded name, directory or hub repository.

    Args:
        name: Where it is.
        revision: Hub revision to pin.
        local_files_only: Whether the network must not be asked.

    Raises:
        BackboneError: If it cannot be loaded, or has code of its own.
    """
    where = resolve_backbone(name)
    try:
        settings = get_tokenizer_config(
            where, revision=revision, local_files_only=local_files_only, trust_remote_code=False
        )
        _refuse_code("tokenizer", name, settings)
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            where, revision=revision, local_files_only=local_files_only, trust_remote_code=False
        )
    except (OSError, ValueError, ImportError) as error:
        raise _load_error("tokenizer", name, error) from error
    return tokenizer


def load_model(
    name: str,
    *,
    revision: str | None,
    dtype: str,
    device_map: str | dict[str, int | str] | None = None,
    attn_implementation: str | None = None,
    local_files_only: bool = False,
) -> PreTrainedModel:
    """Load a causal language model.

    Args:
        name: Embedded name, directory or hub repository.
        revision: Hub revision to pin.
        dtype: A key of ``DTYPES``, or ``auto`` for what the weights were published in.
        device_map: As in transformers.
        attn_implementation: As in transformers.
        local_files_only: Whether the network must not be asked.

    Raises:
        BackboneError: If it cannot be loaded, or has code of its own.
        ConfigError: If the data type is unknown.
    """
    if dtype not in (*DTYPES, AUTO):
        raise ConfigError(
            f"dtype must be one of {[*sorted(DTYPES), AUTO]}", dtype, "Choose one of them."
        )
    where = resolve_backbone(name)
    try:
        config, _ = PreTrainedConfig.get_config_dict(
            where, revision=revision, local_files_only=local_files_only
        )
        _refuse_code("backbone", name, config)
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            where,
            revision=revision,
            dtype=DTYPES.get(dtype, dtype),
            device_map=device_map,
            attn_implementation=attn_implementation,
            local_files_only=local_files_only,
            use_safetensors=True,
            trust_remote_code=False,  # None would ask the user, who might agree
        )
    except (OSError, ValueError, ImportError, KeyError, SafetensorError) as error:
        raise _load_error("backbone", name, error) from error
    return model


def _refuse_code(what: str, name: str, settings: Mapping[str, object]) -> None:
    """Refuse what brings code, even where transformers has an implementation of its own."""
    if "auto_map" in settings:
        raise BackboneError(
            f"a {what} must come without code of its own",
            f"{name!r}: auto_map {settings['auto_map']}",
            "Take auto_map out of a local copy if transformers' own implementation is meant.",
        )


def _load_error(what: str, name: str, error: Exception) -> BackboneError:
    reason = str(error).strip().splitlines()
    return BackboneError(
        f"a {what} must be an embedded name ({', '.join(embedded_names())}), a directory with "
        "safetensors weights, or a reachable hub repository without code of its own",
        f"{name!r}: {reason[0] if reason else type(error).__name__}",
        "Check the name; offline machines need a local directory.",
    )
